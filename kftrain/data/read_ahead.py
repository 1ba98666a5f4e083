"""Fetches what the next steps of one rank read from an object store into the cache of its node, before they read it.

The order of samples is known, so what a window's steps need of a shard is asked for at once, in requests of megabytes,
a window ahead of what is read. The first step is read before anything else is asked for, and later ones ask by
themselves for what is not there yet. The processes of a node do not ask for the same: whoever is first has claimed it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kftrain.core import threads
from kftrain.data.decoding import Samples
from kftrain.data.shards.block_digests import DIGEST_BLOCK_BYTES
from kftrain.data.shards.remote_bytes import MAX_FETCHES, Fetch
from kftrain.errors import KftrainError

NUM_REQUESTS = MAX_FETCHES // 2
"""Requests that one process has under way ahead of its steps: the others are left to the step that is read now."""


class StoredSamples(Samples, Protocol):
    """Samples of shards, wherever those lie."""

    def plan_fetches(self, samples: np.ndarray) -> list[Fetch]:
        """Return the requests for what the node lacks of these samples, int64 `[k]`. Raises DataError."""


@dataclass(frozen=True)
class AheadPlan:
    """Plan of what is fetched before it is read."""

    plan_fetches: Callable[[np.ndarray], list[Fetch]]
    """Function from samples by number, int64 `[k]`, to the requests for what the node lacks of them."""
    num_steps: int
    """Number of steps that are fetched together: of so many, and of as many after them, the node keeps all."""


def choose_steps_ahead(window_steps: int, step_samples: int, sample_bytes: float, max_bytes: float) -> int:
    """Choose how many steps of one rank to fetch together: those of a window, where they fit.

    Fewer are apart from each other in their window, so that each sample may cost a block.
    """
    if window_steps * step_samples * sample_bytes > max_bytes:
        window_steps = int(max_bytes / (step_samples * (sample_bytes + DIGEST_BLOCK_BYTES)))
    return max(1, window_steps)


class ReadAhead:
    """Requests ahead of steps, by threads of their own. `close` it in the end; nobody waits for what is under way."""

    def __init__(self, plan: AheadPlan, steps: range, find_numbers: Callable[[range], np.ndarray]) -> None:
        """Start. `find_numbers`: samples of some steps."""
        self._plan = plan
        self._find_numbers = find_numbers
        self._changed = threading.Condition()
        self._is_closed = False
        self._stop = steps.start
        """First step that is not read yet."""
        self._upcoming = steps
        """Steps that are not fetched yet."""
        self._thread = threads.start(self._work, "read ahead")

    def note_read(self, stop: int) -> None:
        """Note that the steps before `stop` were read. Raises what a bug in a thread has raised."""
        with self._changed:
            self._stop = stop
            self._changed.notify_all()
        if self._thread.done():
            self._thread.result()

    def close(self) -> None:
        """Make no more requests."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        """Fetch steps together, as soon as a step of those before them is read; the first ones after the first step."""
        first, count = self._upcoming.start, self._plan.num_steps
        while self._upcoming and self._wait_until_read(max(first, self._upcoming.start - count)):
            with contextlib.suppress(KftrainError, OSError):  # whoever reads it meets the same
                fetches = self._plan.plan_fetches(self._find_numbers(self._upcoming[:count]))
                threads.call_together(self._make_request, fetches, NUM_REQUESTS)
            self._upcoming = self._upcoming[count:]

    def _wait_until_read(self, step: int) -> bool:
        """Wait until a step was read; False where no more requests are made."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._stop > step)
            return not self._is_closed

    def _make_request(self, fetch: Fetch) -> None:
        """Make a request; one that fails leaves the others as they are."""
        with contextlib.suppress(KftrainError, OSError):
            if not self._is_closed:
                fetch()
