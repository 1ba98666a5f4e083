"""Sharding by FSDP2: each block and the root of a model along the axis `shard`, copies of them along `replicate`.

`torch.distributed.fsdp.fully_shard` (Zhao et al. 2023, arXiv:2304.11277) does all stages of ZeRO (strategies.py). The
mesh has two axes: sharded inside, replicated across (hybrid sharding). On CPUs two things are done in another way.

Gradients: gloo has no reduce-scatter. torch computes it as an all-reduce, whose other parts are thrown away. Here each
process sends every other one its part, and adds up what it was sent: of W processes each sends (W - 1) / W of its
gradients instead of 2 (W - 1) / W. Parts are added in the order of the ranks, so that a sum is the same every time.

Units of a model that only computes forward: FSDP2 gathers a unit into one buffer and copies the parameters out of it,
gloo fills a buffer of its own first, and the buffer of the unit before is kept to the end of the next exchange: three
units at a time. Here the large matrices of a unit are units of their own, all gathered where the unit's forward begins
and freed where it ends. So whatever the unit does with its matrices it finds them whole; and the buffers of an exchange
hold one matrix instead of a whole unit.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from kftrain.errors import ConfigError
from kftrain.parallel.distributed import Agreement, Distributed
from kftrain.parallel.formats import DTYPES
from kftrain.parallel.gradients import UsedParameters
from kftrain.parallel.sharded import local
from kftrain.parallel.strategies import Sharding

MIN_PIECE_BYTES = 4 << 20
"""Least size of a piece. An exchange for each smaller module would cost more time than it saves memory."""


@dataclass(frozen=True)
class FullyShard:
    """Shards each block and the root along the axis `shard`, with copies along `replicate`."""

    compute: str
    reduce: str
    sharding: Sharding
    offload: bool = False
    forward_only: bool = False
    """True where there will be no backward pass: on CPUs a unit is then gathered in pieces, which takes less memory."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Make the parameters distributed tensors; offloaded, they are on the host.

        Raises ConfigError for a parameter that has no dims, or is not contiguous.
        """
        model, roots = distributed.model, distributed.roots
        shape, mesh = distributed.mesh.shape, distributed.mesh.device_mesh()
        for name, parameter in model.named_parameters():
            if not parameter.dim() or not parameter.is_contiguous():
                fix = "give it the shape [1], make it contiguous(), or use parallel.strategy: ddp"
                what = "a parameter without dims, or in another order of memory, cannot be sharded"
                raise ConfigError(what, where=f"model {name}", fix=fix)
        axes = ("shard",) if shape.replicate == 1 else ("replicate", "shard")
        options: dict[str, Any] = {
            "mesh": mesh[axes],
            "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[self.compute], reduce_dtype=DTYPES[self.reduce]),
            "reshard_after_forward": self.sharding.reshard_after_forward,
            **({"offload_policy": CPUOffloadPolicy(pin_memory=True)} if self.offload else {}),
        }
        distributed.needs_same_calls = True  # a unit is gathered when it is called, and gathering is collective
        # When filled: filling puts new objects in the places of distributed parameters, which would not be watched.
        distributed.when_filled.append(functools.partial(_watch_used_parameters, distributed))
        distributed.before_micro_batch.append(functools.partial(self._prepare_micro_batch, roots))
        on_cpu = distributed.mesh.world.device.type == "cpu"
        for name, own_mesh in distributed.units.items():  # before the blocks, which take the parameters that are left
            choose_cut = functools.partial(_choose_cut, own_mesh["shard"].size())
            own_options = {**options, "mesh": own_mesh[axes], "shard_placement_fn": choose_cut}
            fully_shard(model.get_submodule(name), **own_options)
        if self.forward_only and on_cpu:
            fully_shard_in_pieces(model, blocks, options)
            return
        for name in blocks:  # before the roots, which take the parameters that are left
            fully_shard(model.get_submodule(name), **options)
        for root in roots:
            # A stage takes what the one before has sent as it is, such as an auxiliary loss in fp32.
            policy = replace(options["mp_policy"], cast_forward_inputs=root is model)
            fully_shard(root, **{**options, "mp_policy": policy})
        for unit in [module for module in roots.modules() if isinstance(module, FSDPModule)]:
            unit.set_gradient_divide_factor(1.0)  # a sum: the loss is divided by the count of all terms already
            unit.set_force_sum_reduction_for_comms(True)  # or torch asks for a product, which gloo does not know
        if shape.num_shards > 1 and on_cpu:
            reduce_by_exchange(roots)

    def _prepare_micro_batch(self, roots: nn.ModuleList, is_last: bool) -> None:
        """Tell torch what to exchange and what to free after the backward pass of the next micro batch."""
        for root in roots:
            assert isinstance(root, FSDPModule)
            if self.sharding.exchange == "step":  # until then each process adds up whole gradients of its own samples
                root.set_requires_gradient_sync(is_last)
            else:  # parts are summed along `shard` after each micro batch, along `replicate` once, at the end
                root.set_requires_all_reduce(is_last)
            if self.sharding.keep_gathered:  # until the optimizer changes the parts: then a whole that is kept is stale
                root.set_reshard_after_backward(is_last)


def _choose_cut(num_processes: int, parameter: nn.Parameter) -> Shard:
    """Return the dim along which a parameter of a unit with another mesh is cut: the first, if that has equal parts."""
    # Such units hold few large things, such as the experts of a process: cut between these, some would have none.
    has_parts = local(parameter).shape[0] % num_processes == 0
    return Shard(0 if has_parts or parameter.dim() < 2 or parameter.shape[1] % num_processes else 1)


def _watch_used_parameters(distributed: Distributed) -> None:
    """Let the processes agree in each step on the parameters that none of them has used."""
    used = UsedParameters(distributed.model, distributed.mesh.shape.island_size, distributed.roots, distributed.names)
    used.when_dropped = distributed.when_dropped
    distributed.agreements.append(Agreement(used.take, used.drop_unused))
    distributed.note_gradients.append(used.note)


class Allocates:
    """The memory of an exchange, which FSDP2 asks it for."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for what is exchanged, or for the result."""
        return torch.empty(*size, dtype=dtype, device=device)


class ExchangedSums(Allocates):
    """torch's protocol `ReduceScatter` for tensors on the CPU: each process is sent its part by all, and sums it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        """Memory for received parts, which grows to the largest unit; fresh memory costs as much time as the exchange.
        Bytes, which are viewed as whatever type a unit has."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum this process's part of a vector over all: `[W * n]` -> `[n]`, written to `output_tensor`. Collective."""
        # All units share the buffer: it is free again when this returns, because nothing here is asynchronous.
        assert not async_op and op == dist.ReduceOp.SUM, (async_op, op)
        received = self._take_buffer(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(sum_rows(received.view(group.size(), -1)))

    def _take_buffer(self, like: torch.Tensor) -> torch.Tensor:
        if self._buffer.numel() < like.nbytes:
            self._buffer = torch.empty(like.nbytes, dtype=torch.uint8)
        return self._buffer[: like.nbytes].view(like.dtype)


def sum_rows(parts: torch.Tensor) -> torch.Tensor:
    """Sum rows one after the other, `[W, n]` -> `[n]`, in fp32 at least.

    Rows of fp32 are added into the first one, which `parts` then no longer has.
    """
    # In bf16 each of the W - 1 sums would be rounded; so it is rounded once, when the caller copies the result.
    first, *others = parts.unbind()
    total = first.float() if first.dtype in (torch.bfloat16, torch.float16) else first
    for part in others:
        total.add_(part)
    return total


def reduce_by_exchange(model: nn.Module) -> None:
    """Let all units of a sharded model on the CPU reduce their gradients by `ExchangedSums`."""
    reduce_scatter = ExchangedSums()
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]


def fully_shard_in_pieces(model: nn.Module, blocks: Sequence[str], options: dict[str, Any]) -> None:
    """Shard the blocks and the root, each after its pieces. `options`: arguments of `fully_shard`. Collective."""
    # Inner modules first: fully_shard leaves out of a unit what already belongs to another one. Pieces are not freed
    # after their own forward, since the unit may still read their weights: _gather_with frees them.
    units = [*(model.get_submodule(name) for name in blocks), model]
    pieces = [find_pieces(model, unit, [other for other in units if other is not unit]) for unit in units]
    for unit, parts in zip(units, pieces, strict=True):
        for part in parts:
            fully_shard(part, **{**options, "reshard_after_forward": False})
        fully_shard(unit, **options)
        if parts:
            _gather_with(unit, parts)


def find_pieces(model: nn.Module, unit: nn.Module, others: Sequence[nn.Module]) -> list[nn.Module]:
    """List the modules below a unit, inner ones first, whose own parameters are large and of no other module.

    `others`: The other units; where one is nested in this unit, its modules are skipped.
    """
    numbers = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    inner = {id(part) for other in others if other in set(unit.modules()) for part in other.modules()}

    def is_piece(module: nn.Module) -> bool:
        own = list(module.parameters(recurse=False))
        return (
            module is not unit
            and not isinstance(module, FSDPModule)  # it is sharded already, along the axes of another mesh
            and id(module) not in inner
            and not isinstance(module, nn.ModuleList | nn.ModuleDict)  # FSDP2 refuses what has no forward
            and type(module).forward is not nn.Module.forward
            and all(numbers[id(parameter)] == 1 for parameter in module.parameters())  # a tied one has two homes
            and sum(parameter.nbytes for parameter in own) >= MIN_PIECE_BYTES
        )

    return [module for module in unit.modules() if is_piece(module)][::-1]


def _gather_with(unit: nn.Module, pieces: Sequence[nn.Module]) -> None:
    """Keep the pieces whole from the beginning of the unit's forward to its end."""
    parts = [piece for piece in pieces if isinstance(piece, FSDPModule)]

    def gather(*_: Any) -> None:
        for part in parts:
            part.unshard()

    def free(*_: Any) -> None:
        for part in parts:
            part.reshard()

    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free)
