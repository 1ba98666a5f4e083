"""How stages and workers say what they are doing: one line of text at a time.

Inside a pipeline they share their standard output with kfp's own log and with whatever libraries print, so their
lines carry a prefix by which `kftrain run` finds them again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

Progress = Callable[[str], None]
"""Takes one line, without its newline."""

PREFIX = "kftrain| "
"""Marks a line of ours in a log of many writers."""

RUN_LINE = "run "
"""A stage's line that names the run: `run <run URI>`."""

ERROR_LINE = "error "
"""A stage's line that says why it failed: `error <error.json on one line>`."""

STEP = re.compile(r"^step (\d+)/(\d+)\b")
"""What rank 0 prints at every recorded step."""


VERIFYING = "verifying the shards"
"""What rank 0 prints when all processes have met, and the data is looked at before the first step."""


def to_log(line: str) -> None:
    """Writes a marked line to standard output at once, whatever it is connected to."""
    sys.stdout.write(f"{PREFIX}{line}\n")
    sys.stdout.flush()


def unmarked(raw: str) -> str | None:
    """The text of a marked line, which other programs may have indented; None for everybody else's lines."""
    _, mark, text = raw.partition(PREFIX)
    return text.rstrip("\n") if mark else None
