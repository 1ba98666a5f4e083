"""Tracking: what a training did, recorded in MLflow. Importing this imports no MLflow."""

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
