"""The reference set: a second dataset, always the same, on which champion and challenger are measured, too."""

from __future__ import annotations

from collections.abc import Sequence

from kftrain import storage
from kftrain.config import Config
from kftrain.data.shards.manifest import read_manifest
from kftrain.errors import EvaluationError
from kftrain.evaluate.identity import evaluation_digest
from kftrain.run import documents
from kftrain.run.completion import metrics_uri
from kftrain.run.documents import Completion, Evaluation, EvaluationTarget, ReferenceSet, RunShards
from kftrain.run.paths import RunPaths
from kftrain.stages.dataset import find_manifest, require_usable


def settle(paths: RunPaths, config: Config, own_digest: str) -> ReferenceSet | None:
    """Which dataset the reference set is now, left for the gate; None where there is none, or it is the run's own.

    Raises DataError where it is not there.
    """
    found = _named(config) if config.evaluate.reference else None
    if found is None or found.evaluation_digest == own_digest:
        storage.remove(paths.reference_set)
        return None
    storage.publish_json(paths.reference_set, found.to_dict())
    return found


def targets(
    config: Config, reference: ReferenceSet | None, measured: Sequence[EvaluationTarget]
) -> list[EvaluationTarget]:
    """The same exports on the reference set. Raises DataError where a job would be started for data that is gone."""
    if reference is None:
        return []
    found = [_on(reference, target) for target in measured]
    if not all(storage.exists(metrics_uri(target)) for target in found):
        shards = RunShards(manifest_uri=reference.manifest_uri, dataset_digest=reference.dataset_digest)
        require_usable(shards, read_manifest(reference.manifest_uri), config)
    return found


def read_own(paths: RunPaths, completion: Completion) -> Evaluation | None:
    """How good a run's own export is on its reference set; None where there is none. Raises EvaluationError."""
    if not storage.exists(paths.reference_set):
        return None
    reference = documents.read(ReferenceSet, paths.reference_set, EvaluationError)
    folder = paths.evaluation(completion.checkpoint_digest, reference.evaluation_digest)
    return documents.read(Evaluation, storage.join(folder, "metrics.json"), EvaluationError)


def is_missing(paths: RunPaths, config: Config, own_digest: str) -> bool:
    """Whether the gate is to look at a reference set that the run was not measured on. Raises DataError as `settle`."""
    if storage.exists(paths.reference_set):
        return False
    if config.evaluate.reference:
        return _named(config).evaluation_digest != own_digest
    return config.registry.reference_margin is not None


def _named(config: Config) -> ReferenceSet:
    uri = find_manifest(config.evaluate.reference)
    manifest = read_manifest(uri)
    return ReferenceSet(
        manifest_uri=uri,
        dataset_digest=manifest.dataset_digest,
        evaluation_digest=evaluation_digest(config, manifest.dataset_digest),
    )


def _on(reference: ReferenceSet, target: EvaluationTarget) -> EvaluationTarget:
    """Its figures lie beside those of the same export on the run's data."""
    beside = target.output_uri.rstrip("/").rsplit("/", 1)[0]
    return target.model_copy(
        update={
            "manifest_uri": reference.manifest_uri,
            "evaluation_digest": reference.evaluation_digest,
            "output_uri": storage.join(beside, reference.evaluation_digest[:16]),
        }
    )
