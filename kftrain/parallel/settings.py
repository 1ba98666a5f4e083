"""The sections `parallel` and `precision`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kftrain.plain import MAX_INTEGER
from kftrain.settings.section import Count, Section


class ParallelConfig(Section):
    """How the model and the batch are spread over processes."""

    strategy: Literal["fsdp", "ddp"] = "fsdp"
    """`fsdp`: parameters, gradients and optimizer state sharded (FSDP2); `ddp`: replicated. Both compute the same."""
    shard: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] = -1
    """Processes that one copy of the state is sharded over; -1: all that `replicate` leaves."""
    replicate: Count = 1
    """Copies of the sharded state (hybrid sharding). `ddp` replicates over all processes whatever stands here."""
    reshard_after_forward: bool = True
    """Free the gathered parameters after the forward pass (ZeRO-3); false keeps them until the backward (ZeRO-2)."""


class PrecisionConfig(Section):
    """Number formats. The master weights are always fp32."""

    compute: Literal["fp32", "bf16"] = "fp32"
    """Format of the forward and backward pass; `bf16` casts weights and what enters the model or a block."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed over processes."""
