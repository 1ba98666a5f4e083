"""Batch normalisation over all processes: exactly what one process with all samples of the step would compute.

torch's `SyncBatchNorm` needs GPUs, and counts the rows that fill up a share. Here the statistics are those of the rows
that count, whatever their number on each process, on any device (Ioffe and Szegedy 2015, arXiv:1502.03167): sums travel
in the forward pass, their gradients in the backward pass, and all processes keep the same running statistics.

Samples that share statistics are a part of what is computed. On several processes they are all samples of a step, in
every layout; so a step may have one micro batch only, since the samples of one of several would depend on the layout.
One process takes each micro batch by itself, as everybody does; a run goes on with as many samples together as it began
with (`train.statistics`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kftrain.errors import ConfigError, UserCodeError
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.shape import DATA_AXES
from kftrain.parallel.tensor_exchange import Peers, exchange

KNOWN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class GlobalBatchNorms:
    """The batch norms of a model that are trained. Until `connect` each process counts its own rows."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        """Replace the forwards of the norms in training mode. Raises ConfigError for what cannot be computed."""
        self._peers: Peers | None = None
        self._weight: torch.Tensor | None = None
        self._mesh = mesh
        norms = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        if mesh.num_data_ranks > 1:
            for name, module in norms:
                _require_known(name, module)
        # Norms in evaluation mode keep torch's forward: running statistics need nothing of the other processes.
        self._norms = {name: norm for name, norm in norms if norm.training and type(norm).forward in KNOWN_FORWARDS}
        self.buffer_names = {f"{name}.{key}".lstrip(".") for name, norm in self._norms.items() for key in norm._buffers}
        """Names of the buffers that a forward pass changes: alike on all processes once they are connected."""
        self.are_trained = any(norm.training for _, norm in norms)
        """True where samples share statistics at all."""
        for module in self._norms.values():
            module.forward = functools.partial(self._forward, module)  # type: ignore[method-assign]

    def connect(self, num_micro_batches: int, recomputed: bool) -> None:
        """Take the statistics over all processes from now on. Collective.

        Raises ConfigError where the samples that share them would depend on the layout, or count twice.
        """
        if not self._norms or self._mesh.num_data_ranks == 1:
            return
        if num_micro_batches > 1:
            raise ConfigError(
                "batch normalisation over several processes needs all samples of a step at a time",
                where="train.micro_batch_size",
                value=f"{num_micro_batches} micro batches",
                fix="set it to 0, use GroupNorm or LayerNorm, or one process",
            )
        if recomputed:
            raise ConfigError(
                "a block with batch normalisation that is computed twice counts its samples twice",
                where="train.activation_checkpointing",
                value="blocks",
                fix="set it to none, or use GroupNorm or LayerNorm",
            )
        ranks = dist.get_process_group_ranks(self._mesh.group(DATA_AXES))
        # A group of its own: what the wrappers of the model exchange meanwhile does not mix with it.
        group = dist.new_group(ranks, timeout=self._mesh.world.timeout, use_local_synchronization=True)
        self._peers = Peers(group, len(ranks), dist.get_rank(group))

    def begin(self, weight: torch.Tensor) -> None:
        """Say before a forward pass which rows count: `[rows]` on the device, 0 for those that do not."""
        self._weight = weight

    def _forward(self, module: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return _evaluate(module, x)
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        if self._weight is not None and self._peers is None and x.numel() == x.size(1):  # the probe may look at one row
            raise ConfigError(
                "batch normalisation has one value of each channel, from which nothing is left",
                where="train.micro_batch_size",
                fix="take more samples at a time, or use GroupNorm or LayerNorm",
            )
        shape, dims = [1, -1, *[1] * (x.dim() - 2)], [dim for dim in range(x.dim()) if dim != 1]
        rows = self._weights_of(x).view(-1, *[1] * (x.dim() - 1))
        values = x.float()  # a sum of many rows in bf16 would stop growing
        count = rows.sum() * (x[0, 0].numel() if x.dim() > 2 else 1)
        # Two exchanges, the mean first: the variance from sums of values and squares in one would be the difference of
        # two large numbers. The count travels with the sums, since the host does not know which rows count elsewhere.
        sums = self._sum_over_all(torch.cat([(values * rows).sum(dims), count.view(1)]))
        count = sums[-1].detach()  # counts depend on no parameter
        mean = sums[:-1] / count
        centred = values - mean.view(shape)
        variance = self._sum_over_all((centred.square() * rows).sum(dims)) / count
        _move_running(module, mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        out = centred * torch.rsqrt(variance + module.eps).view(shape)
        if module.affine:
            out = out * module.weight.float().view(shape) + module.bias.float().view(shape)
        return out.to(x.dtype)

    def _weights_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weight of each entry of the first dim, which may be rows with their places one after the other."""
        weight = self._weight
        if weight is None:
            return torch.ones(len(x), device=x.device)
        if len(x) % len(weight):
            raise UserCodeError(
                f"is given {len(x)} entries for {len(weight)} rows: nobody knows which of them count",
                where="batch normalisation",
            )
        return weight.repeat_interleave(len(x) // len(weight))

    def _sum_over_all(self, local: torch.Tensor) -> torch.Tensor:
        if self._peers is None:
            return local
        # Each process has a loss of its own that depends on the sum, so the gradients are summed as well.
        return exchange(local, self._peers.sum_over_all, self._peers.sum_over_all)


def _evaluate(module: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Normalise by the running statistics as torch does; in bf16, too.

    Buffers are fp32 then, and on the CPU torch wants the weights to be so as well.
    """
    weight, bias = (None if value is None else value.float() for value in (module.weight, module.bias))
    mean, variance = module.running_mean, module.running_var
    return F.batch_norm(x, mean, variance, weight, bias, mean is None, 0.0, module.eps)


@torch.no_grad()
def _move_running(module: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Move the running statistics towards those of the batch, as torch does."""
    if module.running_mean is None or module.running_var is None or module.num_batches_tracked is None:
        return
    module.num_batches_tracked.add_(1)
    share: Any = module.momentum
    if share is None:  # a tensor: the host need not know the number
        share = (1.0 / module.num_batches_tracked).to(module.running_mean.dtype)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), share)
    module.running_var.lerp_(variance.to(module.running_var.dtype), share)


def _require_known(name: str, module: _BatchNorm) -> None:
    problem = ""
    if module.training and type(module).forward not in KNOWN_FORWARDS:
        problem = "batch normalisation with a forward of its own is not synchronised over processes"
    elif not module.track_running_stats:
        problem = "batch normalisation without running statistics makes an evaluation depend on its batches"
    if problem:
        raise ConfigError(
            problem,
            where=f"module {name or 'model'}",
            value=type(module).__name__,
            fix="use torch's own with running statistics, GroupNorm or LayerNorm, or launch.processes_per_node: 1",
        )
