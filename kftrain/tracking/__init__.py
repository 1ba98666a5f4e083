"""Tracking: what a training did, recorded in MLflow. Importing this imports no MLflow."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.tracking.base import Point as Point
    from kftrain.tracking.base import Tracker as Tracker
    from kftrain.tracking.runs import DatasetLineage as DatasetLineage
    from kftrain.tracking.runs import Status as Status
    from kftrain.tracking.runs import check as check
    from kftrain.tracking.runs import find_running as find_running
    from kftrain.tracking.runs import finish_run as finish_run
    from kftrain.tracking.runs import log_evaluation as log_evaluation
    from kftrain.tracking.runs import log_missing as log_missing
    from kftrain.tracking.runs import log_text as log_text
    from kftrain.tracking.runs import read_status as read_status
    from kftrain.tracking.runs import start_run as start_run
    from kftrain.tracking.tracker import MlflowTracker as MlflowTracker
    from kftrain.tracking.tracker import open_tracker as open_tracker

__getattr__ = attributes(
    __name__,
    {
        "kftrain.tracking.runs": (
            "check",
            "start_run",
            "finish_run",
            "find_running",
            "read_status",
            "log_evaluation",
            "log_missing",
            "log_text",
            "DatasetLineage",
            "Status",
        ),
        "kftrain.tracking.tracker": ("open_tracker", "MlflowTracker"),
        "kftrain.tracking.base": ("Tracker", "Point"),
    },
)
