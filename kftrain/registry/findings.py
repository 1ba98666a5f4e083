"""Looking at the registry: does everything in it resolve, and how do its versions compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kftrain.bootstrap import Metrics
from kftrain.config import Config
from kftrain.errors import KftrainError, MlflowError, TrackingError
from kftrain.registry import comparison, lineage
from kftrain.registry.champion_alias import CHAMPION, ChampionAlias
from kftrain.registry.journal import champion_version
from kftrain.registry.reference import require_export
from kftrain.run.documents import Interval
from kftrain.tracking import client
from kftrain.tracking.client import ModelVersion
from kftrain.trust import Trust


@dataclass(frozen=True)
class AuditFinding:
    """Something that is wrong. `version` is None where it concerns the whole model."""

    version: int | None
    problem: str


@dataclass(frozen=True)
class ComparedVersion:
    """A version with its metrics under its own evaluation digest, and against the champion where that is possible."""

    version: int
    aliases: tuple[str, ...]
    run_uri: str
    evaluation_digest: str
    metrics: dict[str, Interval]
    improvement: Interval | None
    """Paired difference to the champion in the gate's metric, positive is better; None: not comparable."""


def audit(config: Config, contents: bool = False) -> list[AuditFinding]:
    """All that is wrong: versions whose export is gone or another, edited tags, alias and journal that disagree.

    `contents`: reads every export in full and checks every byte. Raises TrackingError if MLflow fails.
    """
    alias = ChampionAlias.of(config)
    findings = _audit_alias(alias)
    for version in client.search_versions(alias.uri, alias.model_name):
        findings += [AuditFinding(version.version, problem) for problem in _problems(alias, version, contents)]
    return findings


def compare(config: Config, versions: Sequence[int], metrics: Metrics) -> list[ComparedVersion]:
    """Versions beside each other, in this order; none given: all, newest first.

    `metrics`: the task's function from sums to metrics. Raises TrackingError, EvaluationError.
    """
    alias = ChampionAlias.of(config)
    aliases = client.get_aliases(alias.uri, alias.model_name)
    found = {version.version: version for version in client.search_versions(alias.uri, alias.model_name)}
    if missing := [number for number in versions if number not in found]:
        raise TrackingError("there is no such version", where=alias.model_name, value=missing)
    champion = found.get(aliases.get(CHAMPION, -1))
    wanted = versions or sorted(found, reverse=True)
    return [_compared(config, found[number], champion, aliases, metrics) for number in wanted]


def _audit_alias(alias: ChampionAlias) -> list[AuditFinding]:
    try:
        entries, aliased, situation = alias.observe()
    except MlflowError:  # it is away, which is no finding
        raise
    except TrackingError as error:
        return [AuditFinding(None, error.line)]
    findings = []
    if situation != "settled":
        problem = f"alias champion is {aliased}, the journal says {champion_version(entries)} ({situation})"
        findings.append(AuditFinding(None, f"{problem}; the next promotion settles it"))
    end = champion_version(entries)
    if end is not None and not alias.exists(end):
        findings.append(AuditFinding(end, "the champion was deleted from the registry; run: kftrain models rollback"))
    return findings


def _problems(alias: ChampionAlias, version: ModelVersion, contents: bool) -> list[str]:
    problems = []
    try:
        reference = lineage.of(alias.uri, version)
        if differing := lineage.differing_tags(alias.uri, version):
            problems.append(
                f"tags were changed and differ from its reference.json, which counts: {', '.join(differing)}"
            )
        alias.trust.require_place(reference.export_uri)
        require_export(reference.export_uri, reference.export_digest, contents=contents)
    except MlflowError:
        raise
    except KftrainError as error:
        if error.retryable:  # storage is away, which is no finding
            raise
        problems.append(error.line)
    return problems


def _compared(
    config: Config,
    version: ModelVersion,
    champion: ModelVersion | None,
    aliases: dict[str, int],
    metrics: Metrics,
) -> ComparedVersion:
    uri = config.tracking.uri
    reference = lineage.find(uri, version)
    digest = lineage.last_evaluation(uri, version, reference) if reference else ""
    rival = lineage.find(uri, champion) if champion and champion != version else None
    trust = Trust.of(config)
    own, theirs = (comparison.find_measured(each, digest, trust) for each in (reference, rival))
    return ComparedVersion(
        version=version.version,
        aliases=tuple(sorted(aliased for aliased, number in aliases.items() if number == version.version)),
        run_uri=reference.run_uri if reference else "",
        evaluation_digest=digest,
        metrics=own.evaluation.metrics if own else {},
        improvement=comparison.improvement(config, metrics, own, theirs) if own and theirs else None,
    )
