"""The gate: whether a challenger becomes champion. A pure decision, with its reason in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from kftrain.bootstrap import Goal
from kftrain.errors import ConfigError
from kftrain.run.documents import Interval

Value = TypeVar("Value")


@dataclass(frozen=True)
class Decision:
    """Whether to promote, and why or why not."""

    promote: bool
    reason: str


def metric_of(metrics: Mapping[str, Value], name: str) -> Value:
    """The metric that the gate compares. Raises ConfigError that names the known ones."""
    if name not in metrics:
        known = ", ".join(sorted(metrics))
        raise ConfigError("the task has no such metric", where="registry.metric", value=name, fix=f"known: {known}")
    return metrics[name]


def decide(
    *,
    metric: str,
    goal: Goal,
    min_effect: float,
    confidence: float,
    promotion: Literal["auto", "manual"],
    challenger: Interval,
    champion: Interval | None,
    improvement: Interval | None,
    obstacle: str,
    num_groups: int,
    min_groups: int,
) -> Decision:
    """Promotes the first model, and one whose improvement exceeds `min_effect` even at its lower confidence bound.

    `improvement` is the paired difference, positive is better. `obstacle` says why there is none although there is, or
    was, a champion; empty: there never was one. With `manual`, with an obstacle, and where fewer than `min_groups`
    groups were compared, nothing is promoted, and the reason says what would have been.
    """
    if obstacle:
        return Decision(False, f"not promoted, a person decides: {obstacle}")
    if champion is None or improvement is None:
        decision = Decision(True, f"first model: {metric} {challenger.value:.6g}")
    else:
        decision = _compare(metric, goal, min_effect, confidence, challenger, champion, improvement)
    if decision.promote and promotion == "manual":
        return Decision(False, f"would be promoted, but promotion is manual: {decision.reason}")
    if decision.promote and improvement is not None and num_groups < min_groups:
        few = f"{num_groups} groups are too few to decide without a person (registry.min_groups is {min_groups})"
        return Decision(False, f"would be promoted, but {few}: {decision.reason}")
    return decision


def _compare(
    metric: str,
    goal: Goal,
    min_effect: float,
    confidence: float,
    challenger: Interval,
    champion: Interval,
    improvement: Interval,
) -> Decision:
    bounds = f"[{improvement.low:.4g}, {improvement.high:.4g}] at {confidence:.0%} confidence"
    change = f"{metric} {champion.value:.6g} -> {challenger.value:.6g} ({goal})"
    figures = f"{change}, improvement {improvement.value:.4g} {bounds}"
    if improvement.low > min_effect:
        return Decision(True, f"better: {figures}")
    if improvement.high < 0:
        return Decision(False, f"worse: {figures}")
    if improvement.low > 0:
        return Decision(False, f"better, but not by more than {min_effect:g}: {figures}")
    return Decision(False, f"not significantly better: {figures}")
