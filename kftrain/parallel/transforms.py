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

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from kftrain.errors import ConfigError
from kftrain.parallel.batch_norm import GlobalBatchNorms
from kftrain.parallel.formats import DTYPES, WorkingCopies, cast_inputs
from kftrain.parallel.hooks import ParameterHooks
from kftrain.parallel.initialize import places_of
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.pieces import fully_shard_in_pieces
from kftrain.parallel.reduce_scatter import reduce_by_exchange
from kftrain.parallel.replicas import Replicas
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.shape import Shape
from kftrain.parallel.sharded import ALONE, Team
from kftrain.parallel.strategies import Sharding, sharding_of
from kftrain.parallel.tensor import SplitTensors


class Distributed:
    """A model that is ready to train, and the work that its transforms want done around each computation."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model = model
        self.mesh = mesh
        self.formats: tuple[torch.dtype, torch.dtype] | None = None
        """Formats of the computation and the reduction where copies stand in for the parameters; else None."""
        self.sharding: Sharding | None = None
        """How long a step keeps sharded parameters and gradients whole; None where nothing is sharded."""
        self.after_backward: list[Callable[[], None]] = []
        """Work on the gradients of a step, once the parameters have them, in this order. Collective."""
        self.norms: GlobalBatchNorms | None = None
        """The model's batch norms, which must be told which rows count; None until somebody sets them."""
        self.replicas: Replicas | None = None
        """torch's replicas where each process has the whole model; else None."""
        self._copies: WorkingCopies | None = None
        self._is_last: bool | None = None

    @property
    def is_sharded(self) -> bool:
        """True where each process has a part of the blocks only, so that all must call them in the same order."""
        return isinstance(self.model, FSDPModule)

    @property
    def team(self) -> Team:
        """The processes that have the same of what is no distributed tensor. Collective when first asked."""
        return Team((self.mesh.group(["replicate"]),)) if self.replicas else ALONE

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Prepare the parameters for all forward and backward passes of a step, or an evaluation, within the block."""
        if self.replicas is not None:
            return self.replicas.computing()
        if self.formats is None:
            return contextlib.nullcontext()
        if self._copies is None:  # made when the parameters have their values
            self._copies = WorkingCopies(self.model, *self.formats)
        return self._copies.in_place()

    def accumulate(self, last: bool) -> None:
        """Say before each micro batch whether it is the `last` of its step: then gradients are exchanged."""
        model, sharding = self.model, self.sharding
        if last == self._is_last:
            return
        self._is_last = last
        if self.replicas is not None:
            self.replicas.exchange(last)
        if sharding is None:
            return
        assert isinstance(model, FSDPModule)
        if sharding.exchange == "step":  # until then each process adds up whole gradients of its own samples
            model.set_requires_gradient_sync(last)
        else:  # parts are summed along `shard` after each micro batch, along `replicate` once, at the end
            model.set_requires_all_reduce(last)
        if sharding.keep_gathered:  # freed after the last: the optimizer changes the parts, and a kept whole is stale
            model.set_reshard_after_backward(last)

    def hand_over(self) -> None:
        """Give the parameters the gradients of the step, after its last backward pass. Collective."""
        if self._copies is not None:  # first: what comes after reads the gradients of the masters
            self._copies.hand_over()
        for work in self.after_backward:
            work()


class Transform(Protocol):
    """One thing that is done to a model, in its place in a strategy's list."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Change the model in place. `blocks`: names of the modules that are units of their own. Collective."""


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
            distributed.formats = (compute, reduce)


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
        distributed.replicas = Replicas(model, mesh.group(["replicate"]), mesh.world.device, compute, reduce)


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
        distributed.sharding = self.sharding
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
    # Hooks are taken off first, or what parameters turn into would have them too, and call them with parts. They run
    # last: by then gradients are those of all samples, summed over every axis.
    distributed, hooks = Distributed(model, mesh), ParameterHooks(places_of(model))
    for transform in strategy:
        transform.apply(distributed, blocks)
    hooks.require_whole()
    distributed.after_backward.append(hooks)
    return distributed
