"""Tracking: what a training did, recorded in MLflow. Importing this imports no MLflow."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.tracking.base import Point, Tracker
    from kftrain.tracking.runs import (
        DatasetLineage,
        Status,
        check,
        finish_run,
        log_evaluation,
        log_missing,
        log_text,
        running,
        start_run,
        status_of,
    )
    from kftrain.tracking.tracker import MlflowTracker, open_tracker

__all__ = [
    "check",
    "start_run",
    "finish_run",
    "running",
    "status_of",
    "log_evaluation",
    "log_missing",
    "log_text",
    "open_tracker",
    "DatasetLineage",
    "Status",
    "Tracker",
    "MlflowTracker",
    "Point",
]

__getattr__ = attributes(
    __name__,
    {
        "check": "kftrain.tracking.runs",
        "start_run": "kftrain.tracking.runs",
        "finish_run": "kftrain.tracking.runs",
        "running": "kftrain.tracking.runs",
        "status_of": "kftrain.tracking.runs",
        "log_evaluation": "kftrain.tracking.runs",
        "log_missing": "kftrain.tracking.runs",
        "log_text": "kftrain.tracking.runs",
        "open_tracker": "kftrain.tracking.tracker",
        "DatasetLineage": "kftrain.tracking.runs",
        "Status": "kftrain.tracking.runs",
        "Tracker": "kftrain.tracking.base",
        "MlflowTracker": "kftrain.tracking.tracker",
        "Point": "kftrain.tracking.base",
    },
)
