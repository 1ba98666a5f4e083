"""Gradients of sharded parameters, summed over processes: each gets the sum of its own part.

Gloo has no reduce-scatter: torch computes it as an all-reduce, whose other parts are thrown away. Here each process
sends every other one its part, and adds up what it was sent: of W processes each sends (W - 1) / W of its gradients
instead of 2 (W - 1) / W. Parts are added in the order of the ranks, so that a sum is the same every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


class ExchangedSums:
    """torch's protocol `ReduceScatter` for tensors on the CPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        """Memory for received parts, as large as the largest unit; fresh memory costs as much time as the exchange."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory for what is reduced, or for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum this process's part of a vector over all: `[W * n]` -> `[n]`, written to `output_tensor`. Collective."""
        # All units share the buffer: it is free again when this returns, because nothing here is asynchronous.
        assert not async_op and op == dist.ReduceOp.SUM, (async_op, op)
        received = self._take_buffer(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(sum_of(received.view(group.size(), -1)))

    def _take_buffer(self, like: torch.Tensor) -> torch.Tensor:
        if self._buffer.numel() < like.nbytes:
            self._buffer = torch.empty(like.nbytes, dtype=torch.uint8)
        return self._buffer[: like.nbytes].view(like.dtype)


def sum_of(parts: torch.Tensor) -> torch.Tensor:
    """Sum rows one after the other, `[W, n]` -> `[n]`, in fp32 at least. Changes the first row."""
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
