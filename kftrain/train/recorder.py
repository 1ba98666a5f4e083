"""The training curve: a bounded history, the log lines, and what goes to the tracker."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from kftrain.core.progress import to_log
from kftrain.tracking.base import Tracker
from kftrain.train.trainer_status import TrainerStatus

MAX_POINTS = 4096
"""Number of points above which the history is thinned: it stays a small file however long the training."""

VALIDATION = "validation/"
"""Prefix of the names of a quick evaluation's metrics."""

Point = dict[str, Any]


class Recorder:
    """Rank 0's record of one attempt; continues the history of the checkpoint that it resumed from."""

    def __init__(self, history: list[Point], tracker: Tracker | None, num_steps: int, num_validated: int = 0) -> None:
        """Go on with `history`. `num_validated`: samples that quick evaluations look at; 0 where those are all."""
        self.history = list(history)
        self._tracker = tracker
        self._num_steps = num_steps
        self._part = f" (first {num_validated:,} samples)" if num_validated else ""
        self._before_seconds = float(history[-1]["seconds"]) if history else 0.0
        self._trainer_status = TrainerStatus()
        self._start = time.monotonic()
        self._mark = self._start

    @property
    def seconds(self) -> float:
        """Training time of all attempts that led here."""
        return self._before_seconds + time.monotonic() - self._start

    def record(
        self,
        step: int,
        values: dict[str, float],
        num_steps: int,
        num_samples: int,
        data: Mapping[str, float] | None = None,
    ) -> None:
        """Record a point after `step` steps; `num_steps` were taken and `num_samples` consumed since the point before.

        `data`: what reading and the machine have cost since then, with `data_stall_seconds`; for the log and the
        tracker only, the history is short.
        """
        now = time.monotonic()
        elapsed_seconds = max(now - self._mark, 1e-9)
        self._mark = now
        rate = num_samples / elapsed_seconds
        stall_share = min(1.0, data["data_stall_seconds"] / elapsed_seconds) if data else 0.0
        self._add({"step": step, **values, "samples_per_second": rate, "seconds": self.seconds})
        costs = {**data, "data_stall_share": stall_share} if data else {}
        self._log(costs, step)
        remaining_seconds = (self._num_steps - step) * elapsed_seconds / num_steps
        self._trainer_status.report(step, self._num_steps, remaining_seconds, {**values, "samples_per_second": rate})
        shown = " ".join(f"{name} {value:.4g}" for name, value in values.items())
        left = _format_duration(remaining_seconds)
        to_log(f"step {step}/{self._num_steps} {shown} | {rate:.0f} samples/s{format_costs(costs)}, {left} left")

    def record_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Record a quick evaluation after `step` steps; the time that it took does not count as training speed.

        A metric that is not finite stands in the log only: JSON has no number for it.
        """
        shown = " ".join(f"{VALIDATION}{name} {value:.4g}" for name, value in metrics.items())
        to_log(f"step {step}/{self._num_steps} {shown}{self._part}")
        values = {f"{VALIDATION}{name}": value for name, value in metrics.items() if math.isfinite(value)}
        if self.history and self.history[-1]["step"] == step:
            self.history[-1].update(values)
            self._log(values, step)
        elif values:
            self._add({"step": step, **values, "seconds": self.seconds})
        self._mark = time.monotonic()

    def _add(self, point: Point) -> None:
        self.history.append(point)
        if len(self.history) > MAX_POINTS:
            self.history[:] = thin_history(self.history, MAX_POINTS // 2)
        self._log({name: value for name, value in point.items() if name != "step"}, point["step"])

    def _log(self, values: dict[str, float], step: int) -> None:
        if self._tracker is not None and values:
            self._tracker.log_metrics(values, step)


def thin_history(history: list[Point], max_points: int) -> list[Point]:
    """Return at most `max_points`, 3 or more, of a history, evenly over its steps, with the newest one.

    Steps fall into bins whose width is a power of two. The first point of a bin stays, and its first one with a
    validation, which are few. Bins of one width are made of those of the width before, so that thinning again and
    again leaves the same points as thinning once: the beginning of the curve stays as dense as its middle.
    """
    # Always from the whole history: a bin's first point stays its first point, whatever the width was before.
    kept, width = history, 1
    while len(kept) > max_points:
        width *= 2
        first_of_bin: dict[tuple[int, bool], Point] = {}
        for point in history[:-1]:
            validated = any(name.startswith(VALIDATION) for name in point)
            first_of_bin.setdefault((point["step"] // width, validated), point)
        kept = [*first_of_bin.values(), history[-1]]
    return kept


COSTS = {
    "data_stall_share": (0.01, ", {:.0%} waiting for data"),
    "data_cache_hit_share": (0.0, ", {:.0%} from the cache"),
    "storage_retries": (1.0, ", {:.0f} retries"),
    "experts/largest_load": (0.0, ", fullest expert {:.2f} x the mean"),
    "experts/dropped_share": (1e-6, ", {:.1%} of choices dropped"),
    "gpu_use_share": (0.0, ", GPU {:.0%}"),
    "gpu_memory_share": (0.0, ", GPU memory {:.0%}"),
    "memory_bytes": (1e9, ", {1:.1f} GB"),
    "disk_used_share": (0.8, ", disk {:.0%} full"),
}
"""Costs of a point that the log shows: from which value on, and how."""


def format_costs(costs: Mapping[str, float]) -> str:
    """Write what is worth a look, for the log."""
    shown = ((costs[name], least, text) for name, (least, text) in COSTS.items() if name in costs)
    return "".join(text.format(value, value / 1e9) for value, least, text in shown if value >= least)


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
