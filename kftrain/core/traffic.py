"""Counts what this process has asked of storage, by name, until the next read of its loader takes the counts along."""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_counts = Counter[str]()


def count(**numbers: int) -> None:
    """Count more: `retries` of calls of storage; `cache_hits` and `cache_misses` of reads of remote shards."""
    with _lock:
        _counts.update(numbers)


def take_counts() -> Counter[str]:
    """Return what was counted since this was called before."""
    with _lock:
        taken = _counts.copy()
        _counts.clear()
    return taken
