"""The termination message of a pod: what Kubernetes shows as the reason why its container ended."""

from __future__ import annotations

import contextlib
import os

TERMINATION_LOG = "/dev/termination-log"
"""The file that becomes the message; there only in a pod."""

TERMINATION_BYTES = 1000
"""Kubernetes keeps 4096 bytes per container, 12 KiB per pod."""


def leave_message(line: str) -> None:
    """Makes `line`, cut to what is kept, the message of this pod; elsewhere nothing happens."""
    if os.access(TERMINATION_LOG, os.W_OK):
        with contextlib.suppress(OSError), open(TERMINATION_LOG, "w") as stream:
            stream.write(line.encode()[:TERMINATION_BYTES].decode(errors="ignore"))
