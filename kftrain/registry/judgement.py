"""Collects what the gate decides by: the rival of a challenger, the figures of both, and the number of the try.

A challenger is compared with the champion; where there is none any more, with the last champion that was measured on
the same data. `gate` decides; `promotion` carries the decision out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kftrain.config import Config
from kftrain.errors import ConfigError, EvaluationError
from kftrain.registry import comparison, tries
from kftrain.registry.champion_alias import ChampionAlias
from kftrain.registry.comparison import MeasuredExport
from kftrain.registry.gate import Decision, Evidence, Judgement, choose_confidence, decide, find_metric
from kftrain.registry.journal import Entry, find_champion_version, find_last_change, list_former_champions
from kftrain.registry.registration import RegisteredVersion
from kftrain.registry.tries import Tries
from kftrain.run.documents import GateReason, Interval
from kftrain.run.paths import RunPaths
from kftrain.statistics.bootstrap import Metrics

NO_EVALUATION = "has no evaluation on the same data with the same settings"


@dataclass(frozen=True)
class Challenger:
    """A registered version, with the evaluation of the run that wants it to be champion."""

    paths: RunPaths
    registered: RegisteredVersion
    measured: MeasuredExport
    on_reference: MeasuredExport | None = None
    """The same export measured on the run's reference set, if there is one."""
    trained_on: GateReason | None = None
    """A note on how much of the validation split the champion was trained on; it never decides."""
    lacks_reference: bool = False
    """True if a reference set is configured but the run was not measured on one."""

    @property
    def digest(self) -> str:
        """Digest of the evaluation (data and settings); only measurements with equal digests are compared."""
        return self.measured.evaluation.evaluation_digest


def judge(
    config: Config, alias: ChampionAlias, entries: list[Entry], challenger: Challenger, metrics: Metrics
) -> Judgement:
    """Decide on a challenger against the champion, or against the last champion that it can be compared with.

    Counts a try if the challenger could be promoted. Raises EvaluationError, ConfigError, TrackingError.
    """
    registered = challenger.registered
    formers = [entry.version for entry in list_former_champions(entries) if entry.version is not None]
    if registered.identical and registered.version in formers:
        reason = f"identical to version {registered.version}, which was champion before: nothing was registered"
        return Judgement(_make_refusal("identical", reason), find_champion_version(entries))
    rival, measured, obstacle = _find_rival(alias, entries, challenger)
    judgement = (
        _judge_against(
            config, challenger, rival, measured, _find_on_reference(alias, entries, rival, challenger), metrics
        )
        if measured
        else _judge_alone(config, challenger, rival, obstacle)
    )
    former = rival is not None and rival != find_champion_version(entries)
    prefixes = []
    if registered.identical:
        prefixes.append(f"identical to version {registered.version}, nothing was registered")
    if former:
        prefixes.append(f"the champion was deleted or lost its alias, compared with version {rival}, one before")
    notes = [challenger.trained_on] if challenger.trained_on else []
    reason = "; ".join([judgement.decision.reason, *(note.text for note in notes if note.figures.get("value"))])
    reasons = (*judgement.decision.reasons, *notes)
    decision = replace(judgement.decision, reason=": ".join([*prefixes, reason]), reasons=reasons)
    return replace(judgement, decision=decision, former=former)


def overrule(judgement: Judgement, code: str, text: str) -> Judgement:
    """Turn a judgement into a refusal because a person has said no before; its figures stay."""
    reasons = (GateReason(code=code, verdict="against", text=text), *judgement.decision.reasons)
    return replace(judgement, decision=Decision(False, f"not promoted, {text}", reasons))


def recall_judgement(config: Config, alias: ChampionAlias, entries: list[Entry], challenger: Challenger) -> Judgement:
    """Return the judgement on a version that is champion already: the one that made it so.

    A run that registered nothing, because its weights are the champion's, is refused as identical instead.
    """
    entry, registered = find_last_change(entries), challenger.registered
    if registered.identical:
        reason = f"identical to version {registered.version}, which is champion: nothing was registered"
        return Judgement(_make_refusal("identical", reason), registered.version)
    measured = read_measured_version(alias, entries, entry.previous, challenger.digest)
    return Judgement(
        Decision(True, entry.reason, entry.reasons),
        entry.previous,
        measured.evaluation.metrics.get(config.registry.metric) if measured else None,
        entry.improvement,
        number=entry.num_tries,
        confidence=entry.confidence,
    )


def read_measured_version(
    alias: ChampionAlias, entries: list[Entry], version: int | None, digest: str
) -> MeasuredExport | None:
    """Return the evaluation of a version of the journal under a digest; None if missing, damaged or not trusted."""
    try:
        reference = alias.reference(entries, version)
        return comparison.find_measured_export(reference, digest, alias.trust)
    except (EvaluationError, ConfigError):
        return None


def _make_refusal(code: str, reason: str) -> Decision:
    return Decision(False, reason, (GateReason(code=code, verdict="against", text=reason),))


def _judge_alone(config: Config, challenger: Challenger, rival: int | None, obstacle: str) -> Judgement:
    """Decide without a comparison: the first model, or a rival without figures (`obstacle` says why)."""
    own = challenger.measured
    evidence = Evidence(
        find_metric(own.evaluation.metrics, config.registry.metric), own.num_groups, costs=own.costs, obstacle=obstacle
    )
    return Judgement(decide(config.registry, evidence), rival)


def _find_on_reference(
    alias: ChampionAlias, entries: list[Entry], rival: int | None, challenger: Challenger
) -> MeasuredExport | None:
    """Return the rival's evaluation on the challenger's reference set; None if there is no set, or no evaluation."""
    own = challenger.on_reference
    return read_measured_version(alias, entries, rival, own.evaluation.evaluation_digest) if own else None


def _judge_against(
    config: Config,
    challenger: Challenger,
    rival: int | None,
    theirs: MeasuredExport,
    on_reference: MeasuredExport | None,
    metrics: Metrics,
) -> Judgement:
    """Decide by comparison with a rival, at the confidence level of this try, and count the try."""
    settings, own = config.registry, challenger.measured
    book = Tries.of(config.run.storage_root, config.model_name, theirs.evaluation.export_digest)
    evaluation = own.evaluation
    identity = tries.digest_identity(
        evaluation.export_digest, evaluation.evaluation_digest, settings.metric, settings.goal
    )
    reference = _collect_reference_evidence(config, challenger, on_reference, metrics)

    def decide_try(number: int) -> Judgement:
        evidence = replace(_collect_evidence(config, own, theirs, metrics, number), **reference)
        return Judgement(
            decide(settings, evidence),
            rival,
            champion=evidence.champion,
            improvement=evidence.improvement,
            number=number,
            confidence=evidence.confidence,
        )

    if settings.promotion == "never":  # it cannot promote a model that is no better: no try
        return replace(decide_try(book.find_number(identity)[0]), number=0)
    return book.decide_and_count(identity, challenger.paths.run_id, challenger.registered.version, decide_try)


def _collect_evidence(
    config: Config, own: MeasuredExport, theirs: MeasuredExport, metrics: Metrics, number: int
) -> Evidence:
    settings = config.registry
    confidence = choose_confidence(settings, number)
    return Evidence(
        challenger=find_metric(own.evaluation.metrics, settings.metric),
        num_groups=own.num_groups,
        champion=find_metric(theirs.evaluation.metrics, settings.metric),
        improvement=comparison.compute_improvement(config, metrics, own, theirs, confidence),
        confidence=confidence,
        number=number,
        test=comparison.run_paired_test(config, metrics, own, theirs),
        slices=_compare_slices(config, own, theirs, metrics),
        costs=own.costs,
    )


def _collect_reference_evidence(
    config: Config, challenger: Challenger, theirs: MeasuredExport | None, metrics: Metrics
) -> dict[str, Any]:
    """Return the fields of `Evidence` about the reference set: the improvement, or why there is none."""
    own = challenger.on_reference
    if own is None:
        obstacle = "the run was not measured on the reference set" if challenger.lacks_reference else ""
        return {"reference_obstacle": obstacle}
    if theirs is None:
        return {"reference_obstacle": f"the champion {NO_EVALUATION.replace('the same data', 'the reference set')}"}
    return {"reference": comparison.compute_improvement(config, metrics, own, theirs)}


def _compare_slices(
    config: Config, own: MeasuredExport, theirs: MeasuredExport, metrics: Metrics
) -> Mapping[str, Interval] | None:
    if config.registry.max_slice_regression is None:
        return {}
    return comparison.compute_slice_improvements(config, metrics, own, theirs)


def _find_rival(
    alias: ChampionAlias, entries: list[Entry], challenger: Challenger
) -> tuple[int | None, MeasuredExport | None, str]:
    """Return the version to compare with and its evaluation; and if they cannot be compared, the reason why.

    A champion without an evaluation is not passed over: whoever beats the one before it need not be better. If there
    is no champion any more, the last former one with an evaluation is the rival.
    """
    number = find_champion_version(entries)
    if number is not None:
        measured = read_measured_version(alias, entries, number, challenger.digest)
        return number, measured, "" if measured else _explain_obstacle(alias, entries, number, challenger)
    own = challenger.registered.version
    formers = [entry.version for entry in list_former_champions(entries) if entry.version not in (None, own)]
    for former in formers:
        measured = read_measured_version(alias, entries, former, challenger.digest)
        if measured is not None:
            return former, measured, ""
    if not any(entry.version for entry in entries):
        return None, None, ""
    return None, None, f"the champion was deleted or lost its alias, and none before it {NO_EVALUATION}"


def _explain_obstacle(alias: ChampionAlias, entries: list[Entry], champion: int, challenger: Challenger) -> str:
    """Say that the champion has no figures to compare with, and why, if the run's evaluation has noted it."""
    reference, digest = alias.reference(entries, champion), challenger.digest
    export_digest = reference.export_digest if reference else ""
    reason = comparison.read_why_unmeasured(challenger.paths, digest, export_digest)
    return f"the champion, version {champion}, {NO_EVALUATION}" + (f" ({reason})" if reason else "")
