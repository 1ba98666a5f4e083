"""How stages and workers say what they are doing: one line of text at a time.

Inside a pipeline they share their standard output with kfp's own log and with whatever libraries print, so their
lines carry a prefix by which `kftrain run` finds them again, to show them. Nothing is decided by them (channel.py).
"""

from __future__ import annotations

import re
import select
import sys
from collections.abc import Callable

from kftrain.core.printable import printable

Progress = Callable[[str], None]
"""Function that takes one line, without its newline."""

PREFIX = "kftrain| "
"""Mark of a line of ours in a log of many writers."""

ERROR_LINE = "error "
"""Beginning of a stage's line that says why it failed: `error <error.json on one line>`."""

STEP = re.compile(r"^step (\d{1,15})/(\d{1,15})\b")
"""Beginning of the line that rank 0 prints at every recorded step."""

CONSOLE_SECONDS = 5.0
"""Seconds that a console may be halted before lines are left out."""


def to_log(line: str) -> None:
    """Write a marked line to standard output at once, whatever it is connected to.

    A console that nobody reads costs the line: whoever waits for it would stop a launcher, and with it a job.
    """
    if not _is_read():
        return
    sys.stdout.write(f"{PREFIX}{printable(line)}\n")
    sys.stdout.flush()


def _is_read() -> bool:
    """Tell whether standard output takes a line now, or soon; once it has not, nobody waits for it again."""
    global _console_seconds
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # something in memory
        return True
    writable = select.select([], [descriptor], [], _console_seconds)[1]
    _console_seconds = CONSOLE_SECONDS if writable else 0.0
    return bool(writable)


_console_seconds = CONSOLE_SECONDS


def strip_mark(raw: str) -> str | None:
    """Return the text of a marked line, which other programs may have indented; None for everybody else's lines."""
    _, mark, text = raw.partition(PREFIX)
    return text.rstrip("\n") if mark else None
