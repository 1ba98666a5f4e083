"""Two loops take turns, one step each, so that both see the same machine.

The loop that is measured takes its batches from here. Between two of its steps a bare one is taken: a step of the loop
is what lies between being given a batch and asking for the next one. Times are of the training thread's own CPU clock,
to which other processes of a loaded machine add little; the figure is the median over tens of pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

WARM_UP_STEPS = 50
"""That do not count."""

STEPS_TOGETHER = 10
"""Of which one is recorded: a figure is of so many in a row."""


QUANTILE = 10
"""One of so many is faster than the figure: a loaded machine only adds to it."""


class Turns(Generic[T]):
    """Batches for the loop that is measured."""

    def __init__(self, batches: list[T], bare: Callable[[int, T], object]) -> None:
        """`bare`: takes the step of that number with that batch."""
        self._batches = batches
        self._bare = bare
        self.loop_us: list[float] = []
        """Of each step of the loop."""
        self.bare_us: list[float] = []

    def steps(self, first: int, count: int) -> Iterator[T]:
        for step in range(first, first + count):
            batch = self._batches[step % len(self._batches)]
            start = time.thread_time()
            self._bare(step, batch)
            now = time.thread_time()
            self.bare_us.append((now - start) * 1e6)
            yield batch
            self.loop_us.append((time.thread_time() - now) * 1e6)

    def figures(self) -> list[float]:
        """Microseconds of a bare step and of one of the loop, in the fastest tens."""
        pairs = list(zip(self.bare_us, self.loop_us, strict=True))[WARM_UP_STEPS:]
        tens = [pairs[start : start + STEPS_TOGETHER] for start in range(0, len(pairs), STEPS_TOGETHER)]
        bare, loop = ([statistics.fmean(pair[which] for pair in ten) for ten in tens] for which in (0, 1))
        return [statistics.quantiles(bare, n=QUANTILE)[0], statistics.quantiles(loop, n=QUANTILE)[0]]
