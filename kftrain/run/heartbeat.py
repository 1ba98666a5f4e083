"""The launcher's heartbeat, `<run>/launcher.json`: a job whose launcher is gone must not hold GPUs for ever.

The clocks of two machines differ, so the time in the file is for people. What counts is that its content changes, by
the clock of whoever watches. Storage that is down says nothing about the launcher: the count stops for as long.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kftrain.core import storage
from kftrain.run.best_effort import best_effort
from kftrain.run.paths import RunPaths

INTERVAL_SECONDS = 60.0
"""Seconds from one beat to the next."""

LOOKS_PER_TIMEOUT = 20
"""Number of looks of a watch within its timeout."""

LATE = 2.0
"""Intervals after which the next look is late: the watch itself was held up, and no more than these count."""

MISSING = b""
"""Content that stands for a file that is not there: a launcher that never wrote is silent too."""

END_SECONDS = 10.0
"""Seconds for which the end of a launcher waits for a beat that is being written."""

MAX_HANGING = 5
"""Beats that may hang at once: a mount whose server is gone holds every call, until it is back."""


class Heartbeat:
    """A block in which a thread writes the file, at once and then at every interval.

    A write that fails is made again at the next interval; where a thread hangs in a write, another one takes over. The
    file stays: a launcher that ended has left no job.
    """

    def __init__(
        self, paths: RunPaths, interval_seconds: float = INTERVAL_SECONDS, clock: Callable[[], float] = time.time
    ) -> None:
        self._uri = paths.launcher
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._ended = threading.Event()
        self._sequence = itertools.count(1)
        self._watch = threading.Thread(target=self._replace_hanging, daemon=True, name="heartbeat")
        self._threads: list[threading.Thread] = []
        self._beaten_at = 0.0

    def __enter__(self) -> Heartbeat:
        self._watch.start()
        return self

    def __exit__(self, *caught: object) -> None:
        self._ended.set()
        deadline = time.monotonic() + END_SECONDS
        self._watch.join(END_SECONDS)
        for thread in self._threads:  # as the watch has left them: it may have started one until now
            thread.join(max(0.0, deadline - time.monotonic()))

    def _replace_hanging(self) -> None:
        """Start the thread that beats, and another one where that has not beaten for two intervals."""
        while True:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            late = time.monotonic() - self._beaten_at > 2 * self._interval_seconds
            if not self._threads or (late and len(self._threads) < MAX_HANGING):
                self._beaten_at = time.monotonic()
                thread = threading.Thread(target=self._beat, daemon=True, name="beat")
                # Listed before it starts: a thread beats only while it is the last one here, so the new one would end
                # at once otherwise; and one that hangs ends by itself when its write has come back.
                self._threads = [*self._threads, thread]
                thread.start()
            if self._ended.wait(self._interval_seconds):
                return

    def _beat(self) -> None:
        while threading.current_thread() is self._threads[-1]:  # else another one has taken over
            document = {"sequence": next(self._sequence), "host": socket.gethostname(), "time": self._clock()}
            with best_effort("the launcher's heartbeat could not be written"):
                storage.publish_json(self._uri, document)
            self._beaten_at = time.monotonic()
            if self._ended.wait(self._interval_seconds):
                return


def read_last_beat(paths: RunPaths) -> float:
    """Return when a launcher was last alive, by its own clock, in seconds since the epoch; 0 if that is not known."""
    document = None
    with best_effort("the launcher's heartbeat could not be read"):
        document = storage.read_json_if_exists(paths.launcher)
    beat_time = document.get("time") if isinstance(document, dict) else None
    return float(beat_time) if isinstance(beat_time, int | float) else 0.0


@dataclass(frozen=True)
class Silence:
    """The time for which a launcher has been silent. Pure: `advance` returns the next one."""

    seconds: float = 0.0
    content: bytes = MISSING
    """Content of the file when it was read last."""
    read_at: float | None = None
    """Time of that reading; None: the last look failed, and the time since the one before does not count."""

    def advance(self, content: bytes | None, start: float, end: float, most_seconds: float = float("inf")) -> Silence:
        """Return the silence after one more look, which lasted from `start` to `end`.

        `content` None: the file could not be read. The time that a look takes does not count either: a mount may hang
        for an hour and then show old content. Nor what is more than `most_seconds` since the look before: the watch
        itself was held up, and on the same machine the launcher was, too.
        """
        if content is None:
            return replace(self, read_at=None)
        if content != self.content:
            return Silence(0.0, content, end)
        passed = 0.0 if self.read_at is None else min(start - self.read_at, most_seconds)
        return Silence(self.seconds + passed, content, end)


class LauncherWatch:
    """A worker's watch of its launcher, polled by the worker; it counts by the worker's own clock."""

    def __init__(self, paths: RunPaths, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_seconds = timeout_seconds
        self._uri = paths.launcher
        self._clock = clock
        self._silence = Silence()

    @property
    def interval_seconds(self) -> float:
        """Seconds to wait between two looks."""
        return self.timeout_seconds / LOOKS_PER_TIMEOUT

    def poll(self) -> bool:
        """Look once; return whether the launcher has been silent for the timeout."""
        start = self._clock()
        content = self._read_beat()
        self._silence = self._silence.advance(content, start, self._clock(), LATE * self.interval_seconds)
        return self._silence.seconds >= self.timeout_seconds

    def _read_beat(self) -> bytes | None:
        with best_effort("the launcher's heartbeat could not be read"):
            try:
                return storage.read_bytes(self._uri)
            except FileNotFoundError:
                return MISSING
        return None
