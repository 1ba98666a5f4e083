"""The gate: whether a challenger becomes champion. A pure decision, with its reasons as data and in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan
from typing import TypeVar

from kftrain import significance
from kftrain.errors import ConfigError
from kftrain.registry.settings import RegistryConfig
from kftrain.run.documents import GateReason, Interval
from kftrain.significance import PairedTest

Value = TypeVar("Value")

LIMITS = {
    "calibration_error": "calibration error",
    "latency_seconds": "latency in seconds",
    "memory_bytes": "memory in bytes",
    "export_bytes": "size in bytes",
}
"""What `registry.max_…` limits, and how that is called."""


@dataclass(frozen=True)
class Evidence:
    """What the gate knows of a challenger."""

    challenger: Interval
    num_groups: int
    """Independent units that were compared."""
    champion: Interval | None = None
    improvement: Interval | None = None
    """Paired difference at `confidence`, positive is better."""
    confidence: float = 0.0
    """Of the interval of `improvement`, as it is for this try."""
    number: int = 0
    """Which try against this champion it is; 0: tries are not counted."""
    test: PairedTest | None = None
    """McNemar's test, where the metric is a share of units that are right."""
    slices: Mapping[str, Interval] | None = field(default_factory=dict)
    """Slice -> improvement on it, for those that are looked at; None: they should be, but cannot."""
    reference: Interval | None = None
    """Improvement on the reference set; None: there is no such set."""
    reference_obstacle: str = ""
    """Why there is none although there is such a set."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """What is held against the limits, by their names (`latency_seconds` …), as far as it is known."""
    obstacle: str = ""
    """Why there is no improvement although there is, or was, a champion; empty: there never was one."""


@dataclass(frozen=True)
class Decision:
    """Whether to promote, and why or why not."""

    promote: bool
    reason: str
    """One sentence."""
    reasons: tuple[GateReason, ...] = ()
    """All that was looked at."""

    @property
    def awaits_person(self) -> bool:
        """Whether nothing speaks against it, and yet it is not promoted."""
        return not self.promote and bool(self.reasons) and all(each.verdict != "against" for each in self.reasons)


def confidence_at(settings: RegistryConfig, number: int) -> float:
    """Of the interval that the `number`-th try against a champion is decided by."""
    if not settings.correct_repeated_tries:
        return settings.confidence
    return significance.confidence_of_try(settings.confidence, number)


def metric_of(metrics: Mapping[str, Value], name: str) -> Value:
    """The metric that the gate compares. Raises ConfigError that names the known ones."""
    if name not in metrics:
        known = ", ".join(sorted(metrics))
        raise ConfigError("the task has no such metric", where="registry.metric", value=name, fix=f"known: {known}")
    return metrics[name]


def decide(settings: RegistryConfig, evidence: Evidence) -> Decision:
    """Promotes the first model, and one whose improvement exceeds `min_effect` even at its lower confidence bound.

    It must also pass McNemar's test where that applies, must not be shown to be worse on a slice where slices are
    looked at, and must keep the limits, as the first model must. Whether a person decides instead says the policy; so
    it is where the champion cannot be compared, and where fewer than `min_groups` groups were, or fewer than so skewed
    differences need. The reason then says what would have been.
    """
    leading = _comparison(settings, evidence)
    others = [found for ask in (_test, _slices, _reference, _limits) for found in ask(settings, evidence)]
    policy = _policy(settings, evidence)
    reasons = (leading, *others, *policy)
    promote = all(each.verdict == "for" for each in reasons)
    return Decision(promote, _sentence(leading, others, policy), reasons)


def _sentence(leading: GateReason, others: list[GateReason], policy: list[GateReason]) -> str:
    against = [each.text for each in others if each.verdict != "for"]
    if leading.verdict == "person":
        decides = "" if any(each.verdict == "against" for each in others) else ", a person decides"
        return f"not promoted{decides}: {'; '.join([leading.text, *against])}"
    if leading.verdict == "for" and against:
        return f"not promoted, {'; '.join(against)}: {leading.text}"
    if leading.verdict == "for" and policy:
        return f"would be promoted, but {' and '.join(each.text for each in policy)}: {leading.text}"
    return leading.text


def _comparison(settings: RegistryConfig, evidence: Evidence) -> GateReason:
    metric, improvement = settings.metric, evidence.improvement
    if evidence.obstacle:
        return GateReason(code="not_comparable", verdict="person", text=evidence.obstacle)
    if evidence.champion is None or improvement is None:
        value = evidence.challenger.value
        text = f"first model: {metric} {value:.6g}"
        return GateReason(code="first_model", verdict="for", text=text, figures={"challenger": value})
    code, said = _standing(settings.min_effect, improvement)
    figures = {
        "challenger": evidence.challenger.value,
        "champion": evidence.champion.value,
        **_bounds(improvement),
        "limit": settings.min_effect,
        "confidence": evidence.confidence,
        **({"try": float(evidence.number)} if evidence.number else {}),
    }
    verdict = "for" if code == "better" else "against"
    return GateReason(
        code=code, verdict=verdict, text=f"{said}: {_figures(settings, evidence, improvement)}", figures=figures
    )


def _standing(min_effect: float, improvement: Interval) -> tuple[str, str]:
    if improvement.low > min_effect:
        return "better", "better"
    if improvement.high < 0:
        return "worse", "worse"
    if improvement.low > 0:
        return "below_min_effect", f"better, but not by more than {min_effect:g}"
    return "not_significant", "not significantly better"


def _figures(settings: RegistryConfig, evidence: Evidence, improvement: Interval) -> str:
    assert evidence.champion is not None
    change = f"{settings.metric} {evidence.champion.value:.6g} -> {evidence.challenger.value:.6g} ({settings.goal})"
    number = f", try {evidence.number}" if evidence.number else ""
    bounds = f"[{improvement.low:.4g}, {improvement.high:.4g}] at {100 * evidence.confidence:.5g}% confidence{number}"
    return f"{change}, improvement {improvement.value:.4g} {bounds}"


def _test(_: RegistryConfig, evidence: Evidence) -> list[GateReason]:
    """McNemar's test at the level of the interval's one side."""
    if evidence.test is None:
        return []
    test, level = evidence.test, (1.0 - evidence.confidence) / 2.0
    figures = {"better": test.num_better, "worse": test.num_worse, "p_value": test.p_value, "limit": level}
    counts = f"{test.num_better} right that were wrong, {test.num_worse} wrong that were right"
    passed = test.p_value <= level
    said = f"McNemar's test {'agrees' if passed else 'does not agree'}"
    text = f"{said} ({counts}, p = {test.p_value:.2g}, needed {level:.2g})"
    code = "mcnemar" if passed else "mcnemar_not_significant"
    return [GateReason(code=code, verdict="for" if passed else "against", text=text, figures=figures)]


def _slices(settings: RegistryConfig, evidence: Evidence) -> list[GateReason]:
    """Each slice on which the challenger is shown to be worse by more than is allowed, or has no value; or none."""
    limit = settings.max_slice_regression
    if limit is None or evidence.improvement is None:
        return []
    if evidence.slices is None:
        text = "the champion's or the challenger's evaluation has no sums by slice: delete their metrics.json"
        return [GateReason(code="slices_missing", verdict="person", text=text)]
    worse = {name: found for name, found in evidence.slices.items() if not found.high >= -limit}  # NaN, too
    if not worse:
        text = f"not shown to be worse by more than {limit:g} on any of {len(evidence.slices)} slices"
        return [GateReason(code="slices", verdict="for", text=text, figures={"limit": limit})]
    return [
        GateReason(
            code="slice_worse",
            verdict="against",
            text=f"no value on slice {name}, where the champion has one"
            if isnan(found.value)
            else f"worse on slice {name} by {-found.value:.4g} [{-found.high:.4g}, {-found.low:.4g}]",
            figures={**_bounds(found), "limit": limit},
        )
        for name, found in sorted(worse.items(), key=lambda each: each[1].value)
    ]


def _reference(settings: RegistryConfig, evidence: Evidence) -> list[GateReason]:
    """No regression on the reference set: within the margin where one is set, else not shown to be worse."""
    found, margin = evidence.reference, settings.reference_margin
    if evidence.improvement is None or (found is None and not evidence.reference_obstacle):
        return []
    if found is None or isnan(found.low) or isnan(found.high):
        text = evidence.reference_obstacle or "the improvement on the reference set has no bounds"
        return [GateReason(code="reference_missing", verdict="person", text=text)]
    figures = {**_bounds(found), **({} if margin is None else {"limit": margin})}
    bounds = f"{found.value:.4g} [{found.low:.4g}, {found.high:.4g}]"
    if found.high < 0 and (margin is None or found.low < -margin):
        text = f"worse on the reference set: improvement {bounds}"
        return [GateReason(code="reference_worse", verdict="against", text=text, figures=figures)]
    if margin is not None and found.low < -margin:
        text = f"not shown to be within {margin:g} of the champion on the reference set: improvement {bounds}"
        return [GateReason(code="reference_not_within", verdict="against", text=text, figures=figures)]
    text = f"no regression on the reference set: improvement {bounds}"
    return [GateReason(code="reference", verdict="for", text=text, figures=figures)]


def _limits(settings: RegistryConfig, evidence: Evidence) -> list[GateReason]:
    """Each limit that is set, and whether it is kept; what was not measured is left to a person."""
    limits = {name: getattr(settings, f"max_{name}") for name in LIMITS}
    return [_limit(name, limit, evidence.costs.get(name)) for name, limit in limits.items() if limit is not None]


def _limit(name: str, limit: float, value: float | None) -> GateReason:
    what = LIMITS[name]
    if value is None:
        text = f"the evaluation has no figure for registry.max_{name}"
        return GateReason(code="limit_unknown", verdict="person", text=text, figures={"limit": limit})
    figures = {"value": value, "limit": float(limit)}
    if value <= limit:
        text = f"{what} {value:.4g}, at most {limit:.4g}"
        return GateReason(code="limit_kept", verdict="for", text=text, figures=figures)
    text = f"{what} {value:.4g} is more than {limit:.4g}"
    return GateReason(code="limit_exceeded", verdict="against", text=text, figures=figures)


def _policy(settings: RegistryConfig, evidence: Evidence) -> list[GateReason]:
    """What leaves the decision to a person, whatever the model is."""
    found = []
    if settings.promotion == "manual":
        found.append(GateReason(code="promotion_manual", verdict="person", text="promotion is manual"))
    if settings.promotion == "never":
        found.append(GateReason(code="promotion_never", verdict="against", text="registry.promotion is never"))
    needed = max(settings.min_groups, evidence.improvement.num_needed) if evidence.improvement is not None else 0
    if evidence.num_groups < needed:
        few = f"{evidence.num_groups} groups are too few to decide without a person"
        why = "differences with so long a tail need" if needed > settings.min_groups else "registry.min_groups is"
        text = f"{few} ({why} {needed})"
        figures = {"value": float(evidence.num_groups), "limit": float(needed)}
        found.append(GateReason(code="too_few_groups", verdict="person", text=text, figures=figures))
    return found


def _bounds(found: Interval) -> dict[str, float]:
    """Value and bounds, as far as they are known."""
    values = {"value": found.value, "low": found.low, "high": found.high}
    return {name: value for name, value in values.items() if isfinite(value)}
