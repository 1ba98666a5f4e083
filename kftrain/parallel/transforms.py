"""A strategy is an ordered list of transforms of a model's parts: from a plain module to one that trains on the mesh.

The module has no memory for its weights yet, and is given it, and their values, afterwards (initialize.py). Order
matters: recomputing wraps the blocks first, what comes after it spreads what came of it.

`FullyShard`: `torch.distributed.fsdp.fully_shard` on each block and on the root (Zhao et al. 2023, arXiv:2304.11277),
for all stages of ZeRO (strategies.py). The mesh has two axes: sharded inside, replicated across (hybrid sharding).
`Replicate`: `ddp`, by torch's own (replicas.py). In bf16 the weights and what enters the model or a block are cast,
gradients come back in bf16 and are summed in `precision.reduce`; buffers stay as they are. Gradients are summed over
processes, never averaged: of three the loss times three would be rounded otherwise than the loss. One process alone has
nothing to share and gets no wrapper; `Formats` gives it the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from kftrain.errors import ConfigError
from kftrain.parallel.distributed import Agreement, Distributed, Transform
from kftrain.parallel.formats import DTYPES, WorkingCopies, cast_inputs
from kftrain.parallel.gradients import UsedParameters
from kftrain.parallel.hooks import ParameterHooks
from kftrain.parallel.initialize import places_of
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.pieces import fully_shard_in_pieces
from kftrain.parallel.reduce_scatter import reduce_by_exchange
from kftrain.parallel.replicas import Replicas
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.shape import Shape
from kftrain.parallel.sharded import Team
from kftrain.parallel.strategies import Sharding, sharding_of
from kftrain.parallel.tensor import SplitTensors


@dataclass(frozen=True)
class Recompute:
    """Activations of the blocks are computed again in the backward pass, instead of being kept."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Wrap the blocks. Raises ConfigError where there are none."""
        if not blocks:
            raise ConfigError(
                "the model has no blocks that could be recomputed",
                where="train.activation_checkpointing",
                value="blocks",
                fix="name them in a method blocks() of the model, or set it to none",
            )
        chosen = {id(distributed.model.get_submodule(name)) for name in blocks}
        for parent in list(distributed.model.modules()):
            for name, child in list(parent.named_children()):
                if id(child) in chosen:
                    setattr(parent, name, checkpoint_wrapper(child))


@dataclass(frozen=True)
class ToDevice:
    """Moves the whole model to this process's device."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Move parameters and buffers; what has no memory yet is given it there later (initialize.py)."""
        device = distributed.mesh.world.device
        distributed.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Formats:
    """Number formats where nothing is sharded."""

    compute: str
    reduce: str

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Cast what enters the blocks, and ask for copies of the parameters unless fp32 is computed and summed."""
        compute, reduce = DTYPES[self.compute], DTYPES[self.reduce]
        cast_inputs(distributed.model, blocks, compute, fitting=compute == torch.float32)
        if {self.compute, self.reduce} != {"fp32"}:
            # Made when the first step begins: by then the parameters have their values.
            copies = functools.cache(lambda: WorkingCopies(distributed.model, compute, reduce))
            distributed.around_step.append(lambda: copies().in_place())
            distributed.after_backward.append(lambda: copies().hand_over())


@dataclass(frozen=True)
class Replicate:
    """All of it on each process."""

    compute: str
    reduce: str

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Cast what enters the blocks, and let torch replicate the model; it must be on its device."""
        model, mesh = distributed.model, distributed.mesh
        compute, reduce = DTYPES[self.compute], DTYPES[self.reduce]
        cast_inputs(model, blocks, compute, fitting=compute == torch.float32)
        group = mesh.group(["replicate"])
        replicas = Replicas(model, group, mesh.world.device, compute, reduce)
        distributed.team = Team((group,))
        distributed.around_step.append(replicas.computing)
        distributed.before_micro_batch.append(replicas.exchange)


@dataclass(frozen=True)
class FullyShard:
    """Each block and the root sharded along the axis `shard` and replicated along `replicate`, by FSDP2."""

    compute: str
    reduce: str
    sharding: Sharding
    offload: bool = False
    forward_only: bool = False
    """True where there will be no backward pass: on CPUs a unit is then gathered in pieces, which takes less memory."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Make the parameters distributed tensors; offloaded, they are on the host. Raises ConfigError."""
        model, shape, mesh = distributed.model, distributed.mesh.shape, distributed.mesh.device_mesh()
        for name, parameter in model.named_parameters():
            if not parameter.dim() or not parameter.is_contiguous():
                fix = "give it the shape [1], make it contiguous(), or use parallel.strategy: ddp"
                what = "a parameter without dims, or in another order of memory, cannot be sharded"
                raise ConfigError(what, where=f"model {name}", fix=fix)
        options: dict[str, Any] = {
            "mesh": mesh["shard"] if shape.replicate == 1 else mesh["replicate", "shard"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[self.compute], reduce_dtype=DTYPES[self.reduce]),
            "reshard_after_forward": self.sharding.reshard_after_forward,
            **({"offload_policy": CPUOffloadPolicy(pin_memory=True)} if self.offload else {}),
        }
        distributed.needs_same_calls = True
        distributed.when_filled.append(functools.partial(_watch_used_parameters, distributed))
        distributed.before_micro_batch.append(functools.partial(self._prepare_micro_batch, model))
        on_cpu = distributed.mesh.world.device.type == "cpu"
        if self.forward_only and on_cpu:
            fully_shard_in_pieces(model, blocks, options)
            return
        for name in blocks:  # before the root, which takes the parameters that are left
            fully_shard(model.get_submodule(name), **options)
        fully_shard(model, **options)
        for unit in [module for module in model.modules() if isinstance(module, FSDPModule)]:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # or torch asks for a product, which gloo does not know
        if shape.shard > 1 and on_cpu:
            reduce_by_exchange(model)

    def _prepare_micro_batch(self, model: nn.Module, is_last: bool) -> None:
        """Tell torch what to exchange and what to free after the backward pass of the next micro batch."""
        assert isinstance(model, FSDPModule)
        if self.sharding.exchange == "step":  # until then each process adds up whole gradients of its own samples
            model.set_requires_gradient_sync(is_last)
        else:  # parts are summed along `shard` after each micro batch, along `replicate` once, at the end
            model.set_requires_all_reduce(is_last)
        if self.sharding.keep_gathered:  # until the optimizer changes the parts: then a whole that is kept is stale
            model.set_reshard_after_backward(is_last)


def _watch_used_parameters(distributed: Distributed) -> None:
    """Let the processes agree in each step on the parameters that none of them has used."""
    used = UsedParameters(distributed.model, distributed.mesh.world)
    distributed.agreements.append(Agreement(used.take, used.drop_unused))


def strategy_of(
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    recompute_blocks: bool,
    shape: Shape,
    split_logits: bool = False,
    forward_only: bool = False,
) -> list[Transform]:
    """List the transforms of a configuration on a mesh, in their order.

    `split_logits`: the code that computes the loss takes logits that are split over the axis `tensor`.
    `forward_only`: there will be no backward pass.
    """
    first: list[Transform] = [SplitTensors(parallel.sequence_parallel, split_logits)] if shape.tensor > 1 else []
    first += [Recompute()] if recompute_blocks else []
    formats = (precision.compute, precision.reduce)
    if shape.replicate * shape.shard == 1:
        return [*first, ToDevice(), Formats(*formats)]
    if parallel.stage == "ddp" and shape.size == shape.replicate:
        return [*first, ToDevice(), Replicate(*formats)]
    sharding = sharding_of(parallel.stage, parallel.exchange)
    return [*first, FullyShard(*formats, sharding, parallel.offload, forward_only)]


def distribute(model: nn.Module, strategy: Sequence[Transform], mesh: Mesh, blocks: Sequence[str]) -> Distributed:
    """Apply a strategy to a model, which is then ready to train when its parameters have values.

    `model` is in fp32, and has the same parts on all processes. Collective. Raises ConfigError.
    """
    # Hooks are taken off first, or what parameters turn into would have them too, and call them with parts. Registered
    # first they run last: by then gradients are those of all samples, summed over every axis.
    distributed, hooks = Distributed(model, mesh), ParameterHooks(places_of(model))
    distributed.after_backward.append(hooks)
    for transform in strategy:
        transform.apply(distributed, blocks)
    hooks.require_whole()
    return distributed
