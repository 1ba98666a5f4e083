"""Processes that must not outlive their parent.

`python -m kftrain.process.parent_death PROGRAM ARGUMENTS…` becomes such a process, whatever the program is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent() -> None:
    """Has the kernel send SIGKILL to this process when its parent dies (Linux; elsewhere nothing happens).

    A killed launcher must not leave processes behind that hold GPUs and write checkpoints. The agent puts its ranks
    into sessions of their own, so that a signal to the process group does not reach them; this does.
    """
    parent = os.getppid()
    if not hasattr(os, "pidfd_open"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent was gone before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])  # what the kernel was told outlives it
