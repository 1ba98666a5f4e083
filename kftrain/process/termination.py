"""The termination message of a pod: what Kubernetes shows as the reason why its container ended."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass

TERMINATION_LOG = "/dev/termination-log"
"""File whose content becomes the message; there only in a pod."""

TERMINATION_BYTES = 1000
"""Bytes of a message, at most. Kubernetes keeps 4096 per container and 12 KiB per pod."""

_SIGN = re.compile(r"(?:\w+: )?(?:Error )?(?:\(exit code \d+\): )?kftrain exit code (\d+)(?: \((\w+)\))?: ")
"""Beginning of every message of ours: Kubeflow keeps no exit codes, and no text of a user stands before it."""


@dataclass(frozen=True)
class TerminationMessage:
    """The end of a process as its message tells it."""

    exit_code: int
    kind: str
    """Name of the error's type; empty where there was none."""
    line: str


def leave_message(line: str, exit_code: int, kind: str = "") -> None:
    """Make `line`, cut to TERMINATION_BYTES, the message of this pod; elsewhere nothing happens.

    The exit code and the error's type stand before it, for `parse_message`: readers decide by those, never by words.
    """
    if os.access(TERMINATION_LOG, os.W_OK):
        text = f"kftrain exit code {exit_code}{f' ({kind})' if kind else ''}: {line}"
        with contextlib.suppress(OSError), open(TERMINATION_LOG, "w") as stream:
            stream.write(text.encode()[:TERMINATION_BYTES].decode(errors="ignore"))


def parse_message(message: str) -> TerminationMessage | None:
    """Parse a pod's message, or Argo's about a step; None where the process could not leave one."""
    match = _SIGN.match(message)
    return TerminationMessage(int(match[1]), match[2] or "", message[match.end() :]) if match else None
