"""Registering: an export becomes a version of a registered model, by reference.

    version "models:/<id>"  ──▶  LoggedModel: MLmodel, reference.json  ──▶  export in the storage root

No tensor goes through the tracking server and nothing is pickled; registering reads JSON. The key is the export's
digest: the same export registered again, after a retry, a lost response or by two processes at once, is the same
version. Of two versions made at the same time the lower stays: versions are numbered in the order of their creation,
so whoever made the higher one sees the lower.
"""

from __future__ import annotations

from dataclasses import dataclass

from kftrain import storage
from kftrain.config import Config
from kftrain.contracts import Completion, Evaluation, RunPaths
from kftrain.errors import EvaluationError
from kftrain.registry.reference import (
    EXPORT_DIGEST_TAG,
    FILE_NAME,
    LOGGED_MODEL_TAG,
    Reference,
    require_export,
)
from kftrain.tracking import client, runs

LOADER_MODULE = "kftrain.registry.pyfunc_loader"


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model, and what it was made of."""

    model_name: str
    version: int
    logged_model_id: str
    mlflow_run_id: str
    export_digest: str


def register(
    config: Config, paths: RunPaths, completion: Completion, evaluation: Evaluation, mlflow_run_id: str
) -> RegisteredVersion:
    """The version of a run's export, made if it is not there, with the evaluation's metrics. May be repeated.

    Raises EvaluationError if the evaluation is of another export, TrackingError if the export is not there or MLflow
    fails.
    """
    require_same_export(completion, evaluation)
    require_export(completion.export_uri, completion.export_digest)
    uri, name = config.tracking.uri, config.model_name
    reference = _reference(paths, completion, evaluation)
    client.ensure_registered_model(uri, name)
    version = _find_or_create(uri, name, mlflow_run_id, reference, paths.run_id, completion.step)
    _update_tags(uri, version, reference.tags())
    model_id = version.tags[LOGGED_MODEL_TAG]
    metrics = {metric: interval.value for metric, interval in evaluation.metrics.items()}
    points = runs.evaluation_points(uri, mlflow_run_id, metrics, completion.step)
    client.log_points(uri, mlflow_run_id, points, model_id)
    return RegisteredVersion(name, version.version, model_id, mlflow_run_id, completion.export_digest)


def require_same_export(completion: Completion, evaluation: Evaluation) -> None:
    """Raises EvaluationError if what was evaluated is not what the training completed with."""
    if evaluation.export_digest != completion.export_digest:
        raise EvaluationError(
            f"the evaluation is of another export than {completion.export_digest[:16]}",
            where=completion.export_uri,
            value=evaluation.export_digest[:16],
            fix="evaluate again",
        )


def _reference(paths: RunPaths, completion: Completion, evaluation: Evaluation) -> Reference:
    return Reference(
        export_uri=completion.export_uri,
        export_digest=completion.export_digest,
        run_uri=paths.uri,
        checkpoint_digest=completion.checkpoint_digest,
        dataset_digest=completion.dataset_digest,
        training_digest=completion.training_digest,
        evaluation_digest=evaluation.evaluation_digest,
    )


def _find_or_create(
    uri: str, name: str, mlflow_run_id: str, reference: Reference, run_id: str, step: int
) -> client.ModelVersion:
    digest = reference.export_digest
    if found := client.search_versions(uri, name, EXPORT_DIGEST_TAG, digest):
        return found[0]
    tags = {**reference.tags(), **runs.code_tags(), runs.RUN_ID_TAG: run_id}
    model_id = _find_or_create_logged_model(uri, name, mlflow_run_id, reference, tags, step)
    made = client.create_version(uri, name, model_id, mlflow_run_id, {**tags, LOGGED_MODEL_TAG: model_id})
    first = client.search_versions(uri, name, EXPORT_DIGEST_TAG, digest)[0]
    if first.version != made:
        client.delete_version(uri, name, made)
    return first


def _find_or_create_logged_model(
    uri: str, name: str, mlflow_run_id: str, reference: Reference, tags: dict[str, str], step: int
) -> str:
    experiment_id = runs.require_run(uri, mlflow_run_id).experiment_id
    found = client.find_logged_model(uri, experiment_id, EXPORT_DIGEST_TAG, reference.export_digest)
    return found or client.create_logged_model(
        uri,
        mlflow_run_id,
        name,
        tags,
        loader_module=LOADER_MODULE,
        data=(FILE_NAME, storage.dump_json(reference.to_dict())),
        step=step,
    )


def _update_tags(uri: str, version: client.ModelVersion, tags: dict[str, str]) -> None:
    changed = {key: value for key, value in tags.items() if version.tags.get(key) != value}
    client.set_version_tags(uri, version.name, version.version, changed)
