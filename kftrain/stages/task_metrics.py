"""From sums to the metrics of a run's task and of its user."""

from __future__ import annotations

from kftrain.bootstrap import Metrics
from kftrain.config import Config
from kftrain.tasks import build_task
from kftrain.tasks.user_metrics import metrics_of


def task_metrics(config: Config) -> Metrics:
    """From sums to the metrics of the task and of `evaluate.metrics`; what they raise is the user's."""
    return metrics_of(build_task(config.task), config.evaluate.metrics)
