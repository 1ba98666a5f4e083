"""The launcher's own clock: how long a job may queue, start and train. The operator's deadline is not a timer.

Time in a queue never counts as training. A job that goes back to the queue, or that loses a worker, gets its time to
start anew; its time to train goes on. To verify the data is work, however long it takes, and no part of the start: the
run is claimed before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kftrain.launch.kubernetes.states import State

_QUEUED = (State.QUEUED,)
STARTING = (State.ADMITTED, State.SCHEDULING, State.PULLING, State.RENDEZVOUS)
_TRAINING = (State.WORKING, State.COMMITTING)


@dataclass(frozen=True)
class Limits:
    """The longest that a job may queue, start and train, in seconds."""

    queue_seconds: float
    start_seconds: float
    training_seconds: float


@dataclass(frozen=True)
class Clock:
    """Seconds that a job has spent in its queue, in its start and in training, up to `time` (monotonic)."""

    time: float
    queue_seconds: float = 0.0
    start_seconds: float = 0.0
    training_seconds: float = 0.0

    def advance(self, state: State, now: float) -> Clock:
        """Return the clock at `now`, for a job that has been in `state` since the last call."""
        passed = now - self.time
        if state in _QUEUED:
            return replace(self, time=now, queue_seconds=self.queue_seconds + passed, start_seconds=0.0)
        if state in STARTING:
            return replace(self, time=now, queue_seconds=0.0, start_seconds=self.start_seconds + passed)
        if state in _TRAINING:
            return Clock(now, training_seconds=self.training_seconds + passed)
        return replace(self, time=now)

    def started_anew(self) -> Clock:
        """Return the clock with no time spent on the start: the time that has passed says nothing about the job."""
        return replace(self, start_seconds=0.0)

    def exceeded(self, limits: Limits) -> str:
        """Return the setting whose limit is exceeded, as `key = limit s`; empty if none is."""
        spent = (
            ("launch.kubernetes.queue_timeout_seconds", self.queue_seconds, limits.queue_seconds),
            ("launch.kubernetes.start_timeout_seconds", self.start_seconds, limits.start_seconds),
            ("launch.kubernetes.training_timeout_seconds", self.training_seconds, limits.training_seconds),
        )
        return next((f"{name} = {limit:g} s" for name, seconds, limit in spent if seconds > limit), "")
