"""The termination message of a pod: what Kubernetes shows as the reason why its container ended."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass

TERMINATION_LOG = "/dev/termination-log"
"""The file that becomes the message; there only in a pod."""

TERMINATION_BYTES = 1000
"""Kubernetes keeps 4096 bytes per container, 12 KiB per pod."""


_SIGN = re.compile(r"(?:\w+: )?(?:Error )?(?:\(exit code \d+\): )?kftrain exit code (\d+)(?: \((\w+)\))?: ")
"""How a message of ours begins: Kubeflow keeps no exit codes, and no text of a user stands before it."""


@dataclass(frozen=True)
class Said:
    """What a message says of how its process ended."""

    exit_code: int
    kind: str
    """Name of the error's type; empty where there was none."""
    line: str


def leave_message(line: str, exit_code: int, kind: str = "") -> None:
    """Makes `line`, cut to what is kept, the message of this pod; elsewhere nothing happens.

    What decides something stands before it, for `said_in`: whoever reads the message goes by that, never by words.
    """
    if os.access(TERMINATION_LOG, os.W_OK):
        text = f"kftrain exit code {exit_code}{f' ({kind})' if kind else ''}: {line}"
        with contextlib.suppress(OSError), open(TERMINATION_LOG, "w") as stream:
            stream.write(text.encode()[:TERMINATION_BYTES].decode(errors="ignore"))


def said_in(message: str) -> Said | None:
    """What a pod's message says, or Argo's about a step; None where the process could not say anything."""
    found = _SIGN.match(message)
    return Said(int(found[1]), found[2] or "", message[found.end() :]) if found else None
