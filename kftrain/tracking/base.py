"""The part of tracking that a training loop uses: points, and a tracker that takes them without getting in the way."""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

MAX_NAME_LENGTH = 250
"""MLflow's limit for names of metrics and parameters."""

_NOT_ALLOWED = re.compile(r"[^/\w.\- ]")


@dataclass(frozen=True)
class Point:
    """A value of a metric at a step."""

    key: str
    value: float
    step: int
    timestamp_ms: int


def now_ms() -> int:
    """Return the time in milliseconds since 1970, as MLflow dates points."""
    return int(time.time() * 1000)


class Tracker(Protocol):
    """A receiver of metrics that never blocks and never raises: a training does not stop for its records."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step, to be recorded now or later."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Wait until everything is recorded, at most this long."""
        ...


def clean_metric_name(name: str) -> str:
    """Return the name under which MLflow takes a metric: a name that it refuses would hold up the queue."""
    cleaned = posixpath.normpath(_NOT_ALLOWED.sub("_", name).replace("..", "__")).strip("/")
    return "_" if cleaned in ("", ".") else cleaned[:MAX_NAME_LENGTH]
