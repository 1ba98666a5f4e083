"""The life of a stage's process: it ends with the command that started it, and a signal becomes an error.

`kftrain run` is three processes away from a stage (runner, shell, python), and a SIGKILL reaches only the
process it is sent to. So every stage watches `kftrain run` itself. What a stage launches must die with the
stage (`parent_death.die_with_parent`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from kftrain.errors import InterruptedByUser, KftrainError, Preempted
from kftrain.process import signals

PARENT_VARIABLE = "KFTRAIN_PARENT_PID"
"""Variable with the process id of the `kftrain run` that a stage belongs to."""

STOP_VARIABLE = "KFTRAIN_STOP"
"""Set by the runner once a stop was asked for: a stage that starts after the signal does not miss it."""

POLL_SECONDS = 0.5
"""Seconds between two looks for the parent, where the kernel has no process descriptors."""


def end_with_parent() -> None:
    """End this process group when the `kftrain run` that it belongs to is gone, if there is one."""
    parent = os.environ.get(PARENT_VARIABLE, "")
    if parent.isdigit():
        threading.Thread(target=_kill_group_after, args=(int(parent),), daemon=True, name="parent-watch").start()


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Run a block in which SIGTERM or SIGHUP raises Preempted, Ctrl-C InterruptedByUser, so that a stage can say so.

    A block that starts after the stop was asked for does not run at all.
    """
    if os.environ.get(STOP_VARIABLE):
        raise make_stop_error()
    with signals.handle_signals(signals.STOP, _raise_stopped):
        try:
            yield
        except KeyboardInterrupt as interrupt:
            raise InterruptedByUser("interrupted") from interrupt


def make_stop_error() -> KftrainError:
    """Build the error that a stage ends with when it is asked to stop."""
    return Preempted("stopped by a signal", fix="resume the run")


def _raise_stopped(_signal: int, _frame: FrameType | None) -> None:
    raise make_stop_error()


def _kill_group_after(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while not hasattr(os, "pidfd_open"):
            os.kill(process_id, 0)
            time.sleep(POLL_SECONDS)
        select.select([os.pidfd_open(process_id)], [], [])
    os.killpg(0, signal.SIGKILL)
