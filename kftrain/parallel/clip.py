"""The norm of all gradients, and gradients scaled down to a limit: on the device, nothing waits for a number."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from kftrain.parallel.shape import NORM_AXES
from kftrain.parallel.sharded import local


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this process's part of each gradient; parameters without one are left out."""
    return [local(gradient) for parameter in parameters if (gradient := parameter.grad) is not None]


def counted_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients that this process adds to the norm: where several have copies, the first one's count.

    Gradients of copies along `replicate` are no matter: the norm is not summed over these.
    """
    return local_gradients(parameter for parameter in parameters if _is_counted(parameter))


def has_copies(parameters: Iterable[torch.Tensor]) -> bool:
    """Tell whether there are parameters whose gradients another process counts."""
    return not all(map(_is_counted, parameters))


def _is_counted(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    mesh = parameter.device_mesh
    places = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), parameter.placements, strict=True)
    return not any(axis in NORM_AXES and place and placement.is_replicate() for axis, place, placement in places)


def total_norm(gradients: list[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """Return the Euclidean norm of all gradients as one vector, a scalar in fp32 on the device. Collective.

    `group`: the processes that have different parts of the gradients; None where this one has all of them.
    """
    # A process without gradients takes part with 0, for the others wait for it.
    norms = torch._foreach_norm(gradients) if gradients else [torch.zeros((), device=device)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if group is None:
        return norm
    square = norm.double().square()  # a square in fp32 would overflow for norms that are fine
    dist.all_reduce(square, group=group)
    total: torch.Tensor = square.sqrt().float()
    return total


def clip(gradients: list[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scale gradients of this norm down to the limit, in place, as `torch.nn.utils.clip_grad_norm_` does."""
    # The host does not know whether the norm is above the limit, or finite: the factor is at most 1, and where it is no
    # number the optimizer skips the step.
    if gradients:
        torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
