"""A strategy is an ordered list of transforms of a model's parts: from a plain module to one that trains on the mesh.

The module has no memory for its weights yet, and is given it, and their values, afterwards (initialize.py). Order
matters: recomputing wraps the blocks first, what comes after it spreads what came of it.

`FullyShard` (fully_shard.py) does all that shards, `Replicate` is `ddp`, by torch's own (replicas.py). In bf16 the
weights and what enters the model or a block are cast, gradients come back in bf16 and are summed in `precision.reduce`;
buffers stay as they are. Gradients are summed over processes, never averaged: of three the loss times three would be
rounded otherwise than the loss. One process alone has nothing to share and gets no wrapper; `Formats` gives it the same
numbers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kftrain.core.plugins import user_code
from kftrain.errors import ConfigError
from kftrain.parallel.chunked_logits import ChunkLogits
from kftrain.parallel.compression.momenta import LocalRule
from kftrain.parallel.compression.replicas import CompressReplicas
from kftrain.parallel.compression.shards import CompressShards
from kftrain.parallel.context import CutSequences
from kftrain.parallel.distributed import Distributed, Transform
from kftrain.parallel.expert import SpreadExperts
from kftrain.parallel.float8 import Float8Products
from kftrain.parallel.formats import DTYPES, WorkingCopies, cast_inputs
from kftrain.parallel.fully_shard import FullyShard
from kftrain.parallel.initialize import Places, give_memory, places_of, set_hooks, stored_parameter
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.replicas import HierarchicalSums, Replicas
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.shape import Shape
from kftrain.parallel.sharded import Team, gather_whole, index_of, local
from kftrain.parallel.strategies import choose_strategy, resolve_sharding
from kftrain.parallel.tensor import SplitTensors
from kftrain.parallel.topology import count_equal_nodes

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory that a container may have, in the second and the first version of control groups."""


@dataclass(frozen=True)
class ToDevice:
    """Moves the whole model to this process's device."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Move parameters and buffers; what has no memory yet is given it there later (initialize.py)."""
        device = distributed.mesh.world.device
        # Not by `to`, which refuses tensors without memory.
        distributed.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class NarrowMasters:
    """Keeps the parameters in bf16 alone; before they have memory, and before they are spread."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Give the parameters another format."""
        for parameter in distributed.model.parameters():
            give_memory(parameter, torch.empty_like(parameter, dtype=torch.bfloat16))


@dataclass(frozen=True)
class Formats:
    """Computes and sums in the configured number formats where nothing is sharded."""

    compute: str
    reduce: str

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Cast what enters the blocks, and ask for copies of the parameters unless fp32 is computed and summed."""
        compute, reduce = DTYPES[self.compute], DTYPES[self.reduce]
        cast_inputs(distributed.model, blocks, compute, until_fit=compute == torch.float32)
        if {self.compute, self.reduce} != {"fp32"}:
            # Made when the first step begins: by then the parameters have their values.
            # A pipeline does not say when it begins with a micro batch.
            several = distributed.mesh.shape.pipeline > 1
            copies = functools.cache(lambda: WorkingCopies(distributed.model, compute, reduce, several))
            distributed.around_step.append(lambda: copies().in_place())
            distributed.after_backward.append(lambda: copies().hand_over())
            distributed.before_micro_batch.append(lambda is_last: copies().expect(is_last))
            distributed.list_gradients = lambda: list(copies().sums.values())


@dataclass(frozen=True)
class Replicate:
    """Keeps the whole model on each process, whose gradients are summed along the axis `replicate`."""

    compute: str
    reduce: str
    bucket_bytes: int | None = None
    hierarchical: bool = False
    """Sum within each node first, where there are several with several processes each."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Cast what enters the blocks, and let torch replicate the model; it must be on its device.

        Raises ConfigError for hierarchical sums on GPUs.
        """
        mesh, compute, reduce = distributed.mesh, DTYPES[self.compute], DTYPES[self.reduce]
        cast_inputs(distributed.model, blocks, compute, until_fit=compute == torch.float32)
        nodes = _sum_over_nodes(mesh) if self.hierarchical else None
        replicas = Replicas(distributed, compute, reduce, self.bucket_bytes, nodes)
        # The same group for the team: matrices that one process computes for all are those of these replicas.
        distributed.team = Team((mesh.group(["replicate"]),))
        distributed.around_step.append(replicas.computing)
        distributed.before_micro_batch.append(replicas.exchange)


def _sum_over_nodes(mesh: Mesh) -> HierarchicalSums | None:
    world, num_nodes = mesh.world, count_equal_nodes(mesh.world.places)
    if world.device.type != "cpu":
        what, fix = "NCCL chooses the order of its sums itself", "set it to false, or use zero1 with replicate"
        raise ConfigError(what, where="parallel.hierarchical", value=True, fix=fix)
    shape = Shape(replicate=num_nodes, shard=world.size // num_nodes)
    return HierarchicalSums(Mesh(shape, world)) if num_nodes > 1 else None


def list_transforms(
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    within_blocks: Sequence[Transform],
    shape: Shape,
    split_logits: bool = False,
    forward_only: bool = False,
    loss_chunk_tokens: int = 0,
    rule: LocalRule | None = None,
) -> list[Transform]:
    """List the transforms of a configuration on a mesh, in their order.

    `within_blocks`: what is done to single blocks, after they are split and before they are spread.
    `split_logits`: the code that computes the loss takes logits that are split over the axis `tensor`.
    `forward_only`: there will be no backward pass. `loss_chunk_tokens`: see `ChunkLogits`; 0: whole logits.
    `rule`: see `MomentumSums`.
    """
    is_split = shape.tensor > 1
    splitting = SplitTensors(parallel.sequence_parallel, split_logits, loss_chunk_tokens)
    first: list[Transform] = [splitting] if is_split else []
    first += [SpreadExperts()] if shape.expert > 1 else []
    first += [CutSequences()] if shape.context > 1 else []
    first += [NarrowMasters()] if precision.master == "bf16" else []
    first += [Float8Products()] if precision.compute == "float8" else []
    first += [ChunkLogits(loss_chunk_tokens, is_split)] if loss_chunk_tokens else []
    first += within_blocks
    formats = (precision.compute, precision.reduce)
    is_compressed = parallel.compression.kind != "none" and not forward_only
    if is_compressed and (parallel.stage == "ddp" or shape.size == 1):
        return [*first, ToDevice(), CompressReplicas(parallel, rule), Formats(*formats)]
    if shape.replicate * shape.num_shards == 1:
        return [*first, ToDevice(), Formats(*formats)]
    if parallel.stage == "ddp" and shape.island_size == shape.replicate:
        return [*first, ToDevice(), Replicate(*formats, parallel.bucket_bytes, parallel.hierarchical)]
    sharding = resolve_sharding(parallel.stage, parallel.exchange)
    packing = [CompressShards(parallel.compression)] if is_compressed else []
    return [*first, FullyShard(*formats, sharding, parallel.offload, forward_only), *packing]


def distribute(model: nn.Module, strategy: Sequence[Transform], mesh: Mesh, blocks: Sequence[str]) -> Distributed:
    """Apply a strategy to a model, which is then ready to train when its parameters have values.

    `model` is in fp32, and has the same parts on all processes. Collective. Raises ConfigError.
    """
    # Hooks are taken off first, or what parameters turn into would have them too, and call them with parts. Registered
    # first they run last: by then gradients are those of all samples, summed over every axis.
    distributed, hooks = Distributed(model, mesh), ParameterHooks(places_of(model))
    if hooks.are_there:
        distributed.after_backward.append(hooks)
    for transform in strategy:
        transform.apply(distributed, blocks)
    hooks.require_whole()
    return distributed


class ParameterHooks:
    """The hooks of a model's parameters, taken from them before they are spread, and called by us once a step.

    What a parameter becomes has no hooks, so that torch does not call them with the gradients of parts.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._hooks = {name: set_hooks(stored_parameter(slots[0]), None, None) for name, slots in places.items()}
        self._hooked = [name for name, hooks in self._hooks.items() if any(hook is not None for hook in hooks)]
        self._kinds = {name: type(stored_parameter(slots[0])) for name, slots in places.items()}

    @property
    def are_there(self) -> bool:
        """True where a parameter has one."""
        return bool(self._hooked)

    def require_whole(self) -> None:
        """Raises ConfigError for a parameter that is spread by now, and has what is for whole ones only."""
        for name, slots in self._places.items():
            odd = "a hook" if self._hooks[name][1] else "" if self._kinds[name] is nn.Parameter else self._kinds[name]
            if odd and isinstance(stored_parameter(slots[0]), DTensor):
                raise ConfigError(
                    "a type of its own, or a hook after accumulation, is for parameters that are not spread",
                    where=f"model {name}",
                    value=odd,
                    fix="use nn.Parameter with attributes, register_hook, parallel.strategy: ddp, or one process",
                )

    @torch.no_grad()
    def __call__(self) -> None:
        """Call the hooks with the gradients of a step. Collective where they are spread. Raises UserCodeError."""
        # All processes skip the same ones: by now a parameter has a gradient on all of them, or on none.
        for name in self._hooked:
            of_gradient, of_parameter = self._hooks[name]
            parameter = stored_parameter(self._places[name][0])
            if parameter.grad is None or not (of_gradient or of_parameter):
                continue
            with user_code(f"a hook of model {name}"):
                own = local(parameter.grad)
                whole = gather_whole(own, parameter.grad)
                for hook in list((of_gradient or {}).values()):
                    answer = hook(whole)
                    whole = whole if answer is None else answer.reshape(whole.shape)
                # In place: the optimizer reads this process's part. Before the other kind of hook, which torch calls
                # with a parameter whose gradient is there.
                own.copy_(whole[index_of(parameter.grad)])
                for hook in list((of_parameter or {}).values()):
                    hook(parameter)


def resolve_strategy(
    parallel: ParallelConfig, model: nn.Module, mesh: Mesh, num_micro_batches: int, half: bool
) -> tuple[ParallelConfig, str]:
    """Return the configuration with a strategy in place of `auto`, and a line that says which one and why, or ''.

    `model`: as it was built, before it is spread. Collective. Raises ConfigError where nothing can be offloaded.
    """
    shape = mesh.shape
    _require_memory_elsewhere(parallel, mesh)
    if parallel.stage != "auto" or shape.replicate * shape.num_shards == 1:
        return parallel, ""
    memory_bytes = min(mesh.world.gather(measure_memory(mesh.world.device)))
    split = shape.tensor * shape.pipeline  # along these a process has its part of the parameters only
    parameter_bytes = 4 * sum(parameter.numel() for parameter in model.parameters()) // split
    # The smallest memory of all, so that all processes come to the same answer.
    choice = choose_strategy(parameter_bytes, memory_bytes, shape.num_shards, num_micro_batches > 1, half)
    line = f"parallel.strategy: auto takes {choice.strategy}: {choice.reason}"
    return parallel.model_copy(update={"strategy": choice.strategy}), line


def measure_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory; on the CPU this process's share of what the container or the host has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        limits += [int(text)] if text.isdecimal() else []  # "max" where the container has no limit
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _require_memory_elsewhere(parallel: ParallelConfig, mesh: Mesh) -> None:
    if not parallel.offload:
        return
    on_cpu, is_alone = mesh.world.device.type == "cpu", mesh.shape.replicate * mesh.shape.num_shards == 1
    if on_cpu or is_alone:
        raise ConfigError(
            "there is no accelerator whose memory would be relieved"
            if on_cpu
            else "one process alone shards nothing, so nothing of it can be offloaded",
            where="parallel.offload",
            value=True,
            fix=f"set it to false, or {'train on GPUs' if on_cpu else 'use two processes'}",
        )
