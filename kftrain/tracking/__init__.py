"""Tracking: what a training did, recorded in MLflow. Importing this imports no MLflow."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.tracking.base import Point, Tracker
    from kftrain.tracking.runs import (
        DatasetLineage,
        Status,
        check,
        find_running,
        finish_run,
        log_evaluation,
        log_missing,
        log_text,
        read_status,
        start_run,
    )
    from kftrain.tracking.tracker import MlflowTracker, open_tracker

__all__ = [
    "check",
    "start_run",
    "finish_run",
    "find_running",
    "read_status",
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
        "find_running": "kftrain.tracking.runs",
        "read_status": "kftrain.tracking.runs",
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
