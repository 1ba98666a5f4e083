"""What the gate is told of a challenger: whom it is compared with, with which figures, and which try it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kftrain.bootstrap import Metrics
from kftrain.config import Config
from kftrain.errors import ConfigError, EvaluationError
from kftrain.registry import comparison, tries
from kftrain.registry.champion_alias import ChampionAlias
from kftrain.registry.comparison import MeasuredExport
from kftrain.registry.gate import Decision, Evidence, confidence_at, decide, metric_of
from kftrain.registry.journal import Entry, champion_version, former_champions, last_change
from kftrain.registry.registration import RegisteredVersion
from kftrain.registry.tries import Tries
from kftrain.run.documents import GateReason, Interval
from kftrain.run.paths import RunPaths

NO_EVALUATION = "has no evaluation on the same data with the same settings"


@dataclass(frozen=True)
class Challenger:
    """A registered version, with the evaluation of the run that wants it to be champion."""

    paths: RunPaths
    registered: RegisteredVersion
    measured: MeasuredExport
    on_reference: MeasuredExport | None = None
    """On the reference set, if there is one."""
    trained_on: GateReason | None = None
    """Tell what the champion knows of the validation split."""
    lacks_reference: bool = False
    """There should be figures on a reference set, but it was not measured on one."""

    @property
    def digest(self) -> str:
        """Of the evaluation."""
        return self.measured.evaluation.evaluation_digest


@dataclass(frozen=True)
class Judgement:
    """A decision and what it was made from."""

    decision: Decision
    rival: int | None
    """The version that was compared with."""
    champion: Interval | None = None
    improvement: Interval | None = None
    former: bool = False
    """`rival` was champion, and there is none now."""
    number: int = 0
    """Which try it was; 0: none was counted."""
    confidence: float = 0.0


def judge(
    config: Config, alias: ChampionAlias, entries: list[Entry], challenger: Challenger, metrics: Metrics
) -> Judgement:
    """The gate's decision on a challenger against the champion, or the last champion that can be compared with."""
    registered = challenger.registered
    formers = [entry.version for entry in former_champions(entries) if entry.version is not None]
    if registered.identical and registered.version in formers:
        reason = f"identical to version {registered.version}, which was champion before: nothing was registered"
        return Judgement(_refusal("identical", reason), champion_version(entries))
    rival, measured, obstacle = _rival(alias, entries, challenger)
    found = (
        _compared(config, challenger, rival, measured, _on_reference(alias, entries, rival, challenger), metrics)
        if measured
        else _alone(config, challenger, rival, obstacle)
    )
    former = rival is not None and rival != champion_version(entries)
    said = [f"identical to version {registered.version}, nothing was registered"] * registered.identical
    said += [f"the champion was deleted or lost its alias, compared with version {rival}, one before"] * former
    told = [challenger.trained_on] if challenger.trained_on else []
    reason = "; ".join([found.decision.reason, *(each.text for each in told if each.figures.get("value"))])
    reasons = (*found.decision.reasons, *told)
    decision = replace(found.decision, reason=": ".join([*said, reason]), reasons=reasons)
    return replace(found, decision=decision, former=former)


def overruled(found: Judgement, code: str, text: str) -> Judgement:
    """What is left of a judgement where a person has said no before: its figures, and no promotion."""
    reasons = (GateReason(code=code, verdict="against", text=text), *found.decision.reasons)
    return replace(found, decision=Decision(False, f"not promoted, {text}", reasons))


def standing(config: Config, alias: ChampionAlias, entries: list[Entry], challenger: Challenger) -> Judgement:
    """The result for the champion itself: the one that made it champion, if this is a repetition."""
    entry, registered = last_change(entries), challenger.registered
    if registered.identical:
        reason = f"identical to version {registered.version}, which is champion: nothing was registered"
        return Judgement(_refusal("identical", reason), registered.version)
    measured = measured_version(alias, entries, entry.previous, challenger.digest)
    return Judgement(
        Decision(True, entry.reason, entry.reasons),
        entry.previous,
        measured.evaluation.metrics.get(config.registry.metric) if measured else None,
        entry.improvement,
        number=entry.num_tries,
        confidence=entry.confidence,
    )


def measured_version(
    alias: ChampionAlias, entries: list[Entry], version: int | None, digest: str
) -> MeasuredExport | None:
    """The evaluation of a version of the journal under a digest; None where there is none to be used."""
    try:
        reference = alias.reference(entries, version)
        return comparison.find_measured(reference, digest, alias.trust)
    except (EvaluationError, ConfigError):
        return None


def _refusal(code: str, reason: str) -> Decision:
    return Decision(False, reason, (GateReason(code=code, verdict="against", text=reason),))


def _alone(config: Config, challenger: Challenger, rival: int | None, obstacle: str) -> Judgement:
    """Where there is nothing to compare with."""
    own = challenger.measured
    evidence = Evidence(
        metric_of(own.evaluation.metrics, config.registry.metric), own.num_groups, costs=own.costs, obstacle=obstacle
    )
    return Judgement(decide(config.registry, evidence), rival)


def _on_reference(
    alias: ChampionAlias, entries: list[Entry], rival: int | None, challenger: Challenger
) -> MeasuredExport | None:
    """The rival on the challenger's reference set; None where there is no such set, or no figure."""
    own = challenger.on_reference
    return measured_version(alias, entries, rival, own.evaluation.evaluation_digest) if own else None


def _compared(
    config: Config,
    challenger: Challenger,
    rival: int | None,
    theirs: MeasuredExport,
    on_reference: MeasuredExport | None,
    metrics: Metrics,
) -> Judgement:
    """The decision at the level of this try; one that could promote is counted."""
    settings, own = config.registry, challenger.measured
    book = Tries.of(config.run.storage_root, config.model_name, theirs.evaluation.export_digest)
    evaluated = own.evaluation
    identity = tries.identity_of(evaluated.export_digest, evaluated.evaluation_digest, settings.metric, settings.goal)
    latest = list[Judgement]()
    reference = _reference_evidence(config, challenger, on_reference, metrics)

    def decided(number: int) -> tuple[Decision, float]:
        evidence = replace(_evidence(config, own, theirs, metrics, number), **reference)
        decision = decide(settings, evidence)
        figures = (evidence.champion, evidence.improvement, False, number, evidence.confidence)
        latest[:] = [Judgement(decision, rival, *figures)]
        return decision, evidence.confidence

    if settings.promotion == "never":  # it cannot promote a model that is no better: no try
        decided(book.number_of(identity)[0])
        return replace(latest[0], number=0)
    book.counted(identity, challenger.paths.run_id, challenger.registered.version, decided)
    return latest[0]


def _evidence(config: Config, own: MeasuredExport, theirs: MeasuredExport, metrics: Metrics, number: int) -> Evidence:
    settings = config.registry
    confidence = confidence_at(settings, number)
    return Evidence(
        challenger=metric_of(own.evaluation.metrics, settings.metric),
        num_groups=own.num_groups,
        champion=metric_of(theirs.evaluation.metrics, settings.metric),
        improvement=comparison.improvement(config, metrics, own, theirs, confidence),
        confidence=confidence,
        number=number,
        test=comparison.paired_test(config, metrics, own, theirs),
        slices=_slices(config, own, theirs, metrics),
        costs=own.costs,
    )


def _reference_evidence(
    config: Config, challenger: Challenger, theirs: MeasuredExport | None, metrics: Metrics
) -> dict[str, Any]:
    own = challenger.on_reference
    if own is None:
        return {"reference_obstacle": "the run was not measured on the reference set" * challenger.lacks_reference}
    if theirs is None:
        return {"reference_obstacle": f"the champion {NO_EVALUATION.replace('the same data', 'the reference set')}"}
    return {"reference": comparison.improvement(config, metrics, own, theirs)}


def _slices(
    config: Config, own: MeasuredExport, theirs: MeasuredExport, metrics: Metrics
) -> Mapping[str, Interval] | None:
    if config.registry.max_slice_regression is None:
        return {}
    return comparison.slice_improvements(config, metrics, own, theirs)


def _rival(
    alias: ChampionAlias, entries: list[Entry], challenger: Challenger
) -> tuple[int | None, MeasuredExport | None, str]:
    """What a challenger is compared with: version and evaluation; and where a comparison cannot be, why.

    A champion that cannot be measured is not passed over: whoever beats the one before it need not be better. Where
    there is none any more, the last one that can be measured counts.
    """
    number = champion_version(entries)
    if number is not None:
        measured = measured_version(alias, entries, number, challenger.digest)
        return number, measured, "" if measured else _obstacle(alias, entries, number, challenger)
    own = challenger.registered.version
    formers = [entry.version for entry in former_champions(entries) if entry.version not in (None, own)]
    for former in formers:
        measured = measured_version(alias, entries, former, challenger.digest)
        if measured is not None:
            return former, measured, ""
    if not any(entry.version for entry in entries):
        return None, None, ""
    return None, None, f"the champion was deleted or lost its alias, and none before it {NO_EVALUATION}"


def _obstacle(alias: ChampionAlias, entries: list[Entry], champion: int, challenger: Challenger) -> str:
    """Why the champion has no figures to compare with, as far as the evaluation has said."""
    reference, digest = alias.reference(entries, champion), challenger.digest
    export_digest = reference.export_digest if reference else ""
    reason = comparison.why_unmeasured(challenger.paths, digest, export_digest)
    return f"the champion, version {champion}, {NO_EVALUATION}" + (f" ({reason})" if reason else "")
