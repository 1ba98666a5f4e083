"""The reference set: a second dataset, always the same, on which champion and challenger are measured as well."""

from __future__ import annotations

from collections.abc import Sequence

from kftrain.config import Config
from kftrain.core import storage
from kftrain.data.shards.manifest import read_manifest
from kftrain.errors import EvaluationError
from kftrain.evaluate.identity import evaluation_digest
from kftrain.run import documents
from kftrain.run.completion import build_metrics_uri
from kftrain.run.documents import Completion, Evaluation, EvaluationTarget, ReferenceSet, RunShards
from kftrain.run.paths import RunPaths
from kftrain.tasks.run_dataset import find_manifest, require_usable


def write_reference_set(paths: RunPaths, config: Config, own_digest: str) -> ReferenceSet | None:
    """Write into the run's folder which dataset the reference set is now, for the gate, and return it.

    None if none is configured, or if it is the run's own dataset. Raises DataError if it is missing.
    """
    reference = _read_reference_set(config) if config.evaluate.reference else None
    if reference is None or reference.evaluation_digest == own_digest:
        storage.remove(paths.reference_set)
        return None
    storage.publish_json(paths.reference_set, reference.to_dict())
    return reference


def make_targets(
    config: Config, reference: ReferenceSet | None, measured: Sequence[EvaluationTarget]
) -> list[EvaluationTarget]:
    """Return the same exports as targets on the reference set.

    Raises DataError if some are not evaluated yet and the data is gone: before a job is started for it.
    """
    if reference is None:
        return []
    moved = [_move_target(reference, target) for target in measured]
    if not all(storage.exists(build_metrics_uri(target)) for target in moved):
        shards = RunShards(manifest_uri=reference.manifest_uri, dataset_digest=reference.dataset_digest)
        require_usable(shards, read_manifest(reference.manifest_uri), config)
    return moved


def read_own_evaluation(paths: RunPaths, completion: Completion) -> Evaluation | None:
    """Read the evaluation of a run's own export on its reference set; None if it has none. Raises EvaluationError."""
    if not storage.exists(paths.reference_set):
        return None
    reference = documents.read(ReferenceSet, paths.reference_set, EvaluationError)
    folder = paths.evaluation(completion.checkpoint_digest, reference.evaluation_digest)
    return documents.read(Evaluation, storage.join(folder, "metrics.json"), EvaluationError)


def is_missing(paths: RunPaths, config: Config, own_digest: str) -> bool:
    """Return True if the gate needs figures on a reference set that the run was not measured on.

    Raises DataError as `write_reference_set` does.
    """
    if storage.exists(paths.reference_set):
        return False
    if config.evaluate.reference:
        return _read_reference_set(config).evaluation_digest != own_digest
    return config.registry.reference_margin is not None


def _read_reference_set(config: Config) -> ReferenceSet:
    uri = find_manifest(config.evaluate.reference)
    manifest = read_manifest(uri)
    return ReferenceSet(
        manifest_uri=uri,
        dataset_digest=manifest.dataset_digest,
        evaluation_digest=evaluation_digest(config, manifest.dataset_digest),
    )


def _move_target(reference: ReferenceSet, target: EvaluationTarget) -> EvaluationTarget:
    """Return the target on the reference set; its figures go beside those of the same export on the run's data."""
    beside = target.output_uri.rstrip("/").rsplit("/", 1)[0]
    return target.model_copy(
        update={
            "manifest_uri": reference.manifest_uri,
            "evaluation_digest": reference.evaluation_digest,
            "output_uri": storage.join(beside, reference.evaluation_digest[:16]),
        }
    )
