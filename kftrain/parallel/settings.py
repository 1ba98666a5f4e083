"""The sections `parallel` and `precision`: how the model is spread over processes, and in which numbers it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kftrain.core.plain import MAX_INTEGER
from kftrain.errors import ConfigError
from kftrain.parallel.shape import Shape, require_equal_sizes
from kftrain.parallel.strategies import Exchange, Strategy
from kftrain.settings.section import ChangesTraining, Count, KeepsTraining, Section

NOT_OFFERED = {
    "context": "the attention of a model cannot be cut along its sequences yet",
    "pipeline": "models are not cut into stages yet",
    "expert": "the experts of a layer cannot be spread over processes yet",
}
"""Axis -> why more than one process along it is refused."""


class ParallelConfig(Section):
    """How the model and the batch are spread over processes: sizes of the axes of the mesh."""

    strategy: KeepsTraining[Strategy] = "fsdp"
    """What is sharded over the processes: `ddp` nothing, `zero1` the optimizer's state, `zero2` the gradients as well,
    `fsdp` the parameters as well (ZeRO-3); `auto` takes the first of zero1, zero2 and fsdp whose state fits into half
    of a device's memory. All compute the same."""
    exchange: KeepsTraining[Exchange] = "step"
    """When `fsdp` exchanges gradients where a step has several micro batches. `step`: once, and until then each process
    has the sum of all of its own; `micro_batch`: after each, which costs traffic and saves that memory. The other
    strategies say it themselves."""
    offload: KeepsTraining[bool] = False
    """Keep parameters, gradients and optimizer state in the host's pinned memory, and update them there. Needs GPUs,
    and a strategy that shards."""
    shard: KeepsTraining[Annotated[int, Field(ge=-1, le=MAX_INTEGER)]] = -1
    """Processes that one copy of the state is sharded over; -1: all that `replicate` leaves."""
    replicate: KeepsTraining[Count] = 1
    """Copies of the sharded state (hybrid sharding). `ddp` replicates over all processes whatever stands here."""
    context: KeepsTraining[Count] = 1
    """Parts of a sequence. More than 1 is refused for now."""
    tensor: KeepsTraining[Count] = 1
    """Processes that split each matrix of the model, which must say how; they read the same samples."""
    sequence_parallel: KeepsTraining[bool] = True
    """With `tensor`: between its matrices each process computes a part of the sequence, which saves memory there."""
    pipeline: KeepsTraining[Count] = 1
    """Stages of consecutive blocks. More than 1 is refused for now."""
    expert: KeepsTraining[Count] = 1
    """Parts of the experts of a layer. More than 1 is refused for now."""
    reshard_after_forward: KeepsTraining[bool] = True
    """The older way to write a strategy: `fsdp` with false is `zero1`."""

    @model_validator(mode="after")
    def _refuse_what_is_not_offered(self) -> ParallelConfig:
        for axis, reason in NOT_OFFERED.items():
            if getattr(self, axis) > 1:
                raise ValueError(f"{axis} must be 1: {reason}")
        return self

    @model_validator(mode="after")
    def _refuse_what_contradicts(self) -> ParallelConfig:
        if self.exchange == "micro_batch" and self.strategy not in ("fsdp", "zero2"):
            raise ValueError(f"exchange must be step: {self.strategy} sums the gradients of all micro batches first")
        if self.offload and self.strategy == "ddp":
            raise ValueError("offload must be false: ddp keeps the parameters of all blocks on the device all the time")
        return self

    @property
    def stage(self) -> Strategy:
        """The strategy, also where it is written in the older way."""
        return "zero1" if self.strategy == "fsdp" and not self.reshard_after_forward else self.strategy

    def shape(self, num_processes: int) -> Shape:
        """The mesh of so many processes. Raises ConfigError where the sizes do not multiply to them."""
        replicate, shard, tensor = self.replicate, self.shard, self.tensor
        if self.strategy == "ddp":
            replicate, shard = max(1, num_processes // tensor), 1
        if shard == -1:
            shard = num_processes // (replicate * tensor)
        if replicate * shard * tensor != num_processes:
            axes = ["replicate", "shard", *(["tensor"] if tensor > 1 else [])]
            changed = "tensor to what divides the processes" if num_processes % tensor else "shard to -1"
            raise ConfigError(
                f"parallel.{' x parallel.'.join(axes)} must be the number of processes, {num_processes}",
                value=" x ".join(map(str, (replicate, shard, tensor)[: len(axes)])),
                fix=f"set parallel.{changed}, or change launch.nodes and launch.processes_per_node",
            )
        return Shape(replicate=replicate, shard=shard, tensor=tensor)

    def require_fitting(self, sizes: Mapping[str, int]) -> None:
        """Raises ConfigError where `tensor` does not divide a size of the model: option -> size."""
        require_equal_sizes(sizes, self.tensor, self.sequence_parallel)


class PrecisionConfig(Section):
    """Number formats. The master weights are always fp32."""

    compute: ChangesTraining[Literal["fp32", "bf16"]] = "fp32"
    """Format of the forward and backward pass; `bf16` casts weights and what enters the model or a block."""
    reduce: ChangesTraining[Literal["fp32", "bf16"]] = "fp32"
    """Format in which gradients are summed over micro batches and processes."""
