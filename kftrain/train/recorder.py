"""The training curve: a bounded history, the log lines, and what goes to the tracker."""

from __future__ import annotations

import time
from typing import Any

from kftrain.progress import to_log
from kftrain.tracking.base import Tracker

MAX_POINTS = 4096
"""When the history holds more, every second point goes: it stays a small file however long the training."""

Point = dict[str, Any]


class Recorder:
    """Rank 0's record of one attempt; continues the history of the checkpoint that it resumed from."""

    def __init__(self, history: list[Point], tracker: Tracker | None, num_steps: int) -> None:
        self.history = list(history)
        self._tracker, self._num_steps = tracker, num_steps
        self._before_seconds = float(history[-1]["seconds"]) if history else 0.0
        self._start = self._mark = time.monotonic()

    @property
    def seconds(self) -> float:
        """Training time of all attempts that led here."""
        return self._before_seconds + time.monotonic() - self._start

    def record(self, step: int, values: dict[str, float], num_steps: int, num_samples: int) -> None:
        """A point after `step` steps; `num_steps` were taken and `num_samples` consumed since the point before."""
        now = time.monotonic()
        elapsed_seconds = max(now - self._mark, 1e-9)
        self._mark = now
        rate = num_samples / elapsed_seconds
        self._add({"step": step, **values, "samples_per_second": rate, "seconds": self.seconds})
        eta_seconds = (self._num_steps - step) * elapsed_seconds / num_steps
        shown = " ".join(f"{name} {value:.4g}" for name, value in values.items())
        to_log(f"step {step}/{self._num_steps} {shown} | {rate:.0f} samples/s, {_duration(eta_seconds)} left")

    def record_validation(self, step: int, metrics: dict[str, float]) -> None:
        """A quick evaluation after `step` steps; the time that it took does not count as training speed."""
        values = {f"validation/{name}": value for name, value in metrics.items()}
        if self.history and self.history[-1]["step"] == step:
            self.history[-1].update(values)
            self._log(values, step)
        else:
            self._add({"step": step, **values, "seconds": self.seconds})
        to_log(f"step {step}/{self._num_steps} " + " ".join(f"{name} {value:.4g}" for name, value in values.items()))
        self._mark = time.monotonic()

    def _add(self, point: Point) -> None:
        self.history.append(point)
        if len(self.history) > MAX_POINTS:
            self.history[:] = self.history[1::2]
        self._log({name: value for name, value in point.items() if name != "step"}, point["step"])

    def _log(self, values: dict[str, float], step: int) -> None:
        if self._tracker is not None:
            self._tracker.log_metrics(values, step)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
