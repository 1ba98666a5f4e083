"""Figures of what reading has cost, and of how much of the machines is in use, for each recorded point."""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
from time import monotonic

import psutil
import torch

from kftrain.data.counters import Counters
from kftrain.parallel.world import World

USAGE = ("memory_bytes", "disk_used_share", "gpu_memory_share", "gpu_use_share")
"""Figures of `measure_usage`, which not every process may know."""

USAGE_SECONDS = 1.0
"""Seconds for which a measurement of the machine holds: records of a small model may be milliseconds apart."""


class DataMetrics:
    """Measures what reading costs, and how much of the machines is in use, from one recorded point to the next."""

    def __init__(self, counters: Counters, world: World, folder: str = "") -> None:
        """Begin to measure. `counters`: of this process's loader, which goes on counting. `folder`: of its node."""
        self._counters = counters
        self._world = world
        self._folder = folder or tempfile.gettempdir()
        self._last = copy.copy(counters)
        self._process = psutil.Process()  # once: to make one reads as much as to ask it for its memory
        self._usage: dict[str, float] | None = None
        self._measured_at = 0.0

    def collect(self) -> dict[str, float]:
        """Return what was measured since the call before, by name: docs/decoding.md says what each is. Collective."""
        now = copy.copy(self._counters)
        since_last, self._last = now.since(self._last), now
        usage = self._measure_usage()
        # One sum for all of it, as long for two processes as for a thousand: so the skew is a standard deviation.
        values = {**vars(since_last), "squares": since_last.stall_seconds**2, **dict.fromkeys(USAGE, 0.0), **usage}
        values |= {f"knows {name}": float(name in usage) for name in USAGE}
        sums = dict(zip(values, self._world.sum([float(value) for value in values.values()]), strict=True))
        stall, hits, reads = sums["stall_seconds"] / self._world.size, sums["cache_hits"], sums["cache_misses"]
        metrics = {
            "data_stall_seconds": stall,
            "data_stall_skew_seconds": math.sqrt(max(0.0, sums["squares"] / self._world.size - stall**2)),
            "data_read_seconds": sums["read_seconds"],
            "data_decode_seconds": sums["decode_seconds"],
            "data_bytes": sums["num_bytes"],
            "data_queue_depth": sums["ready_steps"] / max(sums["num_steps"], 1.0),
            "storage_retries": sums["retries"],
            **({"data_cache_hit_share": hits / (hits + reads)} if hits + reads else {}),
        }
        return metrics | {name: sums[name] / known for name in USAGE if (known := sums[f"knows {name}"])}

    def _measure_usage(self) -> dict[str, float]:
        """Measure the use of the machine, unless that was done a moment ago: files of the kernel are read for it."""
        if self._usage is None or monotonic() - self._measured_at >= USAGE_SECONDS:
            self._usage, self._measured_at = measure_usage(self._process, self._world.device, self._folder), monotonic()
        return self._usage


def measure_usage(process: psutil.Process, device: torch.device, folder: str) -> dict[str, float]:
    """Measure how much of its machine a process uses, as far as somebody can tell."""
    usage = {"memory_bytes": float(process.memory_info().rss)}
    with contextlib.suppress(OSError):
        usage["disk_used_share"] = psutil.disk_usage(folder).percent / 100
    if device.type == "cuda":
        free_bytes, all_bytes = torch.cuda.mem_get_info(device)
        usage["gpu_memory_share"] = 1 - free_bytes / all_bytes
        with contextlib.suppress(ImportError):  # without the library of NVML, whose errors are of its own kind
            import pynvml

            with contextlib.suppress(pynvml.NVMLError, RuntimeError):  # as for a part of a GPU, or without the right
                usage["gpu_use_share"] = torch.cuda.utilization(device) / 100
    return usage
