"""Metrics of a user's own beside those of the task: functions `module:attr` from sums to metrics. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kftrain.core.plugins import user_code
from kftrain.errors import ConfigError, UserCodeError
from kftrain.tasks.base import TrainingTask
from kftrain.trust import load_code

WHERE = "evaluate.metrics"

MetricsOfSums = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
"""From sums of shape `[...]` to metrics of shape `[...]`, elementwise, as `Task.metrics`."""


def metrics_of(task: TrainingTask, names: Sequence[str]) -> MetricsOfSums:
    """The metrics of a task and of the functions that `evaluate.metrics` names, from the task's sums.

    Raises ConfigError for a function that is not there. What is returned raises UserCodeError where one of them raises,
    answers in another shape, or calls a metric as another one is called.
    """
    functions = {name: _function(name) for name in names}

    def metrics(sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with user_code("task.metrics"):
            found = {name: np.asarray(values) for name, values in task.metrics(sums).items()}
        shape = np.shape(next(iter(sums.values())))
        for name, function in functions.items():
            with user_code(f"{WHERE} {name}"):
                more = {key: np.asarray(values, np.float64) for key, values in function(sums).items()}
            _check(name, more, found, shape)
            found |= more
        return found

    return metrics


def _function(name: str) -> Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]]:
    found: Any = load_code(name, WHERE)
    if not callable(found):
        raise ConfigError("not a function", where=WHERE, value=name, fix="it takes sums and returns metrics")
    return found  # type: ignore[no-any-return]


def _check(name: str, more: Mapping[str, np.ndarray], known: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> None:
    for key, values in more.items():
        if key in known:
            raise UserCodeError("there is a metric of this name already", where=f"{WHERE} {name}", value=key)
        if values.shape != shape:
            raise UserCodeError(
                f"must return {list(shape)} for sums {list(shape)}, got {list(values.shape)}",
                where=f"{WHERE} {name} {key}",
            )
