"""The best checkpoint of a training, and when it has not become better for too long: the same on all processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kftrain.checkpoint.settings import CheckpointConfig
from kftrain.config import Config
from kftrain.core.progress import to_log
from kftrain.errors import ConfigError, KftrainError, error_from_dict
from kftrain.parallel.world import World
from kftrain.run.selection import BestEvaluation, Goal, after_evaluation, improves, in_words


def goal_of(config: Config, loss_metric: str) -> Goal:
    """Which direction of `checkpoint.keep_best` is better. `loss_metric`: of the task. Raises ConfigError."""
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
    """Which evaluation was the best so far."""

    def __init__(self, config: Config, world: World, loss_metric: str) -> None:
        """Raises ConfigError where nobody knows which direction of the metric is better."""
        self._config = config
        self._world = world
        self._metric = config.checkpoint.keep_best
        self._goal: Goal = goal_of(config, loss_metric) if self._metric else "minimize"
        self._before: BestEvaluation | None = None
        """As it was before the last improvement, whose checkpoint may still fail to be written."""
        self.selection: BestEvaluation | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether a best one is to be kept."""
        return bool(self._metric)

    @property
    def is_enough(self) -> bool:
        """Whether there was no improvement for as many evaluations as are waited for."""
        patience = self._config.train.stop_after_no_improvement
        found = self.selection
        return bool(patience) and found is not None and found.num_without_improvement >= patience

    def resume(self, found: BestEvaluation | None) -> None:
        """Takes over what the checkpoint says, unless it is of another metric."""
        if found is not None and (found.metric, found.goal) == (self._metric, self._goal):
            self.selection = self._before = found

    def agree(self, metrics: Mapping[str, float] | None) -> float:
        """The value of the metric on all processes; `metrics` on the first one. Collective. Raises ConfigError."""
        found: tuple[float | None, dict[str, Any] | None] = (None, None)
        if metrics is not None:
            try:
                found = self._value_in(metrics), None
            except KftrainError as error:
                found = None, error.to_dict()
        value, problem = self._world.from_main(found)
        if problem is not None:
            raise error_from_dict(problem)
        return float(value)

    def would_improve(self, value: float) -> bool:
        """Whether an evaluation with this value would be the best."""
        return improves(self.selection, self._goal, value)

    def take(self, step: int, value: float) -> None:
        """Counts an evaluation. The checkpoint of the best one before must have been written."""
        if self.would_improve(value):
            self._before = self.selection
        self.selection = after_evaluation(self.selection, self._metric, self._goal, step, value)

    def forget(self, step: int) -> None:
        """The checkpoint at this step could not be written: if it was the best one, the one before it is again."""
        if self.selection is not None and self.selection.step == step:
            self.selection = self._before

    def tell(self, trained_steps: int) -> None:
        """Says which one is the best, and why training ends; or that none was, though one was to be kept."""
        if not (self.is_wanted and self._world.is_main):
            return
        if self.selection is not None:
            warning = "warning: " if self.selection.value is None else ""
            to_log(warning + in_words(self.selection, trained_steps, self._config.train.steps))

    def _value_in(self, metrics: Mapping[str, float]) -> float:
        if self._metric in metrics:
            return metrics[self._metric]
        raise ConfigError(
            "the task has no such metric",
            where="checkpoint.keep_best",
            value=self._metric,
            fix=f"known: {', '.join(sorted(metrics)) or 'none'}",
        )
