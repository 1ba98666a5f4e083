"""SIGTERM as a request: the handler only notes it; the loop asks every step and all processes stop at the same one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    @contextlib.contextmanager
    def on_sigterm(self) -> Iterator[StopRequest]:
        """SIGTERM sets `requested` inside the block; SIGINT is ignored: whoever started the job answers it."""
        before = signal.signal(signal.SIGTERM, self._note)
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, before)
            signal.signal(signal.SIGINT, interrupt)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
