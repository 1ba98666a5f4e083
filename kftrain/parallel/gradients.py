"""The gradients of a step: those of parameters that were not used, the norm of all, and the limit of that norm.

Gradients are reduced as one long vector per block, so that all processes must bring the same ones: where a process has
none (its samples have reached another expert), it brings zeros. A parameter that none of them has used has no gradient
at all, as on one process: the optimizer leaves it alone, rather than to decay it.

Before torch 2.13 FSDP2 cannot bring zeros. There a step whose processes have used different parameters is an error.

Whole parameters are there while a unit computes. What a forward changes of them would be lost, and memory that it gives
them is none that they are gathered into; so both are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kftrain.errors import ConfigError, UserCodeError
from kftrain.parallel.shape import NORM_AXES
from kftrain.parallel.sharded import local

Gathered = dict[nn.Parameter, torch.Tensor]
"""Sharded parameter -> the whole one that stands in its place while its unit's forward runs, the same object always."""


class UsedParameters:
    """The parameters of a sharded model that have had a gradient since the last step."""

    def __init__(
        self, model: nn.Module, num_processes: int, roots: nn.ModuleList | None = None, names: Sequence[str] = ()
    ) -> None:
        """Watch a model. `roots`: the outermost units, if it is none; `names`: of all processes, in the same order."""
        roots = nn.ModuleList([model]) if roots is None else roots
        self._brings_zeros = all(hasattr(root, "set_reduce_scatter_unused_params") for root in roots)
        for root in roots:
            assert isinstance(root, FSDPModule)
            if self._brings_zeros:
                root.set_reduce_scatter_unused_params(True)
        self.when_dropped: Sequence[Callable[[nn.Parameter], None]] = ()
        """Work on a parameter before its zero gradient is removed."""
        self._num_processes = num_processes
        named = {name.replace(_CHECKPOINT_PREFIX, ""): parameter for name, parameter in model.named_parameters()}
        self._parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._order = list(names) or list(self._parameters)
        self._used: set[str] = set()
        self._names = {parameter: name for name, parameter in named.items()}
        self._gathered: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}
        """Name -> a whole parameter, and its memory and version before the first forward."""
        watch_units(roots, self._watch)

    def take(self) -> list[float]:
        """Return 1 for each parameter that this process has used since the last call, 0 for the others.

        Raises UserCodeError for one that a forward has changed.
        """
        changed = next((name for name, (whole, before) in self._gathered.items() if _memory(whole) != before), None)
        if changed is not None:
            raise UserCodeError(
                "a forward changes a parameter, of which it has a copy that is thrown away",
                where="model.forward",
                value=changed,
                fix="change it in the model's after_step, or compute with a changed value: weight.clamp(…)",
            )
        used = [float(name in self._used) for name in self._order]
        self._used.clear()
        return used

    def note(self) -> None:
        """Take those for used that have a gradient now, whichever way it came: not all ways call hooks."""
        self._used.update(name for name, (whole, _) in self._gathered.items() if whole.grad is not None)

    def drop_unused(self, num_users: list[float]) -> None:
        """Remove the zero gradients of parameters that no process has used. `num_users`: what all `take`, summed.

        Raises ConfigError where only some processes have used one, and this torch cannot bring zeros for the others.
        """
        for name, users in zip(self._order, num_users, strict=True):
            parameter = self._parameters.get(name)
            if parameter is None:  # of another stage
                continue
            if not users:
                for work in self.when_dropped:
                    work(parameter)
                parameter.grad = None
            elif users < self._num_processes and not self._brings_zeros:
                raise ConfigError(
                    "only some processes have used a parameter in this step",
                    where=f"model {name}",
                    value=f"torch {torch.__version__}",
                    fix="use torch 2.13 or newer, or one process",
                )

    def _watch(self, unit: nn.Module, gathered: Gathered) -> None:
        for parameter, whole in gathered.items():
            name = self._names[parameter]
            self._gathered[name] = whole, _memory(whole)
            if whole.requires_grad:
                # On the whole one: the sharded one is given zeros too where this process has not used it.
                whole.register_post_accumulate_grad_hook(lambda _whole, name=name: self._used.add(name))  # type: ignore[no-untyped-call]

        # Before FSDP's own hook after the forward, which puts the sharded parameters back.
        def keep_flags(*_inputs: object) -> None:
            for parameter, whole in gathered.items():  # what is gathered the next time is as this one is
                parameter.requires_grad_(whole.requires_grad)
                parameter._backward_hooks = parameter._backward_hooks or whole._backward_hooks  # the engine refuses it

        unit.register_forward_hook(keep_flags, prepend=True)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Make a mark that differs once `tensor.data` is set, or numbers are changed in place."""
    return tensor.untyped_storage()._cdata, tensor._version


def watch_units(model: nn.Module, work: Callable[[nn.Module, Gathered], object]) -> None:
    """Call `work` for each unit of FSDP2 once: when its first forward begins, and its parameters are whole."""

    # This hook is younger than FSDP's, so it runs after FSDP has put the whole parameters in place. It pairs them with
    # the sharded ones by their order, which is the same before and after.
    def begin(unit: nn.Module, _inputs: object) -> None:
        handles.pop(unit).remove()
        pairs = zip(sharded.pop(unit), unit.parameters(), strict=True)
        work(unit, {own: whole for own, whole in pairs if whole is not own})

    units: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    sharded = {unit: list(unit.parameters()) for unit in units}
    handles = {unit: unit.register_forward_pre_hook(begin) for unit in units}


def collect_local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this process's part of each gradient; parameters without one are left out."""
    return [local(gradient) for parameter in parameters if (gradient := parameter.grad) is not None]


def collect_counted_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients that this process adds to the norm: where several have copies, the first one's count.

    Gradients of copies along `replicate` are no matter: the norm is not summed over these.
    """
    return collect_local_gradients(parameter for parameter in parameters if _is_counted(parameter))


def has_copies(parameters: Iterable[torch.Tensor]) -> bool:
    """Tell whether there are parameters whose gradients another process counts."""
    return not all(map(_is_counted, parameters))


def _is_counted(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    # Along an axis that the norm is summed over, a copy would count once for each process: only the first one's does.
    mesh = parameter.device_mesh
    places = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), parameter.placements, strict=True)
    return not any(axis in NORM_AXES and place and placement.is_replicate() for axis, place, placement in places)


def compute_total_norm(
    gradients: list[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """Return the Euclidean norm of all gradients as one vector, a scalar in fp32 on the device. Collective.

    `group`: the processes that have different parts of the gradients; None where this one has all of them.
    """
    # A process without gradients takes part with 0, for the others wait for it.
    norms = torch._foreach_norm(gradients, 2.0, torch.float32) if gradients else [torch.zeros((), device=device)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if group is None:
        return norm
    square = norm.double().square()  # a square in fp32 would overflow for norms that are fine
    dist.all_reduce(square, group=group)
    total: torch.Tensor = square.sqrt().float()
    return total


def clip_gradients(gradients: list[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scale gradients of this norm down to the limit, in place, as `torch.nn.utils.clip_grad_norm_` does."""
    # The host does not know whether the norm is above the limit, or finite: the factor is at most 1, and where it is no
    # number the optimizer skips the step.
    if gradients:
        torch._foreach_mul_(gradients, (norm + 1e-6).reciprocal_().mul_(limit).clamp_(max=1.0))
