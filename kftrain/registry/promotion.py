"""Promotion carries out the gate's decision on a registered version; people promote, decline and roll back by hand.

The decision is made against the champion of the moment and entered only if that champion still holds the alias;
otherwise it is made again against the new one. So the champion never gets worse under any interleaving of promotions
(`champion_alias` has the argument).

A decline is an entry of the journal, so of a decline and a promotion at the same moment one sees the other. It names
the export, so a step that runs again, and another run with the same weights, are declined, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress, to_log
from kftrain.errors import ConfigError, EvaluationError, MlflowError, TrackingError
from kftrain.registry import comparison, journal, judgement, lineage
from kftrain.registry.champion_alias import ChampionAlias
from kftrain.registry.comparison import RESAMPLING_SEED, MeasuredExport
from kftrain.registry.gate import Judgement
from kftrain.registry.journal import (
    Declined,
    Entry,
    find_champion_version,
    find_entered_digest,
    list_former_champions,
    list_predecessors,
    make_next_entry,
)
from kftrain.registry.judgement import Challenger
from kftrain.registry.reference import GATE_TAG, PROMOTED_TAG, require_export
from kftrain.registry.registration import CONTENT_DIGEST_TAG, RegisteredVersion, require_same_export
from kftrain.run import documents
from kftrain.run.documents import Completion, Evaluation, GateReason, Registration
from kftrain.run.paths import RunPaths
from kftrain.statistics import bootstrap
from kftrain.statistics.bootstrap import Metrics
from kftrain.tracking import client, endpoint, model_client, runs
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
    standing = aliased if situation == "external" else find_champion_version(entries)
    versions = [entry.version for entry in list_former_champions(entries)] if standing is None else [standing]
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
    challenger = Challenger(
        paths,
        registered,
        measured=_read_challenger(paths, evaluation),
        on_reference=comparison.read_on_reference(paths, evaluation),
        trained_on=trained_on,
        lacks_reference=lacks_reference,
    )
    alias = ChampionAlias.of(config)

    def propose(entries: list[Entry]) -> tuple[Judgement, Entry | None]:
        if journal.is_champion(entries, registered.version, registered.export_digest):
            return judgement.recall_judgement(config, alias, entries, challenger), None
        result = judgement.judge(config, alias, entries, challenger, metrics)
        content = lineage.read_content_digest(registered.export_uri, registered.export_digest)
        refusal = find_decline(config, entries, registered.export_digest, content)
        if refusal is not None:
            return judgement.overrule(result, "declined", f"declined by hand: {refusal.reason}"), None
        back = journal.find_reason_taken_back(entries, registered.version, registered.export_digest)
        if back and not registered.identical:
            return judgement.overrule(result, "taken_back", f"taken back by hand: {back}"), None
        if not result.decision.promote:
            return result, None
        require_export(registered.export_uri, registered.export_digest, contents=True)
        return result, make_next_entry(
            entries,
            "promote",
            registered.version,
            result.decision.reason,
            export_digest=registered.export_digest,
            evaluation_digest=evaluation.evaluation_digest,
            improvement=result.improvement,
            reasons=result.decision.reasons,
            num_tries=result.number,
            confidence=result.confidence,
        )

    registration = _make_registration(config, paths, registered, evaluation, alias.transact(propose))
    # All that follows only shows what is decided. `registration.json` comes last: while it is missing, the step runs
    # again and repeats what a crash has left out.
    alias.point_challenger(registered.version, registration.awaits_person)
    _tag_outcome(config, registration)
    _record_comparison(config, alias, challenger, registration.champion_version, metrics)
    storage.publish_json(paths.registration, registration.to_dict())
    return registration


def promote(config: Config, version: int, reason: str) -> Entry:
    """Make a version champion because a person wants it, whatever the gate says; also one that was declined.

    Every byte of the export is checked first. Raises TrackingError.
    """
    alias = ChampionAlias.of(config)
    export_digest = _require_version(alias, version)

    def propose(entries: list[Entry]) -> tuple[Entry, Entry | None]:
        if journal.is_champion(entries, version, export_digest) and not find_decline(config, entries, export_digest):
            return journal.find_last_change(entries), None
        entry = make_next_entry(entries, "promote", version, f"by hand: {reason}", export_digest=export_digest)
        return entry, entry

    entry = alias.transact(propose)
    _remove_old_decline(config, export_digest)
    alias.point_challenger(version, awaits_person=False)
    return entry


def decline(config: Config, version: int, reason: str) -> Declined:
    """Decline a version because a person says so: the gate will not promote its weights any more. May be repeated.

    Raises TrackingError, also for the present champion.
    """
    alias = ChampionAlias.of(config)
    model_version = _require_existing(alias, version)
    export_digest = lineage.read_reference(alias.uri, model_version).export_digest

    def propose(entries: list[Entry]) -> tuple[Declined, Entry | None]:
        champion = find_champion_version(entries)
        if champion == version:
            what, fix = "the champion cannot be declined", "kftrain models rollback"
            raise TrackingError(what, where=alias.model_name, value=version, fix=fix)
        earlier = find_decline(config, entries, export_digest)
        entry = make_next_entry(
            entries, "decline", champion, reason, export_digest=find_entered_digest(entries, champion)
        )
        refusal = Declined(
            version=version,
            export_digest=export_digest,
            reason=reason,
            time=entry.time,
            entry_id=entry.entry_id,
            content_digest=model_version.tags.get(CONTENT_DIGEST_TAG, ""),
        )
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
        for version in list_predecessors(entries):
            export_digest = _check_export(alias, version) if alias.holds(entries, version) else None
            if export_digest is not None and not find_decline(config, entries, export_digest):
                reason = f"rolled back from version {find_champion_version(entries)}"
                entry = make_next_entry(entries, "rollback", version, reason, export_digest=export_digest)
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
    measured = comparison.read_measured_export(folder)
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
        tracking_uri=endpoint.redact(config.tracking.uri),
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
    if not lineage.parse_logged_model_id(version):
        return ""
    reference = lineage.read_reference(alias.uri, version)
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


def find_decline(config: Config, entries: Sequence[Entry], export_digest: str, content: str = "") -> Declined | None:
    """Return the decline of an export, or of one with the same content; None if there is none.

    Raises TrackingError if the document of an older kftrain is damaged.
    """
    # From the newest entry back: a promotion that is met first came later, and lifts the declines before it.
    promoted = set[str]()
    for entry in reversed(entries):
        decline = entry.declined
        if (
            decline
            and not promoted & {decline.export_digest, export_digest}
            and _is_declined_by(decline, export_digest, content)
        ):
            return decline
        promoted |= {entry.export_digest} if entry.kind == "promote" else set()
    return documents.read_if_exists(Declined, _old_decline_uri(config, export_digest), TrackingError)


def _is_declined_by(decline: Declined, export_digest: str, content: str) -> bool:
    # Declines of an older kftrain have no content: an empty one must not equal that of a version without the tag.
    return decline.export_digest == export_digest or "" != decline.content_digest == content


def _remove_old_decline(config: Config, export_digest: str) -> None:
    """Remove the document with which an older kftrain declined an export; newer declines are entries and stay."""
    storage.remove(_old_decline_uri(config, export_digest))


def _old_decline_uri(config: Config, export_digest: str) -> str:
    """Return the place where an older kftrain kept a decline, by the digest of the declined export."""
    folder = storage.join(config.run.storage_root, "registry", config.model_name, "declined")
    return storage.join(folder, f"{export_digest[:16]}.json")


def _record_comparison(
    config: Config, alias: ChampionAlias, challenger: Challenger, rival: int | None, metrics: Metrics
) -> None:
    """Record in MLflow the metrics, the rival's, and the difference, on the run's data and on the reference set.

    Versions of a schedule are measured each on a window of its own, so their figures alone do not compare. The points
    go to the run, and to its LoggedModel unless the version is another run's. May be repeated.
    """
    uri, registered, tags = alias.uri, challenger.registered, dict[str, str]()
    model_id = None if registered.identical else registered.logged_model_id
    for prefix, own in (("", challenger.measured), ("reference_", challenger.on_reference)):
        if own is not None:
            digest = tags[f"kftrain.{prefix}evaluation_digest"] = own.evaluation.evaluation_digest
            theirs = judgement.read_measured_version(alias, alias.journal.entries(), rival, digest)
            values = {
                f"{prefix}{name}": value for name, value in _collect_figures(config, metrics, own, theirs).items()
            }
            points = runs.make_evaluation_points(uri, registered.mlflow_run_id, values)
            dataset = "reference" if prefix else runs.read_dataset_name(uri, registered.mlflow_run_id)
            client.log_points(uri, registered.mlflow_run_id, points, model_id, (dataset, own.evaluation.dataset_digest))
    client.set_tags(uri, registered.mlflow_run_id, tags)


def _collect_figures(
    config: Config, metrics: Metrics, own: MeasuredExport, theirs: MeasuredExport | None
) -> dict[str, float]:
    """Return name -> value of the metrics, and of the champion's and the differences if there is an evaluation of it.

    What is not finite is left out: MLflow stores NaN as 0.
    """
    figures = {name: interval.value for name, interval in own.evaluation.metrics.items()}
    if theirs is not None:
        pair, _ = bootstrap.paired_differences(
            metrics,
            own.statistics,
            theirs.statistics,
            {},
            config.evaluate.num_bootstrap,
            config.registry.confidence,
            RESAMPLING_SEED,
        )
        for name in pair.keys() & theirs.evaluation.metrics.keys():
            bounds = {"": pair[name].value, "_low": pair[name].low, "_high": pair[name].high}
            figures[f"{name}.champion"] = theirs.evaluation.metrics[name].value
            figures |= {f"{name}.difference{bound}": value for bound, value in bounds.items()}
    return {name: value for name, value in figures.items() if isfinite(value)}
