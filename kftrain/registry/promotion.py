"""Promotion carries out the gate's decision on a registered version; people promote, decline and roll back by hand.

The decision is made against the champion of the moment and entered only if that champion still holds the alias;
otherwise it is made again against the new one. So the champion never gets worse under any interleaving of promotions
(`champion_alias` has the argument).
"""

from __future__ import annotations

from dataclasses import dataclass

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress, to_log
from kftrain.errors import ConfigError, EvaluationError, MlflowError, TrackingError
from kftrain.registry import comparison, declined, journal, judgement, lineage, recorded
from kftrain.registry.champion_alias import ChampionAlias
from kftrain.registry.comparison import MeasuredExport
from kftrain.registry.journal import (
    Declined,
    Entry,
    champion_version,
    entered_digest,
    former_champions,
    next_entry,
    predecessors,
)
from kftrain.registry.judgement import Challenger, Judgement
from kftrain.registry.reference import GATE_TAG, PROMOTED_TAG, require_export
from kftrain.registry.registration import CONTENT_DIGEST_TAG, RegisteredVersion, require_same_export
from kftrain.run.documents import Completion, Evaluation, GateReason, Registration
from kftrain.run.paths import RunPaths
from kftrain.statistics.bootstrap import Metrics
from kftrain.tracking import client, endpoint, model_client
from kftrain.tracking.model_client import ModelVersion


@dataclass(frozen=True)
class Champion:
    """The champion of a registered model, with the digests and places that an evaluation needs of it."""

    version: int
    run_uri: str
    checkpoint_digest: str
    export_uri: str
    export_digest: str


def champion(config: Config) -> Champion | None:
    """Return the version that the gate will compare with: the champion, or the last one if there is none any more.

    None if there never was one, or if kftrain did not register it. Changes nothing. Raises TrackingError.
    """
    alias = ChampionAlias.of(config)
    entries, aliased, situation = alias.observe()
    standing = aliased if situation == "external" else champion_version(entries)
    versions = [entry.version for entry in former_champions(entries)] if standing is None else [standing]
    for version in filter(None, versions):
        reference = alias.reference(entries, version)
        if reference is not None:
            return Champion(
                version,
                reference.run_uri,
                reference.checkpoint_digest,
                reference.export_uri,
                reference.export_digest,
            )
    return None


def gate_and_promote(
    config: Config,
    paths: RunPaths,
    registered: RegisteredVersion,
    completion: Completion,
    evaluation: Evaluation,
    metrics: Metrics,
    trained_on: GateReason | None = None,
    lacks_reference: bool = False,
) -> Registration:
    """Decide whether a registered version becomes champion, and make it champion if `registry.promotion` is `auto`.

    `metrics`: the task's function from sums to metrics. The last two arguments: see `Challenger`. Every byte of the
    export is checked before it is promoted. Writes `registration.json`. May be repeated. Raises ConfigError for an
    unknown metric, EvaluationError for evaluation files that do not fit, TrackingError.
    """
    require_same_export(completion, evaluation)
    require_export(completion.export_uri, completion.export_digest)
    config.registry.require_metric(evaluation.metrics)
    measured = (_read_challenger(paths, evaluation), comparison.read_on_reference(paths, evaluation))
    challenger = Challenger(paths, registered, *measured, trained_on, lacks_reference)
    alias = ChampionAlias.of(config)

    def propose(entries: list[Entry]) -> tuple[Judgement, Entry | None]:
        if journal.is_champion(entries, registered.version, registered.export_digest):
            return judgement.standing(config, alias, entries, challenger), None
        result = judgement.judge(config, alias, entries, challenger, metrics)
        content = lineage.content_digest(registered.export_uri, registered.export_digest)
        refusal = declined.find(config, entries, registered.export_digest, content)
        if refusal is not None:
            return judgement.overruled(result, "declined", f"declined by hand: {refusal.reason}"), None
        back = journal.taken_back(entries, registered.version, registered.export_digest)
        if back and not registered.identical:
            return judgement.overruled(result, "taken_back", f"taken back by hand: {back}"), None
        if not result.decision.promote:
            return result, None
        require_export(registered.export_uri, registered.export_digest, contents=True)
        facts = (registered.version, result.decision.reason, evaluation.evaluation_digest, result.improvement)
        entry = next_entry(entries, "promote", *facts, registered.export_digest)
        of_gate = {"reasons": result.decision.reasons, "num_tries": result.number, "confidence": result.confidence}
        return result, entry.model_copy(update=of_gate)

    registration = _make_registration(config, paths, registered, evaluation, alias.transact(propose))
    # All that follows only shows what is decided. `registration.json` comes last: while it is missing, the step runs
    # again and repeats what a crash has left out.
    alias.point_challenger(registered.version, registration.awaits_person)
    _tag_outcome(config, registration)
    recorded.record_comparison(config, alias, challenger, registration.champion_version, metrics)
    storage.publish_json(paths.registration, registration.to_dict())
    return registration


def promote(config: Config, version: int, reason: str) -> Entry:
    """Make a version champion because a person wants it, whatever the gate says; also one that was declined.

    Every byte of the export is checked first. Raises TrackingError.
    """
    alias = ChampionAlias.of(config)
    export_digest = _require_version(alias, version)

    def propose(entries: list[Entry]) -> tuple[Entry, Entry | None]:
        if journal.is_champion(entries, version, export_digest) and not declined.find(config, entries, export_digest):
            return journal.last_change(entries), None
        entry = next_entry(entries, "promote", version, f"by hand: {reason}", export_digest=export_digest)
        return entry, entry

    entry = alias.transact(propose)
    declined.remove_document(config, export_digest)
    alias.point_challenger(version, awaits_person=False)
    return entry


def decline(config: Config, version: int, reason: str) -> Declined:
    """Decline a version because a person says so: the gate will not promote its weights any more. May be repeated.

    Raises TrackingError, also for the present champion.
    """
    alias = ChampionAlias.of(config)
    model_version = _require_existing(alias, version)
    export_digest = lineage.of(alias.uri, model_version).export_digest

    def propose(entries: list[Entry]) -> tuple[Declined, Entry | None]:
        champion = champion_version(entries)
        if champion == version:
            what, fix = "the champion cannot be declined", "kftrain models rollback"
            raise TrackingError(what, where=alias.model_name, value=version, fix=fix)
        earlier = declined.find(config, entries, export_digest)
        entry = next_entry(entries, "decline", champion, reason, export_digest=entered_digest(entries, champion))
        facts = {
            "time": entry.time,
            "entry_id": entry.entry_id,
            "content_digest": model_version.tags.get(CONTENT_DIGEST_TAG, ""),
        }
        refusal = Declined(version=version, export_digest=export_digest, reason=reason, **facts)
        return (earlier, None) if earlier else (refusal, entry.model_copy(update={"declined": refusal}))

    refusal = alias.transact(propose)
    alias.point_challenger(version, awaits_person=False)
    tags = {PROMOTED_TAG: "false", GATE_TAG: f"declined by hand: {refusal.reason}"}
    model_client.set_version_tags(alias.uri, alias.model_name, version, tags)
    return refusal


def rollback(config: Config) -> Entry:
    """Make the champion before the last promotion champion again; a further rollback goes further back.

    Versions that were deleted or declined, or whose export is gone, are passed over. Raises TrackingError if none is
    left.
    """
    alias = ChampionAlias.of(config)

    def propose(entries: list[Entry]) -> tuple[Entry, Entry]:
        for version in predecessors(entries):
            export_digest = _check_export(alias, version) if alias.holds(entries, version) else None
            if export_digest is not None and not declined.find(config, entries, export_digest):
                reason = f"rolled back from version {champion_version(entries)}"
                entry = next_entry(entries, "rollback", version, reason, export_digest=export_digest)
                return entry, entry
        what = "there is no earlier champion to go back to"
        raise TrackingError(what, where=alias.model_name, fix="promote a version")

    return alias.transact(propose)


def remove_dead_writers(config: Config, progress: Progress = to_log) -> None:
    """Remove the marks of promotions that died; takes up to `journal.WATCH_SECONDS` if there are marks.

    While they are there, a change of the alias by hand is overwritten. If MLflow is down, a warning goes to `progress`
    and the marks stay for the next call.
    """
    alias = ChampionAlias.of(config)
    if alias.journal.writers():
        progress(f"another promotion is under way or died: watching it for up to {journal.WATCH_SECONDS:.0f} s")
    try:
        alias.remove_dead_writers()
    except TrackingError as error:
        progress(f"warning: {error.line}")


def _read_challenger(paths: RunPaths, evaluation: Evaluation) -> MeasuredExport:
    folder = paths.evaluation(evaluation.checkpoint_digest, evaluation.evaluation_digest)
    measured = comparison.read_measured(folder)
    if measured.evaluation != evaluation:
        raise EvaluationError("metrics.json changed since the evaluation", where=folder, fix="evaluate again")
    return measured


def _make_registration(
    config: Config, paths: RunPaths, registered: RegisteredVersion, evaluation: Evaluation, result: Judgement
) -> Registration:
    return Registration(
        run_id=paths.run_id,
        model_name=registered.model_name,
        version=registered.version,
        logged_model_id=registered.logged_model_id,
        mlflow_run_id=registered.mlflow_run_id,
        tracking_uri=endpoint.redacted(config.tracking.uri),
        promoted=result.decision.promote,
        reason=result.decision.reason,
        reasons=list(result.decision.reasons),
        awaits_person=result.decision.awaits_person,
        num_tries=result.number,
        confidence=result.confidence,
        metric=config.registry.metric,
        goal=config.registry.goal,
        challenger=evaluation.metrics[config.registry.metric],
        champion_version=result.rival,
        champion=result.champion,
        improvement=result.improvement,
        former_champion=result.former,
        identical=registered.identical,
    )


def _tag_outcome(config: Config, registration: Registration) -> None:
    """Set tags with the outcome on the version and on the run."""
    uri, name = config.tracking.uri, registration.model_name
    outcome = {PROMOTED_TAG: str(registration.promoted).lower(), GATE_TAG: registration.reason}
    if registration.promoted or not registration.identical:  # else they are about the run that made the version
        model_client.set_version_tags(uri, name, registration.version, outcome)
    version = {"kftrain.registered_version": f"{name}/{registration.version}"}
    client.set_tags(uri, registration.mlflow_run_id, {**outcome, **version})


def _require_existing(alias: ChampionAlias, number: int) -> ModelVersion:
    version = model_client.get_version(alias.uri, alias.model_name, number)
    if version is None:
        raise TrackingError("there is no such version", where=alias.model_name, value=number)
    return version


def _require_version(alias: ChampionAlias, number: int) -> str:
    """Check every byte of a version's export and return its digest; empty for a version of another program.

    Raises TrackingError if the version or its export is gone or damaged, ConfigError if its place is not trusted.
    """
    version = _require_existing(alias, number)
    if not lineage.logged_model_id(version):
        return ""
    reference = lineage.of(alias.uri, version)
    alias.trust.require_place(reference.export_uri)
    require_export(reference.export_uri, reference.export_digest, contents=True)
    return reference.export_digest


def _check_export(alias: ChampionAlias, number: int) -> str | None:
    """Return what `_require_version` returns, or None if the version cannot be used."""
    try:
        return _require_version(alias, number)
    except MlflowError:  # it says nothing of the version
        raise
    except (TrackingError, ConfigError):
        return None
