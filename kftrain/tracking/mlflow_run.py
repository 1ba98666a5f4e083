"""The MLflow run of a training: starts and ends it, and keeps its id in `tracking.json` in the run's folder.

A rank does not wait for MLflow when a training ends, so the end of the curve is filled in from the run's folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

from kftrain import tracking
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress, to_log
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards.manifest import Manifest
from kftrain.errors import InterruptedByUser, KftrainError, OtherJobError, Preempted, TrackingError
from kftrain.run import documents
from kftrain.run.best_effort import best_effort
from kftrain.run.documents import Document, RunShards
from kftrain.run.error import ErrorDocument
from kftrain.run.paths import RunPaths
from kftrain.tracking.runs import DatasetLineage, Status


class Tracked(Document):
    """`tracking.json`: the id of the MLflow run."""

    mlflow_run_id: str


def tracked_uri(paths: RunPaths) -> str:
    """Return the URI of `tracking.json` in a run's folder."""
    return storage.join(paths.uri, "tracking.json")


def read_mlflow_run_id(paths: RunPaths) -> str:
    """Read the MLflow id of a run; empty if nothing was tracked yet."""
    return documents.read(Tracked, tracked_uri(paths)).mlflow_run_id if storage.exists(tracked_uri(paths)) else ""


def start_mlflow_run(
    paths: RunPaths,
    config: Config,
    shards: RunShards,
    manifest: Manifest,
    pipeline_tags: Mapping[str, str],
    progress: Progress = to_log,
) -> str:
    """Open the MLflow run of a run, creating it if there is none, and return its id.

    `pipeline_tags`: tags that say which pipeline run works on it.

    While MLflow is down, a run that has an id goes on with it: its job may have trained for days, and has this very id
    in its specification. Raises TrackingError if MLflow is down and there is no id yet.
    """
    lineage = DatasetLineage(
        name=manifest.source,
        digest=manifest.dataset_digest,
        uri=shards.manifest_uri,
        num_samples={name: split.num_samples for name, split in manifest.splits.items()},
        fields=manifests.describe(manifest)["fields"],
    )
    try:
        mlflow_run_id = tracking.start_run(config, paths.run_id, lineage, pipeline_tags)
    except TrackingError as error:
        known = read_mlflow_run_id(paths)
        if not known:
            raise
        progress(f"warning: going on with MLflow run {known}, which could not be opened: {error.line}")
        return known
    storage.publish_json(tracked_uri(paths), Tracked(mlflow_run_id=mlflow_run_id).to_dict())
    return mlflow_run_id


@contextlib.contextmanager
def restore_status_if_refused(paths: RunPaths, config: Config, progress: Progress) -> Iterator[None]:
    """Restore the MLflow status if the block is refused because another job holds the run.

    Inside the block `start_mlflow_run` has opened the MLflow run. The launcher of the other job may be gone, and then
    nobody else would end a run that is shown as RUNNING.
    """
    known, before = read_mlflow_run_id(paths), ""
    with contextlib.suppress(TrackingError):
        before = tracking.read_status(config.tracking.uri, known) if known else ""
    try:
        yield
    except OtherJobError:
        try:
            if before in ("FAILED", "KILLED"):
                tracking.finish_run(config.tracking.uri, known, cast(Status, before))
        except TrackingError as second:
            progress(f"the MLflow run could not be closed again: {second.line}")
        raise


def log_missing_curve(paths: RunPaths, config: Config, history: list[dict[str, Any]], progress: Progress) -> None:
    """Record the points of a training curve that the MLflow run lacks, if there is one.

    Nothing fails here: if MLflow is down, a warning goes to `progress`.
    """
    mlflow_run_id = read_mlflow_run_id(paths)
    if not mlflow_run_id:
        return
    try:
        tracking.log_missing(config.tracking.uri, mlflow_run_id, history)
    except TrackingError as error:
        progress(f"warning: the end of the training curve is missing in MLflow: {error.line}")


def mark_failed(
    paths: RunPaths, config: Config, error: BaseException, document: ErrorDocument, progress: Progress
) -> None:
    """Close the MLflow run, if there is one, with the reason as tags. Raises nothing if MLflow or storage is down.

    A run that is shown as FINISHED stays so: its training is complete and registered, whatever failed after that.

    `document`: the content of error.json.
    """
    tags = {"kftrain.error": document.line, "kftrain.failure_class": document.failure_class.value}
    mlflow_run_id = ""
    with best_effort("the MLflow run to mark as failed is not known"):
        mlflow_run_id = read_mlflow_run_id(paths)
    try:
        if mlflow_run_id and tracking.read_status(config.tracking.uri, mlflow_run_id) != "FINISHED":
            tracking.finish_run(config.tracking.uri, mlflow_run_id, choose_end_status(error), tags)
    except KftrainError as second:
        progress(f"the MLflow run could not be marked as failed: {second.line}")


def choose_end_status(error: BaseException) -> Status:
    """Return the MLflow status of a run that ended with `error`: KILLED if somebody stopped it, else FAILED."""
    return "KILLED" if isinstance(error, Preempted | InterruptedByUser | KeyboardInterrupt) else "FAILED"
