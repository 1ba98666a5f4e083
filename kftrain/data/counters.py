"""Measurements of reading: of one read, of a loader so far, or of a loader between two looks at it.

A loader's own are written and looked at by the thread that takes its steps, and by no other one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Sums over what was read, taken and waited for."""

    num_bytes: int = 0
    """Bytes that were read, as they are stored."""
    read_seconds: float = 0.0
    """Seconds of reading, over all workers."""
    slowest_seconds: float = 0.0
    """Longest of these reads."""
    decode_seconds: float = 0.0
    """Seconds of decoding, over all workers."""
    busy_seconds: float = 0.0
    """Seconds of these in which a worker ran or waited for a processor: the others it waited for something else."""
    retries: int = 0
    """Calls of storage that were made again, whatever for."""
    cache_hits: int = 0
    """Reads of remote shards that found all they needed on the node."""
    cache_misses: int = 0
    """Reads of remote shards that did not."""
    num_made: int = 0
    """Steps that were made ready."""
    num_steps: int = 0
    """Steps that were taken."""
    ready_steps: int = 0
    """Sum, over the steps that were taken, of how many were ready to be taken."""
    seconds: float = 0.0
    """Time from step to step."""
    stall_seconds: float = 0.0
    """Time that the consumer has waited for data."""

    def add(self, other: Counters) -> None:
        """Take in what was measured elsewhere."""
        slowest = max(self.slowest_seconds, other.slowest_seconds)
        vars(self).update({name: value + vars(other)[name] for name, value in vars(self).items()})
        self.slowest_seconds = slowest

    def since(self, before: Counters) -> Counters:
        """Return what came after an earlier copy."""
        later = Counters(**{name: value - vars(before)[name] for name, value in vars(self).items()})
        later.slowest_seconds = self.slowest_seconds
        return later
