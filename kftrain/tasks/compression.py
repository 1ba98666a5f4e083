"""Bits per byte without any learning from the training split: what a language model's figure is read against.

All are *adaptive*: each byte is coded from the validation bytes before it alone, so a decoder could undo it.
"""

from __future__ import annotations

import zlib

import numpy as np

MAX_BYTES = 4 << 20
"""Baselines look at no more than this many bytes, the first ones, so that they cost seconds whatever the data."""


def compression_baselines(data: bytes) -> dict[str, float]:
    """Baseline name -> bits per byte of the first 4 MiB of `data`; empty without data."""
    data = data[:MAX_BYTES]
    if not data:
        return {}
    return {
        "zlib -9": 8 * len(zlib.compress(data, level=9)) / len(data),
        "order-2 context model": float(-np.log2(order2_probabilities(data)).mean()),
    }


def order2_probabilities(data: bytes) -> np.ndarray:
    """Probability that an adaptive order-2 context model gives each byte of `data`, `[len(data)]` float64.

    Interpolated Witten-Bell smoothing (Witten and Bell 1991, method C): after a context of k bytes that was
    seen n times with d different successors, p_k(byte) = (count(byte) + d * p_(k-1)(byte)) / (n + d), from k
    = 2 down to the uniform distribution; a context seen for the first time passes on p_(k-1). The counts
    cover everything before the byte, and nothing after.

    The counts come from sorting instead of a loop: how often something occurred before a position is its rank
    among its equals in a stable sort. O(n log n), about a second per megabyte.
    """
    symbols = np.frombuffer(data, dtype=np.uint8).astype(np.int64)
    probability = np.full(len(symbols), 1 / 256)
    context = np.zeros(len(symbols), dtype=np.int64)
    for order in range(3):
        if order:
            context = context * 257
            context[order:] += symbols[: len(symbols) - order] + 1  # 0: before the first byte
        probability = _interpolate(context, symbols, probability)
    return probability


def _interpolate(context: np.ndarray, symbols: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """One order of the model: the lower order's probabilities, refined by what followed the same context before."""
    by_context = np.argsort(context, kind="stable")
    seen = np.empty(len(context))
    seen[by_context] = _rank_in_runs(context[by_context])
    pairs = context * 256 + symbols
    by_pair = np.argsort(pairs, kind="stable")
    count = np.empty(len(context))
    count[by_pair] = _rank_in_runs(pairs[by_pair])
    different = np.empty(len(context))
    is_new = (count[by_context] == 0).astype(np.int64)
    before = np.cumsum(is_new) - is_new
    first_of_run = (np.arange(len(context)) - seen[by_context]).astype(np.int64)
    different[by_context] = before - before[first_of_run]
    weight = np.where(seen == 0, 1.0, different)
    refined: np.ndarray = (count + weight * lower) / (seen + weight)
    return refined


def _rank_in_runs(ordered: np.ndarray) -> np.ndarray:
    """Position of each element within its run of equal values."""
    positions = np.arange(len(ordered))
    starts = np.r_[True, ordered[1:] != ordered[:-1]] if len(ordered) else np.zeros(0, dtype=bool)
    return positions - np.maximum.accumulate(np.where(starts, positions, 0))
