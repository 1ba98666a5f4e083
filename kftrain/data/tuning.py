"""A loader chooses by what it has measured how far ahead it reads, with how many workers and requests at once.

A training waits for data where a step is not ready when it is wanted. What would have been enough follows from what
steps cost: so many workers, and so many reads under way, that a step comes out as often as the training takes one; and
so many steps ahead that the slowest of them is under way while the training computes the others.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from kftrain.data.counters import Counters

WORTH_SHARE, WORTH_SECONDS = 0.01, 0.05
"""Share of the time from which on waiting for data is worth a change, and the least of it."""

SPARE = 1.25
"""Factor on the workers and requests that the mean step needs, as steps differ."""

LOCKED_TIMES = 1.5
"""A thread that shares Python's lock with others decodes at least so many times longer than it is busy."""

MIN_STEPS, WINDOW_STEPS = 4, 64
"""Steps that are measured before a further choice, and after which measuring begins anew where there was none."""

FREE_SHARE, KEPT_SHARE = 0.25, 0.8
"""Share of the memory that steps ahead may take, of what is free but for them; and the share of them that has to fit
for all to stay, as free memory moves all the time."""

Kind = Literal["threads", "processes"]


@dataclass(frozen=True)
class Tuning:
    """Settings of a loader that may change while it reads."""

    steps: int
    """Steps that are read ahead."""
    workers: int = 0
    """Workers that decode at once; 0: the thread that makes the batches."""
    requests: int = 1
    """Reads under way at once."""
    kind: Kind = "threads"
    """Kind of the workers."""

    @property
    def pieces(self) -> int:
        """Parts that a step is cut into for the workers: none where there are as many steps ahead as workers."""
        return max(1, -(-self.workers // max(1, self.steps)))


@dataclass(frozen=True)
class Limits:
    """Bounds of what is chosen. A setting that somebody has fixed is its own bound."""

    most: Tuning
    """Most of each setting; `processes` where workers may become that."""
    least_steps: int = 1
    """Fewest steps ahead, whatever memory is left."""
    max_bytes: float = 1 << 30
    """Most bytes of the steps ahead."""


def choose_tuning(now: Tuning, measured: Counters, limits: Limits, step_bytes: int, compute: float) -> Tuning:
    """Choose the settings from now on: more of what was too little, and no more steps ahead than memory holds.

    `compute`: seconds that the training usually takes for a step.
    """
    fits = max(limits.least_steps, int(limits.max_bytes // max(1, step_bytes)))
    fits = max(fits, now.steps) if fits >= KEPT_SHARE * now.steps else fits
    if measured.stall_seconds < max(WORTH_SECONDS, WORTH_SHARE * measured.seconds):
        return replace(now, steps=min(now.steps, fits))
    most, made, compute = limits.most, max(1, measured.num_made), max(compute, 1e-6)
    read, decode, slowest = measured.read_seconds / made, measured.decode_seconds / made, measured.slowest_seconds
    chosen, locked = now, is_locked(now, measured) and decode > compute * now.workers
    if locked and most.kind == "processes":
        chosen, decode = replace(now, kind=most.kind), measured.busy_seconds / made
    if now.workers and (chosen.kind == "processes" or not locked):
        chosen = replace(chosen, workers=_grow(now.workers, SPARE * decode / compute, most.workers))
    pace = max(compute, decode / max(1, chosen.workers))
    steps = (slowest + decode) / pace + 1
    if read <= compute * now.requests and decode <= compute * max(1, now.workers):
        steps = max(steps, 1.5 * now.steps)  # enough is under way, but not at all times
    chosen = replace(chosen, steps=min(fits, _grow(now.steps, steps, most.steps)))
    # Of each piece there is a request.
    requests = max(SPARE * read, slowest * chosen.pieces) / pace
    return replace(chosen, requests=_grow(now.requests, requests, most.requests))


def _grow(now: int, wanted: float, most: int) -> int:
    return max(now, min(math.ceil(wanted), most))


def is_locked(now: Tuning, measured: Counters) -> bool:
    """Tell whether threads that decode wait for each other: for Python's lock, so that more of them would not help.

    The training has the lock, too. Who waits longer than all of them take in turn waits for something else.
    """
    times = measured.decode_seconds / max(measured.busy_seconds, 1e-9)
    return now.kind == "threads" and LOCKED_TIMES <= times <= now.workers + 2


class Tuner:
    """Chooses the settings of one loader again and again, by its counters."""

    def __init__(self, first: Tuning, limits: Limits, counters: Counters, free_bytes: Callable[[], float]) -> None:
        """`free_bytes`: measures the memory that this process could still take."""
        self.now = first
        self.computed: deque[float] = deque(maxlen=WINDOW_STEPS)
        """Seconds that the training took for each of its last steps. Their median knows of no evaluation."""
        self._limits = limits
        self._counters = counters
        self._free_bytes = free_bytes
        self._min_steps = 1
        self._restart(0)

    def _restart(self, num_skipped: int) -> None:
        """Begin to measure anew after so many steps."""
        self._first_step = self._counters.num_steps + num_skipped
        self._start: Counters | None = None
        self._looked_at_seconds = 0.0

    def take(self, step_bytes: int) -> str:
        """Choose when a step has been waited for; return a line about what was chosen, or nothing."""
        if self._counters.num_steps < self._first_step:
            return ""
        if self._start is None:
            self._counters.slowest_seconds = 0.0
            self._start = replace(self._counters)
        measured = self._counters.since(self._start)
        is_over = measured.num_steps >= WINDOW_STEPS
        is_news = measured.stall_seconds > max(WORTH_SECONDS, 1.5 * self._looked_at_seconds)
        # Who only looks at a step computes nothing.
        if not self.computed or measured.num_steps < self._min_steps or not (is_news or is_over):
            return ""
        compute = statistics.median(self.computed)
        was, self.now = self.now, self._choose(measured, step_bytes, compute)
        self._looked_at_seconds = measured.stall_seconds
        if self.now != was:
            self._min_steps = MIN_STEPS
            self._restart(was.steps + 1)  # those that were begun before come first, and the next one is waited for
            return _describe_choice(was, self.now, measured, step_bytes, compute)
        if is_over:
            self._restart(0)
        return ""

    def _choose(self, measured: Counters, step_bytes: int, compute: float) -> Tuning:
        held_bytes = self.now.steps * step_bytes
        max_bytes = min(self._limits.max_bytes, FREE_SHARE * (self._free_bytes() + held_bytes))
        limits = replace(self._limits, max_bytes=max_bytes)
        return choose_tuning(self.now, measured, limits, step_bytes, compute)


def _describe_choice(before: Tuning, chosen: Tuning, measured: Counters, step_bytes: int, compute: float) -> str:
    pairs = ((name, vars(before)[name], new) for name, new in vars(chosen).items())
    changes = ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if new != old)
    waited = f"{measured.stall_seconds / max(measured.seconds, 1e-9):.0%} of {measured.seconds:.2g} s was waiting"
    costs = (seconds / max(1, measured.num_made) for seconds in (measured.read_seconds, measured.decode_seconds))
    takes = "{:.2g} s to read, {:.2g} s to decode, {:.2g} s to compute".format(*costs, compute)
    return f"data: {changes}; {waited}; a step has {step_bytes:,} bytes and takes {takes}"
