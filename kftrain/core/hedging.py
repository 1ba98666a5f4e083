"""A request that is slower than nearly all before it is made a second time, and the answer that comes first is used.

In an object store now and then a request hangs for seconds that usually takes milliseconds; a step waits for the
slowest of hundreds.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

LEAST_KNOWN, MOST_KNOWN = 50, 256
"""Last requests of one size that tell how long one takes: below the first number nobody knows what is slow."""

SLOW_SHARE, LEAST_SECONDS = 0.99, 0.05
"""Share of them that were faster than a slow one, and the seconds below which none is slow."""

MAX_SHARE = 20
"""At most every 20th request is made twice: a store that is slow as a whole is not asked for twice as much."""


def choose_slow_seconds(seconds: Sequence[float]) -> float | None:
    """Choose after how many seconds a request is slow, by those of the last ones; None while they are too few."""
    if len(seconds) < LEAST_KNOWN:
        return None
    return max(LEAST_SECONDS, sorted(seconds)[int(SLOW_SHARE * (len(seconds) - 1))])


class Hedge:
    """Seconds that requests took, by their size. It belongs to one event loop."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MOST_KNOWN))
        self._num_spare = 0.0

    async def call(self, num_bytes: int, request: Callable[[], Awaitable[T]]) -> T:
        """Return what a request for so many bytes answers, or what the same one answers that is made when it is slow.

        Raises what the last of them raises where both fail.
        """
        known = self._seconds[num_bytes.bit_length() // 2]
        self._num_spare += 1 / MAX_SHARE
        tasks: set[asyncio.Future[T]] = {asyncio.ensure_future(request())}
        start, pending = time.monotonic(), tasks
        try:
            done, _ = await asyncio.wait(tasks, timeout=choose_slow_seconds(known))
            if not done and self._num_spare >= 1:
                self._num_spare -= 1
                tasks.add(asyncio.ensure_future(request()))
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                best = min(done, key=lambda task: task.exception() is not None)
                if not pending or best.exception() is None:
                    answer = best.result()
                    known.append(time.monotonic() - start)
                    return answer
        finally:
            for task in tasks:
                task.cancel()
