"""Limits of this machine for a process: the CPUs, GPUs and memory that it may use."""

from __future__ import annotations

import contextlib
import math
import os
import re
from pathlib import Path

NODE_NAME_ENV = "KFTRAIN_NODE_NAME"
"""Variable with the name of the machine that a worker pod runs on; errors name it."""

RACK_ENV = "KFTRAIN_RACK"
"""Variable with the rack of that machine, or whatever else its neighbours in the network have in common."""


def count_local_gpus() -> int:
    """Count the NVIDIA GPUs that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        return sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))
    except FileNotFoundError:
        return 0


def num_cpus(cgroups: str = "/sys/fs/cgroup") -> int:
    """Count the CPUs that this process may use, at least 1: of those that it may run on, what the pod's limit leaves.

    A limit is a share of time, which `os.cpu_count` does not know: with a thread for each of the host's cores, a pod
    that may use two of them waits for its own threads.
    """
    may_run_on = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(may_run_on, _read_cgroup_limit(Path(cgroups)))))


def read_available_bytes(meminfo: str = "/proc/meminfo", cgroups: str = "/sys/fs/cgroup") -> float:
    """Measure the bytes that this process could still take of the machine and of the pod's limit; infinite if unknown.

    What the kernel keeps of files counts as free, for it is given up before anybody is ended for want of memory.
    """
    free_bytes = float("inf")
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":", 1) for line in Path(meminfo).read_text().splitlines())
        free_bytes = sum(int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError, LookupError):
            folder = Path(cgroups, limit).parent
            counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left = int(Path(cgroups, limit).read_text()) - int(Path(cgroups, used).read_text())
            free_bytes = min(free_bytes, left + int(counted["inactive_file"]) + int(counted["active_file"]))
    return free_bytes


def _read_cgroup_limit(cgroups: Path) -> float:
    """Read the limit of CPUs from cgroup v2, else v1; infinity where neither sets one."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroups / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else float("inf")
    return float("inf")
