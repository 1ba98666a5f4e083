"""Causal attention within rows, or within the documents that are packed into them, by torch's fused kernels.

Documents travel as offsets: for each token the place where its own document starts. From these follow *spans*, runs of
queries with the keys that they attend to. A span needs no mask: its queries see all keys of their document that come
before the span, and of the keys at their own places each sees those up to its own. So nothing of the size of places x
places is made, whatever stands in a row. A process that has some of the places only (`parallel/context.py`) attends by
the same spans.

On the CPU both parts of a span go through the kernel of flash attention (Dao 2023, arXiv:2307.08691), and are weighed
by the sums of their exponentials, as blocks are within that kernel. Its backward pass is given the output and the sum
of both together, which makes the gradients of either part right. On other devices torch has a mask without memory,
aligned to the last query and the last key.

Shapes: B rows, H query heads, K key-value heads, T places, E elements of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.weak import WeakTensorKeyDictionary

_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Span(NamedTuple):
    """Queries that follow one another, and the keys that they attend to."""

    rows: slice
    queries: slice
    """Place among the queries that are there."""
    before: slice
    """Keys that all of them attend to; may be empty."""
    diagonal: slice
    """Keys at their own places, as many: each query attends to those up to its own place."""


class CausalAttention(nn.Module):
    """Attention of each token to itself and to what precedes it, in its row or its document. It has no parameters.

    A module by itself, so that a model can say where its attention is (`context_plan`).
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None = None) -> Tensor:
        """Attend with `query` `[B, H, T, E]` to `key` and `value` `[B, K, T, E]`; K divides H. Return `[B, H, T, E]`.

        `starts`: place where each token's document starts, int64 `[B, T]`, as `locate_documents` makes it; None: rows.
        """
        if starts is not None:
            return self.attend_chunks(query, key, value, [range(query.shape[2])], starts)
        key, value, grouped = _group_heads(query, key, value)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    def attend_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, chunks: Sequence[range], starts: Tensor | None = None
    ) -> Tensor:
        """Attend with the queries of some places of a row to the keys of all of them. Return `[B, H, Q, E]`.

        Args:
            query: `[B, H, Q, E]`, the queries of the chunks one after the other.
            key: `[B, K, T, E]`.
            value: `[B, K, T, E]`.
            chunks: Places of the queries in their row; Q in all.
            starts: As in `forward`, for all T places.
        """
        spans = list_spans(len(query), chunks, None if starts is None else _read_documents(starts))
        if query.is_cpu:
            output: Tensor = _SpansOnCpu.apply(query, key, value, spans)  # type: ignore[no-untyped-call]
            return output
        return attend_by_kernels(query, key, value, spans)


def locate_documents(tokens: Tensor, document_token: int) -> tuple[Tensor, Tensor]:
    """Locate the tokens `[B, T]` of rows in their documents: positions `[B, 1, T]`, and starts `[B, T]`.

    Positions count from the start of each document; a start is a place in the row. A row begins within a document;
    there positions count from the row's start.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    # The running maximum of the places of document tokens is the place where each token's own document starts.
    starts = torch.where(tokens == document_token, places, 0).cummax(dim=1).values
    return (places - starts).unsqueeze(1), starts


def list_spans(num_rows: int, chunks: Sequence[range], documents: Sequence[Sequence[int]] | None) -> list[Span]:
    """List the spans of the queries in `chunks`, row by row. `documents`: of each row its bounds; None: one a row."""
    if documents is None:
        return [_make_span(slice(0, num_rows), chunks, chunk, 0, chunk) for chunk in chunks]
    return [
        _make_span(slice(row, row + 1), chunks, chunk, start, range(max(start, chunk.start), min(stop, chunk.stop)))
        for row, bounds in enumerate(documents)
        for chunk in chunks
        for start, stop in itertools.pairwise(bounds)
        if start < chunk.stop and stop > chunk.start
    ]


def _make_span(rows: slice, chunks: Sequence[range], chunk: range, start: int, places: range) -> Span:
    """Make the span of some places of a chunk, whose document starts at `start`."""
    offset = sum(len(other) for other in chunks[: chunks.index(chunk)]) - chunk.start
    queries = slice(places.start + offset, places.stop + offset)
    return Span(rows, queries, slice(start, places.start), slice(places.start, places.stop))


def attend_by_kernels(query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span]) -> Tensor:
    """Attend span by span through `scaled_dot_product_attention`, on any device."""
    key, value, grouped = _group_heads(query, key, value)
    of_rows: dict[int, list[Tensor]] = {}
    for rows, queries, before, diagonal in spans:
        keys, some = slice(before.start, diagonal.stop), query[rows, :, queries]
        has_before = before.stop > before.start
        mask = causal_lower_right(some.shape[2], keys.stop - keys.start) if has_before else None
        attended = F.scaled_dot_product_attention(
            some, key[rows, :, keys], value[rows, :, keys], mask, is_causal=not has_before, enable_gqa=grouped
        )
        of_rows.setdefault(rows.start, []).append(attended)
    return torch.cat([torch.cat(parts, dim=2) for parts in of_rows.values()])


class _SpansOnCpu(torch.autograd.Function):
    """Attention span by span, whose backward pass keeps no more than that of one fused kernel: output and sums."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span]) -> Tensor:
        num_rows, num_heads, num_places, width = query.shape
        # In the order [B, T, H, E], so that the caller joins the heads without a copy.
        output = query.new_empty(num_rows, num_places, num_heads, width).transpose(1, 2)
        sum_type = torch.promote_types(query.dtype, torch.float32)
        log_sums = query.new_empty(num_rows, num_places, num_heads, dtype=sum_type).transpose(1, 2)
        for span in spans:
            index = span.rows, slice(None), span.queries
            output[index], log_sums[index] = _attend_to_both(query, key, value, span)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.spans = spans
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        of_query, of_key, of_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for rows, queries, before, diagonal in ctx.spans:
            at = rows, slice(None), queries
            for keys, is_causal in ((before, False), (diagonal, True)):
                if keys.stop > keys.start:
                    to = rows, slice(None), keys
                    result = (output[at], log_sums[at])
                    parts = _backward(gradient[at], query[at], key[to], value[to], *result, 0.0, is_causal)
                    of_query[at].add_(parts[0])
                    of_key[to].add_(parts[1])
                    of_value[to].add_(parts[2])
        return of_query, of_key, of_value, None


def _attend_to_both(query: Tensor, key: Tensor, value: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Return the output of a span's queries, and the logarithms of the sums of their exponentials."""
    rows, queries, before, diagonal = span
    some = query[rows, :, queries]
    near, near_sum = _forward(some, key[rows, :, diagonal], value[rows, :, diagonal], 0.0, True)
    if before.stop == before.start:
        return near, near_sum
    far, far_sum = _forward(some, key[rows, :, before], value[rows, :, before], 0.0, False)
    total = torch.logaddexp(near_sum, far_sum)
    # Weighed in the format of the sums: in bf16 the output is rounded once more than by one kernel, not thrice.
    near_share, far_share = ((one - total).exp().unsqueeze(-1) for one in (near_sum, far_sum))
    return near * near_share + far * far_share, total


def _group_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return keys and values as the device's kernels take them, and whether those group heads."""
    grouped = key.shape[1] != query.shape[1]
    if not grouped or query.is_cpu or query.dtype != torch.float32:
        return key, value, grouped
    # On GPUs only flash attention groups heads, which computes in half precision.
    key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
    return key, value, False


_BOUNDS: Any = WeakTensorKeyDictionary()
"""Starts -> the bounds of each row's documents: all layers of a forward pass are given the same tensor."""


def _read_documents(starts: Tensor) -> list[list[int]]:
    """Return of each row where its documents start, and the row's length. The host waits for a GPU once a pass."""
    if starts not in _BOUNDS:
        num_rows, length = starts.shape
        bounds: list[list[int]] = [[] for _ in range(num_rows)]
        for row, place in (starts == torch.arange(length, device=starts.device)).nonzero().tolist():
            bounds[row].append(place)
        _BOUNDS[starts] = [[*row, length] for row in bounds]
    known: list[list[int]] = _BOUNDS[starts]
    return known
