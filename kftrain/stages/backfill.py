"""Fills in the end of a training curve that MLflow had not taken when the job ended.

A rank does not wait for MLflow at the end of a training: the curve is in the run's folder.
"""

from __future__ import annotations

from typing import Any

from kftrain import tracking
from kftrain.config import Config
from kftrain.core.progress import Progress
from kftrain.errors import TrackingError
from kftrain.run.paths import RunPaths
from kftrain.stages import tracked


def complete(paths: RunPaths, config: Config, history: list[dict[str, Any]], progress: Progress) -> None:
    """Record the points of a training curve that the MLflow run lacks, if there is one.

    Nothing fails here: if MLflow is down, a warning goes to `progress`.
    """
    mlflow_run_id = tracked.read(paths)
    if not mlflow_run_id:
        return
    try:
        tracking.log_missing(config.tracking.uri, mlflow_run_id, history)
    except TrackingError as error:
        progress(f"warning: the end of the training curve is missing in MLflow: {error.line}")
