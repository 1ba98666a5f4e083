"""The clock rule: which step a worker may begin, given how many steps the workers have finished.

`max_ahead` is 0 for bulk-synchronous steps, s for stale-synchronous ones (Ho et al. 2013), None for asynchronous ones.
A worker that reads for step c then sees everything that all workers did in the steps before c - s.
"""

from __future__ import annotations

from collections.abc import Mapping


def may_begin(clocks: Mapping[int, int], clock: int, max_ahead: int | None) -> bool:
    """Return True if the weights may be read for step `clock`. `clocks`: worker -> steps it has finished."""
    return max_ahead is None or not clocks or clock - min(clocks.values()) <= max_ahead


def count_finished(clocks: Mapping[int, int]) -> int:
    """Return how many steps every worker has finished; 0 where nobody has joined."""
    return min(clocks.values(), default=0)
