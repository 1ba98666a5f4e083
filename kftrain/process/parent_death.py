"""Processes that must not outlive their parent.

`python -m kftrain.process.parent_death PARENT PROGRAM ARGUMENTS…` becomes such a process, whatever the program is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when `parent`, who started it, dies (Linux; elsewhere nothing).

    The parent says its own process id: whoever is asked only here may have got another parent already.

    A killed launcher must not leave processes behind that hold GPUs and write checkpoints. The agent puts its ranks
    into sessions of their own, so that a signal to the process group does not reach them; this does.
    """
    if not hasattr(os, "pidfd_open"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent was gone before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def bind_command(command: Sequence[str]) -> list[str]:
    """Wrap a command for a child of this process that dies with it, whatever its program is."""
    return [sys.executable, "-m", "kftrain.process.parent_death", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # what the kernel was told outlives it
