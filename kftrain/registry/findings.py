"""Audits the registry: does every version still lead to its export, and do alias and journal agree."""

from __future__ import annotations

from dataclasses import dataclass

from kftrain.config import Config
from kftrain.errors import KftrainError, MlflowError, TrackingError
from kftrain.registry import lineage
from kftrain.registry.champion_alias import ChampionAlias
from kftrain.registry.journal import find_champion_version
from kftrain.registry.reference import require_export
from kftrain.tracking import model_client
from kftrain.tracking.model_client import ModelVersion


@dataclass(frozen=True)
class AuditFinding:
    """A problem in the registry. `version` is None if the problem concerns the whole model."""

    version: int | None
    problem: str


def audit(config: Config, contents: bool = False) -> list[AuditFinding]:
    """List what is wrong: versions whose export is gone or another, edited tags, alias and journal that disagree.

    `contents`: read every export in full and check every byte. Raises TrackingError if MLflow fails, and lets errors of
    a storage that is away pass: they are no finding.
    """
    alias = ChampionAlias.of(config)
    findings = _audit_alias(alias)
    for version in model_client.search_versions(alias.uri, alias.model_name):
        findings += [AuditFinding(version.version, problem) for problem in _audit_version(alias, version, contents)]
    return findings


def _audit_alias(alias: ChampionAlias) -> list[AuditFinding]:
    try:
        entries, aliased, situation = alias.observe()
    except MlflowError:  # it is away, which is no finding
        raise
    except TrackingError as error:
        return [AuditFinding(None, error.line)]
    findings = []
    if situation != "settled":
        problem = f"alias champion is {aliased}, the journal says {find_champion_version(entries)} ({situation})"
        findings.append(AuditFinding(None, f"{problem}; the next promotion settles it"))
    end = find_champion_version(entries)
    if end is not None and not alias.exists(end):
        findings.append(AuditFinding(end, "the champion was deleted from the registry; run: kftrain models rollback"))
    return findings


def _audit_version(alias: ChampionAlias, version: ModelVersion, contents: bool) -> list[str]:
    problems = []
    try:
        reference = lineage.read_reference(alias.uri, version)
        if differing := lineage.find_differing_tags(alias.uri, version):
            names = ", ".join(differing)
            problems.append(f"tags were changed and differ from its reference.json, which counts: {names}")
        alias.trust.require_place(reference.export_uri)
        require_export(reference.export_uri, reference.export_digest, contents=contents)
    except MlflowError:
        raise
    except KftrainError as error:
        if error.retryable:  # storage is away, which is no finding
            raise
        problems.append(error.line)
    return problems
