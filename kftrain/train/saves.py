"""Saves the checkpoints of an attempt: prints how each ended, counts failures, gives up after too many.

A checkpoint that cannot be written (a full disk, a storage that is away) costs nothing yet: training goes on, and the
next interval brings the next one. Only the last one of an attempt has to succeed.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from kftrain.checkpoint.save import CheckpointWriter
from kftrain.checkpoint.settings import CheckpointConfig
from kftrain.checkpoint.staging import State
from kftrain.core.progress import to_log
from kftrain.errors import RetryableError


class Saves:
    """The saves of one attempt. Every method is collective, and each save ends in the same way on all processes."""

    def __init__(
        self,
        writer: CheckpointWriter,
        config: CheckpointConfig,
        count_samples: Callable[[int], int],
        tells: bool,
        forget: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Follow the saves of `writer`.

        `count_samples`: counts those of so many steps; `tells`: this process prints; `forget`: given the step of each
        that failed.
        """
        self._writer = writer
        self._forget = forget
        self._max_failed = config.max_failed_saves
        self._asynchronous = config.asynchronous
        self._count_samples = count_samples
        self._tells = tells
        self._num_failed = 0
        self._interval_seconds = config.interval_seconds
        self._last_start = monotonic()

    @property
    def busy(self) -> bool:
        """True while this process is writing one. Processes may differ: agree before acting on it."""
        return self._writer.busy

    @property
    def overdue(self) -> bool:
        """True where the one that is being written takes longer than it may, on this process."""
        return self._writer.overdue

    @property
    def due(self) -> bool:
        """True when it is time for one. Only the clock of the process that tells counts: agree before acting on it."""
        return self._tells and 0 < self._interval_seconds <= monotonic() - self._last_start

    def go_on(self, busy: bool, overdue: bool) -> None:
        """Take note of how the save in flight has ended, if it has; both flags are what all have agreed on.

        Raises RetryableError where one is overdue or too many in a row have failed, and FencedError.
        """
        # Not this process's own `busy`: where one process settles and another does not, they save at other steps and
        # wait for each other. Once none is busy, settling waits for nobody.
        if overdue:
            raise self._writer.overdue_error()
        if not busy:
            self._settle(self._max_failed)

    def skip(self, step: int) -> None:
        """Say that there is none after `step` steps: the one before is still being written."""
        self._tell(f"warning: checkpoint at step {step} skipped: the one before is still being written")

    def save(self, state: State, history: list[dict[str, Any]], step: int) -> None:
        """Begin a save, or make it, where saves are not asynchronous; none is in flight. Raises as `go_on` does."""
        self._start(state, history, step)
        if not self._asynchronous:
            self._settle(self._max_failed)
        else:
            self._tell(f"checkpoint at step {step} started")

    def settle(self) -> int:
        """Wait for the save in flight, which may have failed; return the newest commit's step. Raises FencedError."""
        self._settle(None)
        return self._writer.committed_step

    def finish(self, state: State, history: list[dict[str, Any]], step: int) -> None:
        """Make the last save, which must succeed; none is in flight. Raises RetryableError or FencedError."""
        self._start(state, history, step)
        self._settle(0)

    def _start(self, state: State, history: list[dict[str, Any]], step: int) -> None:
        self._last_start = monotonic()
        self._writer.save(state, history, step, self._count_samples(step))

    def _settle(self, max_failed: int | None) -> None:
        """Wait for the save in flight; raise a failed one if more than so many in a row have failed (None: never)."""
        # The writer raises the same on all processes, so their counts stay equal and they give up together.
        step = self._writer.step
        if step is None:
            return
        try:
            self._writer.wait()
        except RetryableError as error:
            self._num_failed += 1
            self._forget(step)
            given_up = max_failed is not None and self._num_failed > max_failed
            if given_up or self._writer.step is not None:  # it still is in flight: none can follow
                raise
            count = f"{self._num_failed} failed in a row, {self._max_failed} may"
            self._tell(f"warning: no checkpoint at step {step} ({count}): {error.line}")
        else:
            self._num_failed = 0
            self._tell(f"checkpoint at step {step} committed")

    def _tell(self, line: str) -> None:
        if self._tells:
            to_log(line)
