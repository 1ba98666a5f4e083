"""A user's own metrics beside those of the task: functions `module:attr` from sums to metrics. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kftrain.config import Config
from kftrain.core.plugins import user_code
from kftrain.errors import ConfigError, UserCodeError
from kftrain.statistics.bootstrap import Metrics
from kftrain.tasks import build_task
from kftrain.tasks.base import TrainingTask
from kftrain.trust import load_code

WHERE = "evaluate.metrics"

MetricsOfSums = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
"""Function from sums of shape `[...]` to metrics of shape `[...]`, elementwise, like `Task.metrics`."""


def metrics_of(task: TrainingTask, names: Sequence[str]) -> MetricsOfSums:
    """Join the metrics of a task with the functions that `evaluate.metrics` names into one function of the task's sums.

    Raises ConfigError for a function that does not exist. The returned function raises UserCodeError if one of them
    raises, answers in another shape, or repeats the name of a metric.
    """
    functions = {name: _load_function(name) for name in names}

    def metrics(sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with user_code("task.metrics"):
            known = {name: np.asarray(values) for name, values in task.metrics(sums).items()}
        shape = np.shape(next(iter(sums.values())))
        for name, function in functions.items():
            with user_code(f"{WHERE} {name}"):
                more = {key: np.asarray(values, np.float64) for key, values in function(sums).items()}
            _check_metrics(name, more, known, shape)
            known |= more
        return known

    return metrics


def _load_function(name: str) -> Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]]:
    function: Any = load_code(name, WHERE)
    if not callable(function):
        raise ConfigError("not a function", where=WHERE, value=name, fix="it takes sums and returns metrics")
    return function  # type: ignore[no-any-return]


def _check_metrics(
    name: str, more: Mapping[str, np.ndarray], known: Mapping[str, np.ndarray], shape: tuple[int, ...]
) -> None:
    for key, values in more.items():
        if key in known:
            raise UserCodeError("there is a metric of this name already", where=f"{WHERE} {name}", value=key)
        if values.shape != shape:
            raise UserCodeError(
                f"must return {list(shape)} for sums {list(shape)}, got {list(values.shape)}",
                where=f"{WHERE} {name} {key}",
            )


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
