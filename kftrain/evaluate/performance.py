"""Measures what the exported model costs: the time of a forward pass, with one sample and with a batch, and memory.

Measured by one process, with the threads and on the device of the evaluation. The rows are those of the data, decoded
beforehand; from tensors on the CPU to an output on the device that is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from kftrain.core.plugins import user_code
from kftrain.data.expanded import ValidationRows
from kftrain.models.modes import evaluating
from kftrain.models.output import output_of
from kftrain.run.documents import Performance, Spread
from kftrain.tasks.base import TrainingTask
from kftrain.tasks.prepare import decode_unaugmented, prepare_batch

MAX_SECONDS = 10.0
"""Seconds after which no more passes are made, for single samples and for batches each."""

MIN_PASSES = 3
LOW, HIGH = 5, 95
"""Outer percentiles that are reported beside the median."""


def measure_performance(
    model: nn.Module,
    task: TrainingTask,
    dataset: ValidationRows,
    batch_size: int,
    num_passes: int,
    device: torch.device,
    export_digest: str,
    export_bytes: int,
    agree: Callable[[bool], bool] = bool,
) -> Performance:
    """Measure time and memory of `num_passes` forward passes with one row and with a batch, spread over the data.

    `agree` turns the answer of one process into that of all, where several call the model together.
    """
    num_rows = dataset.num_samples
    singles = [number * num_rows // num_passes for number in range(num_passes)]
    size = min(batch_size, num_rows)
    starts = [number * (num_rows - size) // num_passes for number in range(num_passes)]
    one = _passes(model, task, dataset, [(row, row + 1) for row in singles], device, agree)
    batch = _passes(model, task, dataset, [(start, start + size) for start in starts], device, agree)
    memory = [peak for _, peak in batch if peak is not None]
    return Performance(
        export_digest=export_digest,
        export_bytes=export_bytes,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        cpu_threads=torch.get_num_threads(),
        num_passes=len(batch),
        batch_size=size,
        latency_seconds=measure_spread([seconds for seconds, _ in one]),
        batch_latency_seconds=measure_spread([seconds for seconds, _ in batch]),
        memory_bytes=measure_spread(memory) if memory else None,
    )


def measure_spread(values: list[float]) -> Spread:
    """Compute the median and the outer percentiles of some values."""
    low, median, high = np.percentile(values, (LOW, 50, HIGH))
    return Spread(median=float(median), low=float(low), high=float(high))


def _passes(
    model: nn.Module,
    task: TrainingTask,
    dataset: ValidationRows,
    ranges: list[tuple[int, int]],
    device: torch.device,
    agree: Callable[[bool], bool],
) -> list[tuple[float, float | None]]:
    """Measure seconds and peak memory in bytes of a pass over each range of rows, after one pass to warm up."""
    costs: list[tuple[float, float | None]] = []
    until = time.monotonic() + MAX_SECONDS
    for start, stop in [ranges[0], *ranges]:
        stored, _ = dataset.read_range(start, stop)
        arrays = decode_unaugmented(task, stored, range(start, stop), dataset.place_of)

        def run(arrays: dict[str, np.ndarray] = arrays) -> None:
            _, inputs = prepare_batch(task, arrays, device)
            with user_code("model.forward"):
                output_of(model, inputs)
            if device.type == "cuda":  # the host only asks for the pass: it is over when the device says so
                torch.cuda.synchronize(device)

        with evaluating(model), torch.no_grad():
            costs.append(_measure_pass(run, device))
        # Where processes share the model, each pass is collective: by its own clock one would stop before the others.
        if agree(len(costs) > MIN_PASSES and time.monotonic() > until):
            break
    return costs[1:]


def _measure_pass(run: Callable[[], None], device: torch.device) -> tuple[float, float | None]:
    _forget_peak(device)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin, _peak_bytes(device)


def _forget_peak(device: torch.device) -> None:
    """Let the peak memory begin at the memory of now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak becomes what is resident now, see proc(5)
    except OSError:
        pass  # not Linux, or not allowed: then there is no figure


def _peak_bytes(device: torch.device) -> float | None:
    """Return the peak of memory in bytes: that of tensors on a GPU, else that of the process; None if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return float(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
