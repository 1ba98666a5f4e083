"""Makes the function that computes a run's metrics from sums, and settles which direction of a metric is better."""

from __future__ import annotations

from kftrain.config import Config
from kftrain.core.plugins import user_code
from kftrain.errors import ConfigError
from kftrain.statistics.bootstrap import Metrics
from kftrain.tasks import build_task
from kftrain.tasks.user_metrics import metrics_of


def task_metrics(config: Config) -> Metrics:
    """Return the function from sums to the metrics of the task and of `evaluate.metrics`.

    An error in it is the user's: it becomes a UserCodeError.
    """
    return metrics_of(build_task(config.task), config.evaluate.metrics)


def with_goal(config: Config, is_kept: bool = False) -> Config:
    """Return the configuration with the goal (minimize, maximize) that the task states for the gate's metric.

    `is_kept`: True for a run's own configuration, in which earlier releases wrote a default down: the metric's goal
    replaces it. Raises ConfigError if the configuration contradicts the task, or neither of them states a goal.
    """
    metric, goal = config.registry.metric, config.registry.goal
    task = build_task(config.task)
    with user_code("task.metric_goals"):
        goals = dict(task.metric_goals)
    own = goals.get(metric, goal)
    if own not in ("minimize", "maximize"):
        what, fix = "nobody says whether less or more of this metric is better", "set it; those of the task's metrics"
        raise ConfigError(what, where="registry.goal", value=metric, fix=f"{fix} are known: {', '.join(goals)}")
    if goal not in ("", own) and not is_kept:
        what = f"{'more' if own == 'maximize' else 'less'} of {metric} is better"
        raise ConfigError(what, where="registry.goal", value=goal, fix=f"leave it out, or set it to {own}")
    return config.model_copy(update={"registry": config.registry.model_copy(update={"goal": own})})
