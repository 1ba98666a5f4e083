"""The sections `parallel` and `precision`: how the model is spread over processes, and in which numbers it computes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kftrain.errors import ConfigError
from kftrain.parallel.shape import Shape
from kftrain.plain import MAX_INTEGER
from kftrain.settings.section import Count, Section

NOT_OFFERED = {
    "context": "the attention of a model cannot be cut along its sequences yet",
    "tensor": "models have no plan of how to cut their matrices yet",
    "pipeline": "models are not cut into stages yet",
    "expert": "the experts of a layer cannot be spread over processes yet",
}
"""Axis -> why more than one process along it is refused."""


class ParallelConfig(Section):
    """How the model and the batch are spread over processes: sizes of the axes of the mesh."""

    strategy: Literal["fsdp", "ddp"] = "fsdp"
    """`fsdp`: parameters, gradients and optimizer state sharded (FSDP2); `ddp`: replicated. Both compute the same."""
    shard: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] = -1
    """Processes that one copy of the state is sharded over; -1: all that `replicate` leaves."""
    replicate: Count = 1
    """Copies of the sharded state (hybrid sharding). `ddp` replicates over all processes whatever stands here."""
    context: Count = 1
    """Parts of a sequence. More than 1 is refused for now."""
    tensor: Count = 1
    """Parts of a matrix. More than 1 is refused for now."""
    pipeline: Count = 1
    """Stages of consecutive blocks. More than 1 is refused for now."""
    expert: Count = 1
    """Parts of the experts of a layer. More than 1 is refused for now."""
    reshard_after_forward: bool = True
    """Free the gathered parameters after the forward pass (ZeRO-3); false keeps them until the backward (ZeRO-2)."""

    @model_validator(mode="after")
    def _refuse_what_is_not_offered(self) -> ParallelConfig:
        for axis, reason in NOT_OFFERED.items():
            if getattr(self, axis) > 1:
                raise ValueError(f"{axis} must be 1: {reason}")
        return self

    def shape(self, num_processes: int) -> Shape:
        """The mesh of so many processes. Raises ConfigError where the sizes do not multiply to them."""
        if self.strategy == "ddp":
            return Shape(replicate=num_processes)
        shard = num_processes // self.replicate if self.shard == -1 else self.shard
        if shard * self.replicate != num_processes:
            raise ConfigError(
                f"parallel.replicate x parallel.shard must be the number of processes, {num_processes}",
                value=f"{self.replicate} x {shard}",
                fix="set parallel.shard to -1, or change launch.nodes and launch.processes_per_node",
            )
        return Shape(replicate=self.replicate, shard=shard)


class PrecisionConfig(Section):
    """Number formats. The master weights are always fp32."""

    compute: Literal["fp32", "bf16"] = "fp32"
    """Format of the forward and backward pass; `bf16` casts weights and what enters the model or a block."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed over micro batches and processes."""
