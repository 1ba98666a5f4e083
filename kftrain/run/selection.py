"""Which checkpoint of a training counts: the best one by a metric of its periodic evaluations, where that is wanted."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict

Goal = Literal["minimize", "maximize"]


class BestEvaluation(BaseModel):
    """The best evaluation of a training so far; part of each checkpoint, so that a restart goes on from it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    metric: str
    goal: Goal
    step: int
    """Steps that were done; the checkpoint of this step is kept."""
    value: float
    num_without_improvement: int = 0
    """Evaluations since then."""


def improves(before: BestEvaluation | None, goal: Goal, value: float) -> bool:
    """Whether an evaluation is better than all before it; one that is not finite never is."""
    if before is None or not math.isfinite(value):
        return math.isfinite(value)
    return value < before.value if goal == "minimize" else value > before.value


def after_evaluation(
    before: BestEvaluation | None, metric: str, goal: Goal, step: int, value: float
) -> BestEvaluation | None:
    """What is the best after one more evaluation."""
    if improves(before, goal, value):
        return BestEvaluation(metric=metric, goal=goal, step=step, value=value)
    if before is None:
        return None
    return before.model_copy(update={"num_without_improvement": before.num_without_improvement + 1})


def in_words(selection: BestEvaluation, trained_steps: int, num_steps: int) -> str:
    """`best validation/loss 1.61 at step 300 of 1,000; stopped after 5 evaluations without improvement`."""
    best = f"best validation/{selection.metric} {selection.value:.4g} at step {selection.step:,} of {num_steps:,}"
    if trained_steps >= num_steps:
        return best
    count = selection.num_without_improvement
    evaluations = "evaluation" if count == 1 else "evaluations"
    return f"{best}; stopped after {count} {evaluations} without improvement"
