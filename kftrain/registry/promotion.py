"""Promotion: the gate's decision on a registered version, and its effect. Rollback takes the last one back.

The decision is made against the champion of the moment and entered only if that champion still holds the title;
otherwise it is made again against the new one. So the champion never gets worse under any interleaving of promotions
(`title` has the argument).
"""

from __future__ import annotations

from dataclasses import dataclass

from kftrain import storage
from kftrain.bootstrap import Metrics
from kftrain.config import Config
from kftrain.contracts import Completion, Evaluation, Interval, Registration, RunPaths
from kftrain.errors import EvaluationError, TrackingError
from kftrain.registry import comparison
from kftrain.registry.comparison import Measured
from kftrain.registry.gate import Decision, decide, metric_of
from kftrain.registry.journal import Entry, champion_version, next_entry, predecessors
from kftrain.registry.reference import (
    CHECKPOINT_DIGEST_TAG,
    EXPORT_DIGEST_TAG,
    EXPORT_URI_TAG,
    GATE_TAG,
    PROMOTED_TAG,
    RUN_URI_TAG,
    require_export,
)
from kftrain.registry.register import RegisteredVersion, require_same_export
from kftrain.registry.title import Title
from kftrain.tracking import client, endpoint


@dataclass(frozen=True)
class Champion:
    """The champion of a registered model, as far as an evaluation needs it."""

    version: int
    run_uri: str
    checkpoint_digest: str
    export_uri: str
    export_digest: str


@dataclass(frozen=True)
class _Verdict:
    """A decision, with what it was made from. `rival`: the version that was compared with."""

    decision: Decision
    rival: int | None
    champion: Interval | None
    improvement: Interval | None


def champion(config: Config) -> Champion | None:
    """The current champion; None if there is none, or it was not registered by kftrain. Raises TrackingError."""
    title = Title.of(config)
    entries, alias, situation = title.observe()
    number = alias if situation == "external" else champion_version(entries)
    version = None if number is None else client.get_version(title.uri, title.model_name, number)
    if version is None or EXPORT_URI_TAG not in version.tags:
        return None
    tags = version.tags
    return Champion(
        version=version.version,
        run_uri=tags[RUN_URI_TAG],
        checkpoint_digest=tags[CHECKPOINT_DIGEST_TAG],
        export_uri=tags[EXPORT_URI_TAG],
        export_digest=tags[EXPORT_DIGEST_TAG],
    )


def gate_and_promote(
    config: Config,
    paths: RunPaths,
    registered: RegisteredVersion,
    completion: Completion,
    evaluation: Evaluation,
    metrics: Metrics,
) -> Registration:
    """Decides whether a registered version becomes champion, and makes it so if the policy is `auto`.

    `metrics`: the task's function from sums to metrics. Writes `registration.json`. May be repeated. Raises
    ConfigError for an unknown metric, EvaluationError for evaluation files that do not fit, TrackingError.
    """
    require_same_export(completion, evaluation)
    require_export(completion.export_uri, completion.export_digest)
    metric_of(evaluation.metrics, config.registry.metric)
    challenger = _read_challenger(paths, evaluation)
    title = Title.of(config)

    def propose(entries: list[Entry]) -> tuple[_Verdict, Entry | None]:
        if champion_version(entries) == registered.version:
            return _standing(config, title, entries[-1], challenger), None
        verdict = _judge(config, title, champion_version(entries), challenger, metrics)
        if not verdict.decision.promote:
            return verdict, None
        reason, digest = verdict.decision.reason, evaluation.evaluation_digest
        return verdict, next_entry(entries, "promote", registered.version, reason, digest, verdict.improvement)

    registration = _registration(config, paths, registered, evaluation, title.transact(propose))
    _record(config, registration)
    storage.publish_json(paths.registration, registration.to_dict())
    return registration


def promote(config: Config, version: int, reason: str) -> Entry:
    """Makes a version champion because a person wants it, whatever the gate says. Raises TrackingError."""
    title = Title.of(config)
    _require_version(title, version)

    def propose(entries: list[Entry]) -> tuple[Entry, Entry | None]:
        if champion_version(entries) == version:
            return entries[-1], None
        entry = next_entry(entries, "promote", version, f"by hand: {reason}")
        return entry, entry

    return title.transact(propose)


def rollback(config: Config) -> Entry:
    """Makes the champion before the last promotion champion again; repeated, it goes further back.

    Versions that were deleted, or whose export is gone, are passed over. Raises TrackingError if none is left.
    """
    title = Title.of(config)

    def propose(entries: list[Entry]) -> tuple[Entry, Entry]:
        for version in predecessors(entries):
            if _is_usable(title, version):
                entry = next_entry(
                    entries, "rollback", version, f"rolled back from version {champion_version(entries)}"
                )
                return entry, entry
        raise TrackingError(
            "there is no earlier champion to go back to", where=title.model_name, fix="promote a version"
        )

    return title.transact(propose)


def _judge(config: Config, title: Title, rival: int | None, challenger: Measured, metrics: Metrics) -> _Verdict:
    """The gate's decision on a challenger against a champion."""
    measured = _measured(title, rival, challenger)
    improvement = comparison.improvement(config, metrics, challenger, measured) if measured else None
    metric = config.registry.metric
    theirs = metric_of(measured.evaluation.metrics, metric) if measured else None
    decision = decide(
        metric=metric,
        goal=config.registry.goal,
        min_effect=config.registry.min_effect,
        confidence=config.registry.confidence,
        promotion=config.registry.promotion,
        challenger=metric_of(challenger.evaluation.metrics, metric),
        champion=theirs,
        improvement=improvement,
        comparable=rival is None or measured is not None,
    )
    return _Verdict(decision, rival, theirs, improvement)


def _standing(config: Config, title: Title, entry: Entry, challenger: Measured) -> _Verdict:
    """The verdict that made the challenger champion already: this is a repetition."""
    measured = _measured(title, entry.previous, challenger)
    theirs = measured.evaluation.metrics.get(config.registry.metric) if measured else None
    return _Verdict(Decision(True, entry.reason), entry.previous, theirs, entry.improvement)


def _read_challenger(paths: RunPaths, evaluation: Evaluation) -> Measured:
    folder = paths.evaluation(evaluation.checkpoint_digest, evaluation.evaluation_digest)
    measured = comparison.read_measured(folder)
    if measured.evaluation != evaluation:
        raise EvaluationError("metrics.json changed since the evaluation", where=folder, fix="evaluate again")
    return measured


def _measured(title: Title, version: int | None, challenger: Measured) -> Measured | None:
    found = None if version is None else client.get_version(title.uri, title.model_name, version)
    return comparison.find_measured(found, challenger.evaluation.evaluation_digest) if found else None


def _registration(
    config: Config, paths: RunPaths, registered: RegisteredVersion, evaluation: Evaluation, verdict: _Verdict
) -> Registration:
    return Registration(
        run_id=paths.run_id,
        model_name=registered.model_name,
        version=registered.version,
        logged_model_id=registered.logged_model_id,
        mlflow_run_id=registered.mlflow_run_id,
        tracking_uri=endpoint.redacted(config.tracking.uri),
        promoted=verdict.decision.promote,
        reason=verdict.decision.reason,
        metric=config.registry.metric,
        goal=config.registry.goal,
        challenger=evaluation.metrics[config.registry.metric],
        champion_version=verdict.rival,
        champion=verdict.champion,
        improvement=verdict.improvement,
    )


def _record(config: Config, registration: Registration) -> None:
    """Shows the outcome on the version and on the run."""
    uri, name = config.tracking.uri, registration.model_name
    outcome = {PROMOTED_TAG: str(registration.promoted).lower(), GATE_TAG: registration.reason}
    client.set_version_tags(uri, name, registration.version, outcome)
    version = {"kftrain.registered_version": f"{name}/{registration.version}"}
    client.set_tags(uri, registration.mlflow_run_id, {**outcome, **version})


def _require_version(title: Title, number: int) -> None:
    version = client.get_version(title.uri, title.model_name, number)
    if version is None:
        raise TrackingError("there is no such version", where=title.model_name, value=number)
    if EXPORT_URI_TAG in version.tags:
        require_export(version.tags[EXPORT_URI_TAG], version.tags[EXPORT_DIGEST_TAG])


def _is_usable(title: Title, number: int) -> bool:
    try:
        _require_version(title, number)
    except TrackingError:
        return False
    return True
