"""The gate decides whether a challenger becomes champion: a pure decision, with its reasons as data and in words.

Each check returns reasons with a verdict: `for`, `against`, or `person` (the gate cannot tell, somebody must look). A
challenger is promoted only if every verdict is `for`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan
from typing import TypeVar

from kftrain.errors import ConfigError
from kftrain.registry.settings import RegistryConfig
from kftrain.run.documents import GateReason, Interval
from kftrain.statistics import significance
from kftrain.statistics.significance import PairedTest

Value = TypeVar("Value")

LIMITS = {
    "calibration_error": "calibration error",
    "latency_seconds": "latency in seconds",
    "memory_bytes": "memory in bytes",
    "export_bytes": "size in bytes",
}
"""Name of a figure that may have a limit, which `registry.max_<name>` sets -> its name in sentences."""


@dataclass(frozen=True)
class Evidence:
    """The figures about a challenger that the gate decides by."""

    challenger: Interval
    num_groups: int
    """Number of groups (documents, images) behind the comparison: the units that are independent of one another."""
    champion: Interval | None = None
    improvement: Interval | None = None
    """Paired difference at `confidence`, positive is better."""
    confidence: float = 0.0
    """Confidence level of the interval of `improvement`, corrected for this try."""
    number: int = 0
    """Number of this try against the champion, from 1; 0: tries are not counted."""
    test: PairedTest | None = None
    """McNemar's test, where the metric is a share of units that are right."""
    slices: Mapping[str, Interval] | None = field(default_factory=dict)
    """Slice -> improvement on it; empty: slices are not looked at; None: an evaluation has no sums by slice."""
    reference: Interval | None = None
    """Improvement on the reference set; None: there is no such set."""
    reference_obstacle: str = ""
    """The reason why `reference` is missing although there is a reference set."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """Name of a figure of `LIMITS` (`latency_seconds` …) -> its measured value; unmeasured ones are left out."""
    obstacle: str = ""
    """The reason why `improvement` is missing although there is, or was, a champion; else empty."""


@dataclass(frozen=True)
class Decision:
    """The gate's answer, with its reasons."""

    promote: bool
    reason: str
    """The answer and what led to it, in one sentence for people."""
    reasons: tuple[GateReason, ...] = ()
    """The result of every check, also of those that passed."""

    @property
    def awaits_person(self) -> bool:
        """True if no check speaks against the challenger and yet a person must decide."""
        return not self.promote and bool(self.reasons) and all(reason.verdict != "against" for reason in self.reasons)


@dataclass(frozen=True)
class Judgement:
    """The gate's decision with the figures that it was made from."""

    decision: Decision
    rival: int | None
    """The version that the challenger was compared with; None: there was none."""
    champion: Interval | None = None
    improvement: Interval | None = None
    former: bool = False
    """True if `rival` is a former champion, because there is no champion now."""
    number: int = 0
    """Number of the try, from 1; 0: none was counted."""
    confidence: float = 0.0


def choose_confidence(settings: RegistryConfig, number: int) -> float:
    """Return the confidence level of the interval that decides the `number`-th try against a champion.

    All tries have the configured one unless `registry.correct_repeated_tries` is set.
    """
    if not settings.correct_repeated_tries:
        return settings.confidence
    return significance.confidence_of_try(settings.confidence, number)


def find_metric(metrics: Mapping[str, Value], name: str) -> Value:
    """Return the value of a metric by its name. Raises ConfigError, which names the known ones."""
    if name not in metrics:
        known = ", ".join(sorted(metrics))
        raise ConfigError("the task has no such metric", where="registry.metric", value=name, fix=f"known: {known}")
    return metrics[name]


def decide(settings: RegistryConfig, evidence: Evidence) -> Decision:
    """Promote the first model, or one whose improvement exceeds `min_effect` even at its lower confidence bound.

    The challenger must also pass McNemar's test where that applies, must not be shown to be worse on a slice where
    slices are looked at, and must keep the limits; the first model must keep the limits, too. A person decides instead
    if `registry.promotion` is `manual`, if the champion cannot be compared with, or if fewer groups were compared than
    `min_groups`, or than differences with so long a tail need (`Interval.num_needed`). The reason then says what the
    gate would have done.
    """
    leading = _check_improvement(settings, evidence)
    others = [
        reason
        for check in (_check_mcnemar, _check_slices, _check_reference, _check_limits)
        for reason in check(settings, evidence)
    ]
    policy = _check_policy(settings, evidence)
    reasons = (leading, *others, *policy)
    promote = all(reason.verdict == "for" for reason in reasons)
    return Decision(promote, _format_sentence(leading, others, policy), reasons)


def _format_sentence(leading: GateReason, others: list[GateReason], policy: list[GateReason]) -> str:
    against = [reason.text for reason in others if reason.verdict != "for"]
    if leading.verdict == "person":
        decides = "" if any(reason.verdict == "against" for reason in others) else ", a person decides"
        return f"not promoted{decides}: {'; '.join([leading.text, *against])}"
    if leading.verdict == "for" and against:
        return f"not promoted, {'; '.join(against)}: {leading.text}"
    if leading.verdict == "for" and policy:
        return f"would be promoted, but {' and '.join(reason.text for reason in policy)}: {leading.text}"
    return leading.text


def _check_improvement(settings: RegistryConfig, evidence: Evidence) -> GateReason:
    """Compare the challenger with the champion in the gate's metric; the first model passes."""
    metric, improvement = settings.metric, evidence.improvement
    if evidence.obstacle:
        return GateReason(code="not_comparable", verdict="person", text=evidence.obstacle)
    if evidence.champion is None or improvement is None:
        value = evidence.challenger.value
        text = f"first model: {metric} {value:.6g}"
        return GateReason(code="first_model", verdict="for", text=text, figures={"challenger": value})
    code, phrase = _classify_improvement(settings.min_effect, improvement)
    figures = {
        "challenger": evidence.challenger.value,
        "champion": evidence.champion.value,
        **_list_finite(improvement),
        "limit": settings.min_effect,
        "confidence": evidence.confidence,
        **({"try": float(evidence.number)} if evidence.number else {}),
    }
    verdict = "for" if code == "better" else "against"
    return GateReason(
        code=code,
        verdict=verdict,
        text=f"{phrase}: {_format_figures(settings, evidence, improvement)}",
        figures=figures,
    )


def _classify_improvement(min_effect: float, improvement: Interval) -> tuple[str, str]:
    """Return the code of a reason and its phrase. The order matters: an interval may fit several cases."""
    if improvement.low > min_effect:
        return "better", "better"
    if improvement.high < 0:
        return "worse", "worse"
    if improvement.low > 0:
        return "below_min_effect", f"better, but not by more than {min_effect:g}"
    return "not_significant", "not significantly better"


def _format_figures(settings: RegistryConfig, evidence: Evidence, improvement: Interval) -> str:
    assert evidence.champion is not None
    change = f"{settings.metric} {evidence.champion.value:.6g} -> {evidence.challenger.value:.6g} ({settings.goal})"
    number = f", try {evidence.number}" if evidence.number else ""
    bounds = f"[{improvement.low:.4g}, {improvement.high:.4g}] at {100 * evidence.confidence:.5g}% confidence{number}"
    return f"{change}, improvement {improvement.value:.4g} {bounds}"


def _check_mcnemar(_: RegistryConfig, evidence: Evidence) -> list[GateReason]:
    """Hold McNemar's p-value against the level of one side of the interval."""
    if evidence.test is None:
        return []
    # The test is one-sided and the interval two-sided: half of the level makes both equally strict.
    test, level = evidence.test, (1.0 - evidence.confidence) / 2.0
    figures = {"better": test.num_better, "worse": test.num_worse, "p_value": test.p_value, "limit": level}
    counts = f"{test.num_better} right that were wrong, {test.num_worse} wrong that were right"
    is_significant = test.p_value <= level
    outcome = f"McNemar's test {'agrees' if is_significant else 'does not agree'}"
    text = f"{outcome} ({counts}, p = {test.p_value:.2g}, needed {level:.2g})"
    code = "mcnemar" if is_significant else "mcnemar_not_significant"
    return [GateReason(code=code, verdict="for" if is_significant else "against", text=text, figures=figures)]


def _check_slices(settings: RegistryConfig, evidence: Evidence) -> list[GateReason]:
    """Return a reason against every slice on which the challenger is shown to be too much worse, or has no value.

    Worst slices come first. If there is no such slice, a single reason speaks in favour. There are no reasons at all
    where no limit is set, or nothing was compared.
    """
    limit = settings.max_slice_regression
    if limit is None or evidence.improvement is None:
        return []
    if evidence.slices is None:
        text = "the champion's or the challenger's evaluation has no sums by slice: delete their metrics.json"
        return [GateReason(code="slices_missing", verdict="person", text=text)]
    # A bound that is NaN compares as False: `not high >= -limit` counts it as worse, `high < -limit` would let it pass.
    worse = {name: change for name, change in evidence.slices.items() if not change.high >= -limit}
    if not worse:
        text = f"not shown to be worse by more than {limit:g} on any of {len(evidence.slices)} slices"
        return [GateReason(code="slices", verdict="for", text=text, figures={"limit": limit})]
    return [
        GateReason(
            code="slice_worse",
            verdict="against",
            text=f"no value on slice {name}, where the champion has one"
            if isnan(change.value)
            else f"worse on slice {name} by {-change.value:.4g} [{-change.high:.4g}, {-change.low:.4g}]",
            figures={**_list_finite(change), "limit": limit},
        )
        for name, change in sorted(worse.items(), key=lambda item: item[1].value)
    ]


def _check_reference(settings: RegistryConfig, evidence: Evidence) -> list[GateReason]:
    """Look for a regression on the reference set.

    With a margin the challenger must be shown to be within it; without one it must not be shown to be worse.
    """
    change, margin = evidence.reference, settings.reference_margin
    if evidence.improvement is None or (change is None and not evidence.reference_obstacle):
        return []
    if change is None or isnan(change.low) or isnan(change.high):
        text = evidence.reference_obstacle or "the improvement on the reference set has no bounds"
        return [GateReason(code="reference_missing", verdict="person", text=text)]
    figures = {**_list_finite(change), **({} if margin is None else {"limit": margin})}
    bounds = f"{change.value:.4g} [{change.low:.4g}, {change.high:.4g}]"
    if change.high < 0 and (margin is None or change.low < -margin):
        text = f"worse on the reference set: improvement {bounds}"
        return [GateReason(code="reference_worse", verdict="against", text=text, figures=figures)]
    if margin is not None and change.low < -margin:
        text = f"not shown to be within {margin:g} of the champion on the reference set: improvement {bounds}"
        return [GateReason(code="reference_not_within", verdict="against", text=text, figures=figures)]
    text = f"no regression on the reference set: improvement {bounds}"
    return [GateReason(code="reference", verdict="for", text=text, figures=figures)]


def _check_limits(settings: RegistryConfig, evidence: Evidence) -> list[GateReason]:
    """Return a reason for every limit that is set; a cost that was not measured is left to a person."""
    limits = {name: getattr(settings, f"max_{name}") for name in LIMITS}
    return [_check_limit(name, limit, evidence.costs.get(name)) for name, limit in limits.items() if limit is not None]


def _check_limit(name: str, limit: float, value: float | None) -> GateReason:
    cost = LIMITS[name]
    if value is None:
        text = f"the evaluation has no figure for registry.max_{name}"
        return GateReason(code="limit_unknown", verdict="person", text=text, figures={"limit": limit})
    figures = {"value": value, "limit": float(limit)}
    if value <= limit:
        text = f"{cost} {value:.4g}, at most {limit:.4g}"
        return GateReason(code="limit_kept", verdict="for", text=text, figures=figures)
    text = f"{cost} {value:.4g} is more than {limit:.4g}"
    return GateReason(code="limit_exceeded", verdict="against", text=text, figures=figures)


def _check_policy(settings: RegistryConfig, evidence: Evidence) -> list[GateReason]:
    """Return the reasons that do not depend on how good the model is: `registry.promotion`, and too few groups."""
    reasons = []
    if settings.promotion == "manual":
        reasons.append(GateReason(code="promotion_manual", verdict="person", text="promotion is manual"))
    if settings.promotion == "never":
        reasons.append(GateReason(code="promotion_never", verdict="against", text="registry.promotion is never"))
    needed = max(settings.min_groups, evidence.improvement.num_needed) if evidence.improvement is not None else 0
    if evidence.num_groups < needed:
        few = f"{evidence.num_groups} groups are too few to decide without a person"
        why = "differences with so long a tail need" if needed > settings.min_groups else "registry.min_groups is"
        text = f"{few} ({why} {needed})"
        figures = {"value": float(evidence.num_groups), "limit": float(needed)}
        reasons.append(GateReason(code="too_few_groups", verdict="person", text=text, figures=figures))
    return reasons


def _list_finite(interval: Interval) -> dict[str, float]:
    """Return value and bounds by name without those that are not finite: JSON has no number for them."""
    values = {"value": interval.value, "low": interval.low, "high": interval.high}
    return {name: value for name, value in values.items() if isfinite(value)}
