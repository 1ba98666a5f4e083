"""Signals that ask a process to stop, handlers that answer them for a while, and exit codes of deaths by a signal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

INTERRUPT = signal.SIGINT
"""The signal that Ctrl-C sends to every process at the terminal."""

HANGUP = signal.SIGHUP
"""A terminal that was closed."""

STOP = (signal.SIGTERM, HANGUP)
"""Signals that ask a process to stop, besides Ctrl-C."""

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def handle_signals(signals: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Let `handler` answer the signals during the block; afterwards the former handlers do again.

    - In another thread than the main one nothing happens: Python lets only the main thread set handlers, and a stage
      that is called in a thread belongs to somebody else's process, who decides there what a signal means.
    - They are given back, because what runs in the block is one part of a process: a stage of a notebook, an attempt of
      a supervisor that is kept. A handler that stayed would keep Ctrl-C from ending what comes next.
    - A hangup that is ignored stays so: that is what `nohup` does, for a run that is to outlive its terminal.

    A handler interrupts the main thread anywhere, also where it holds a lock: it sets a flag, sends a signal or raises.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    shielded = {number for number in signals if number == HANGUP and signal.getsignal(number) is signal.SIG_IGN}
    # All are read before the first is set: a handler that raises at once must not leave another one in place.
    before = {number: signal.getsignal(number) for number in signals if number not in shielded}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def to_shell_code(returncode: int) -> int:
    """Convert a return code of `subprocess` into a shell's: death by signal N is 128 + N."""
    return 128 - returncode if returncode < 0 else returncode


def describe_end(returncode: int) -> str:
    """Describe the end of a process: `SIGKILL`, or `exit code 3`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
