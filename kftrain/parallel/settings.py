"""The sections `parallel` and `precision`: layout of the model over processes, and its number formats."""

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
"""Mesh axis -> reason for refusing more than one process along it."""


class ParallelConfig(Section):
    """Layout of the model and the batch over processes: a strategy, and the sizes of the mesh's axes."""

    strategy: KeepsTraining[Strategy] = "fsdp"
    """State to shard over the processes: `ddp` shards nothing, `zero1` the optimizer's state, `zero2` the gradients as
    well, `fsdp` the parameters as well (ZeRO-3). `auto` takes the first of zero1, zero2 and fsdp whose state fits into
    half of a device's memory. All compute the same."""
    exchange: KeepsTraining[Exchange] = "step"
    """Gradient exchange of `fsdp` in a step of several micro batches. `step`: once, until when each process keeps the
    sum of its own gradients; `micro_batch`: after each, which saves that memory and costs traffic. With the other
    strategies it follows from the strategy."""
    offload: KeepsTraining[bool] = False
    """Keep parameters, gradients and optimizer state in the host's pinned memory, and update them there. Needs GPUs
    and a strategy that shards."""
    shard: KeepsTraining[Annotated[int, Field(ge=-1, le=MAX_INTEGER)]] = -1
    """Processes that share one copy of the state; -1: all that `replicate` leaves."""
    replicate: KeepsTraining[Count] = 1
    """Copies of the sharded state (hybrid sharding). `ddp` ignores it and replicates over all processes."""
    context: KeepsTraining[Count] = 1
    """Processes that split each sequence; more than 1 is refused for now."""
    tensor: KeepsTraining[Count] = 1
    """Processes that split each matrix of the model (tensor parallelism); they read the same samples. The model must
    provide a `tensor_plan`."""
    sequence_parallel: KeepsTraining[bool] = True
    """With `tensor`: between the split matrices each process computes a part of the sequence, which saves memory."""
    pipeline: KeepsTraining[Count] = 1
    """Stages of consecutive blocks (pipeline parallelism); more than 1 is refused for now."""
    expert: KeepsTraining[Count] = 1
    """Processes that share the experts of a layer; more than 1 is refused for now."""
    reshard_after_forward: KeepsTraining[bool] = True
    """Older spelling of a strategy: `fsdp` with false is `zero1`."""

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
        """The strategy; `fsdp` without `reshard_after_forward` is `zero1`."""
        return "zero1" if self.strategy == "fsdp" and not self.reshard_after_forward else self.strategy

    def shape(self, num_processes: int) -> Shape:
        """Return the mesh of this many processes. Raises ConfigError if the sizes do not multiply to it."""
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
        """Raise ConfigError if `tensor` does not divide a size of the model: option -> size."""
        require_equal_sizes(sizes, self.tensor, self.sequence_parallel)


class PrecisionConfig(Section):
    """Number formats of training. The master weights are always fp32."""

    compute: ChangesTraining[Literal["fp32", "bf16"]] = "fp32"
    """Format of the forward and backward pass; `bf16` casts the weights and the inputs of the model and of its
    blocks."""
    reduce: ChangesTraining[Literal["fp32", "bf16"]] = "fp32"
    """Format in which gradients are summed over micro batches and processes."""
