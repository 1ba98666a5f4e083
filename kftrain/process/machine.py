"""Limits of this machine for a process: the CPUs, GPUs and memory that it may use."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import stat
import tempfile
import time
from pathlib import Path

from kftrain.errors import LaunchError

NODE_NAME_ENV = "KFTRAIN_NODE_NAME"
"""Variable with the name of the machine that a worker pod runs on; errors name it."""

RACK_ENV = "KFTRAIN_RACK"
"""Variable with the rack of that machine, or whatever else its neighbours in the network have in common."""

SCRATCH_ENV = "KFTRAIN_SCRATCH"
"""Variable with the size of a worker pod's /tmp, as Kubernetes writes it; a pod that fills it is evicted."""

LOCKS_MEMORY_ENV = "KFTRAIN_LOCKS_MEMORY"
"""Variable of a worker pod whose network device needs memory that is locked, without a limit."""

IPC_LOCK_BIT = 14
"""Number of the capability to lock memory beyond the limit (linux/capability.h)."""


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


def read_busy_seconds() -> float:
    """Read how long the calling thread has run so far, or has waited for a processor; without Linux how long it ran."""
    with contextlib.suppress(OSError, ValueError):
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return (int(ran) + int(waited)) / 1e9
    return time.thread_time()


def read_available_bytes(meminfo: str = "/proc/meminfo", cgroups: str = "/sys/fs/cgroup") -> float:
    """Measure the bytes that this process could still take of the machine, and of the pod's limit and its own.

    Infinite if unknown.

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
    own_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError, LookupError):
        if own_limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            free_bytes = min(free_bytes, own_limit - pages * resource.getpagesize())
    return free_bytes


def read_scratch_bytes() -> float:
    """Read the size of this pod's /tmp in bytes; infinite where nobody says it."""
    match = re.fullmatch(r"([0-9.]+)([kKMGTPE]?)(i?)", os.environ.get(SCRATCH_ENV, ""))
    return float(match[1]) * (1024 if match[3] else 1000) ** " KMGTPE".find(match[2].upper()) if match else math.inf


def require_lockable_memory(status: str = "/proc/self/status") -> None:
    """Raise LaunchError if the network device of this pod needs locked memory, and the machine limits it.

    NCCL would say `Cannot allocate memory`, or fall back to sockets. Kubernetes has no field for the limit, which
    containers have from their runtime; and no added capability is in effect for other users than root.
    """
    if LOCKS_MEMORY_ENV not in os.environ:
        return
    _, limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", Path(status).read_text(), re.M)
    if limit_bytes != resource.RLIM_INFINITY and not (capabilities and int(capabilities[1], 16) >> IPC_LOCK_BIT & 1):
        raise LaunchError(
            "the network device needs memory that is locked, and this machine limits it",
            where="launch.kubernetes.fabric",
            value=f"{limit_bytes} bytes",
            fix="set LimitMEMLOCK=infinity for containerd on the machines, or launch.kubernetes.fabric.runs_as_root",
        )
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))


def make_node_folder(cache_dir: str, name: str) -> Path | None:
    """Make a folder of this node that only this user can write to; None where there can be none.

    `cache_dir`: where it lies; empty: with temporary files. Without a name it is what holds those with one.
    """
    folder = Path(cache_dir or tempfile.gettempdir()) / f"kftrain-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            (folder / name).mkdir(mode=0o700, exist_ok=True)
            return folder / name
    return None


def _read_cgroup_limit(cgroups: Path) -> float:
    """Read the limit of CPUs from cgroup v2, else v1; infinity where neither sets one."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroups / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else float("inf")
    return float("inf")
