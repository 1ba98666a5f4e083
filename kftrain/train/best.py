"""Follows which checkpoint of a training is the best, and ends it where none is better for too long.

All processes come to the same answers, since all are given the first one's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kftrain.checkpoint.settings import CheckpointConfig
from kftrain.config import Config
from kftrain.core.progress import to_log
from kftrain.errors import ConfigError, KftrainError, error_from_dict
from kftrain.parallel.world import World
from kftrain.run.selection import BestEvaluation, Goal, count_evaluation, describe_choice, improves


def choose_goal(config: Config, loss_metric: str) -> Goal:
    """Return the better direction of the metric `keep_best`. `loss_metric`: the task's. Raises ConfigError."""
    saving: CheckpointConfig = config.checkpoint
    if saving.keep_best_goal is not None:
        return saving.keep_best_goal
    if saving.keep_best == config.registry.metric and config.registry.goal:
        return config.registry.goal
    if saving.keep_best == loss_metric:
        return "minimize"
    what, fix = "nobody has said whether less or more of this metric is better", "set it to minimize or maximize"
    raise ConfigError(what, where="checkpoint.keep_best_goal", value=saving.keep_best, fix=fix)


class BestCheckpoint:
    """The best evaluation so far, whose checkpoint is kept."""

    def __init__(self, config: Config, world: World, loss_metric: str) -> None:
        """Begin without one. Raises ConfigError where nobody knows which direction of the metric is better."""
        self._config = config
        self._world = world
        self._metric = config.checkpoint.keep_best
        self._goal: Goal = choose_goal(config, loss_metric) if self._metric else "minimize"
        self._before: BestEvaluation | None = None
        """Selection before the last improvement, whose checkpoint may still fail to be written."""
        self.selection: BestEvaluation | None = None
        """The best evaluation, and how many came after it; None before the first one."""

    @property
    def is_wanted(self) -> bool:
        """True where the configuration asks for the best checkpoint."""
        return bool(self._metric)

    @property
    def is_enough(self) -> bool:
        """True where training ends, because as many evaluations as it waits for brought no improvement."""
        patience, best = self._config.train.stop_after_no_improvement, self.selection
        return bool(patience) and best is not None and best.num_without_improvement >= patience

    def resume(self, selection: BestEvaluation | None) -> None:
        """Take over the checkpoint's selection, unless it is of another metric."""
        if selection is not None and (selection.metric, selection.goal) == (self._metric, self._goal):
            self.selection = self._before = selection

    def agree(self, metrics: Mapping[str, float] | None) -> float:
        """Return the metric's value on all processes; the first one gives `metrics`. Collective. Raises ConfigError."""
        answer: tuple[float | None, dict[str, Any] | None] = (None, None)
        if metrics is not None:
            try:
                answer = self._read_metric(metrics), None
            except KftrainError as error:  # the others wait for an answer: they get the error, and raise it, too
                answer = None, error.to_dict()
        value, problem = self._world.from_main(answer)
        if problem is not None:
            raise error_from_dict(problem)
        return float(value)

    def would_improve(self, value: float) -> bool:
        """Tell whether an evaluation with this value would be the best."""
        return improves(self.selection, self._goal, value)

    def take(self, step: int, value: float) -> None:
        """Count an evaluation. The checkpoint of the best one before must have been written, or have failed."""
        if self.would_improve(value):
            self._before = self.selection
        self.selection = count_evaluation(self.selection, self._metric, self._goal, step, value)

    def forget(self, step: int) -> None:
        """Go back to the best one before, where the checkpoint at this step was the best and could not be written."""
        if self.selection is not None and self.selection.step == step:
            self.selection = self._before

    def print_result(self, trained_steps: int) -> None:
        """Print which one is the best, and why training ends, where a best one is kept."""
        if not (self.is_wanted and self._world.is_main):
            return
        if self.selection is not None:
            warning = "warning: " if self.selection.value is None else ""
            to_log(warning + describe_choice(self.selection, trained_steps, self._config.train.steps))

    def _read_metric(self, metrics: Mapping[str, float]) -> float:
        if self._metric in metrics:
            return metrics[self._metric]
        raise ConfigError(
            "the task has no such metric",
            where="checkpoint.keep_best",
            value=self._metric,
            fix=f"known: {', '.join(sorted(metrics)) or 'none'}",
        )
