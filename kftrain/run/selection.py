"""The choice of the checkpoint that becomes the model: the last one, or the best one by a metric of evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

Goal = Literal["minimize", "maximize"]


class BestEvaluation(BaseModel):
    """The best evaluation of a training so far; part of each checkpoint, so that a restart goes on from it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    metric: str
    goal: Goal
    step: int = 0
    """Step of the best evaluation, whose checkpoint is kept; 0: none had a finite value."""
    value: float | None = None
    """Value of the metric at the best one; None: none had a finite value."""
    num_without_improvement: int = 0
    """Number of evaluations since the best one, or of all so far where there is none."""


def improves(before: BestEvaluation | None, goal: Goal, value: float) -> bool:
    """Tell whether an evaluation is better than all before it; one that is not finite never is."""
    if before is None or before.value is None or not math.isfinite(value):
        return math.isfinite(value)
    return value < before.value if goal == "minimize" else value > before.value


def count_evaluation(before: BestEvaluation | None, metric: str, goal: Goal, step: int, value: float) -> BestEvaluation:
    """Return the best evaluation after one more at `step`, with the count since then."""
    if improves(before, goal, value):
        return BestEvaluation(metric=metric, goal=goal, step=step, value=value)
    best = before or BestEvaluation(metric=metric, goal=goal)
    return best.model_copy(update={"num_without_improvement": best.num_without_improvement + 1})


def order_steps(selection: BestEvaluation | None, values: Mapping[int, float], steps: Sequence[int]) -> list[int]:
    """Sort the steps of checkpoints: the model's first, then those that replace it where all before are damaged.

    Without a best evaluation the newest is the model, and no other can be. Otherwise the next best of those that were
    evaluated takes its place, and where none was, the newest.

    Args:
        selection: The best evaluation, where that decides.
        values: Values of its metric, by step.
        steps: Steps of the checkpoints that there are.
    """
    newest_first = sorted(set(steps), reverse=True)
    if selection is None or selection.value is None:
        return newest_first[:1]
    best, sign = selection.step, 1.0 if selection.goal == "minimize" else -1.0

    def place(step: int) -> tuple[bool, float]:
        value = values.get(step, math.nan)
        return step != best, sign * value if math.isfinite(value) else math.inf

    return sorted(newest_first, key=place)


def describe_choice(selection: BestEvaluation, trained_steps: int, num_steps: int, step: int | None = None) -> str:
    """Describe the choice: `best validation/loss 1.61 at step 300 of 1,000; stopped after 5 evaluations without …`.

    `step`: step of the checkpoint that is the model, where that is not the best one.
    """
    metric, count = f"validation/{selection.metric}", selection.num_without_improvement
    evaluations = f"{count:,} evaluation{'' if count == 1 else 's'}"
    if selection.value is None:
        text = f"no finite {metric} in {evaluations}: the last checkpoint is the model"
    else:
        text = f"best {metric} {selection.value:.4g} at step {selection.step:,} of {num_steps:,}"
        if step not in (None, selection.step):
            text += f", whose checkpoint is damaged or gone: that of step {step:,} is the model"
    return text if trained_steps >= num_steps else f"{text}; stopped after {evaluations} without improvement"
