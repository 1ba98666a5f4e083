"""Processes that must not outlive their parent, what they cost, and how many of them this machine is good for."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

STORE_ENV = "KFTRAIN_STORE_DESCRIPTOR"
"""Descriptor on which rank 0 of a single node listens: no other process can have taken the port meanwhile."""


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


@contextlib.contextmanager
def imports_for_good() -> Iterator[None]:
    """What is imported within the block is not searched for garbage, neither now nor at the end of the process.

    torch is a million objects: that takes a second of a core, on every rank.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks this process to stop, besides Ctrl-C: SIGTERM, and a closed terminal unless `nohup` shields it."""
    hangs_up = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGHUP) if hangs_up else (signal.SIGTERM,)


def shell_code(returncode: int) -> int:
    """A `subprocess` return code as a shell shows it: death by signal N is 128 + N."""
    return 128 - returncode if returncode < 0 else returncode


def num_local_gpus() -> int:
    """NVIDIA GPUs that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        return sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))
    except FileNotFoundError:
        return 0


def num_cpus(cgroups: str = "/sys/fs/cgroup") -> int:
    """CPUs that this process may use, at least 1: of those that it may run on, what the pod's limit leaves.

    A limit is a share of time, which `os.cpu_count` does not know: with a thread for each of the host's cores, a pod
    that may use two of them waits for its own threads.
    """
    may_run_on = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(may_run_on, _cgroup_limit(Path(cgroups)))))


def _cgroup_limit(cgroups: Path) -> float:
    """CPUs by cgroup v2, else v1; infinity where neither sets a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroups / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else float("inf")
    return float("inf")
