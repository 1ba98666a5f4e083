"""SIGTERM as a request: the handler only notes it; the loop asks every step and all processes stop at the same one.

Processes that user code forks die of it as any other does. Else whoever ends them with it, as Python does with its
daemons, would wait for ever.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from types import FrameType

from kftrain.process import signals


class StopRequest:
    """A request to this process to stop; `requested` is True from the signal on."""

    def __init__(self) -> None:
        self.requested = False

    @contextlib.contextmanager
    def note_sigterm(self) -> Iterator[StopRequest]:
        """Run a block in which SIGTERM sets `requested` and SIGINT is ignored: whoever started the job answers it."""
        _leave_forks_alone()
        with (
            signals.handle_signals([signal.SIGTERM], self._note),
            signals.handle_signals([signals.INTERRUPT], signal.SIG_IGN),
        ):
            yield self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


@functools.cache
def _leave_forks_alone() -> None:
    """Register handlers at forks, once per process, as they cannot be taken back.

    A signal that comes during the fork waits until the child can die of it.
    """
    held = {signal.SIGTERM}
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, held),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, held),
        after_in_child=_die_of_sigterm,
    )


def _die_of_sigterm() -> None:
    if getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is StopRequest._note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
