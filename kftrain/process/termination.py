"""The termination message of a pod: what Kubernetes shows as the reason why its container ended."""

from __future__ import annotations

import contextlib
import os
import re

TERMINATION_LOG = "/dev/termination-log"
"""The file that becomes the message; there only in a pod."""

TERMINATION_BYTES = 1000
"""Kubernetes keeps 4096 bytes per container, 12 KiB per pod."""


_CODE = re.compile(r"(?:\w+: )?(?:Error )?(?:\(exit code \d+\): )?kftrain exit code (\d+): ")
"""How the message of a step begins: the code is what Kubeflow does not keep, and no text of a user stands before it."""


def leave_message(line: str) -> None:
    """Makes `line`, cut to what is kept, the message of this pod; elsewhere nothing happens."""
    if os.access(TERMINATION_LOG, os.W_OK):
        with contextlib.suppress(OSError), open(TERMINATION_LOG, "w") as stream:
            stream.write(line.encode()[:TERMINATION_BYTES].decode(errors="ignore"))


def leave_step_message(line: str, exit_code: int) -> None:
    """`leave_message` of a step of a pipeline, with the exit code that `code_of_step` finds in Argo's message."""
    leave_message(f"kftrain exit code {exit_code}: {line}")


def code_of_step(message: str) -> int | None:
    """The exit code in Argo's message about a step; None where the step could not say anything."""
    found = _CODE.match(message)
    return int(found[1]) if found else None
