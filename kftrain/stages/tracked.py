"""The MLflow run of a training: starts and ends it, and keeps its id in `tracking.json` in the run's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from kftrain import launch, tracking
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
from kftrain.tracking import DatasetLineage


class Tracked(Document):
    """`tracking.json`: the id of the MLflow run."""

    mlflow_run_id: str


def tracked_uri(paths: RunPaths) -> str:
    """Return the URI of `tracking.json`."""
    return storage.join(paths.uri, "tracking.json")


def read(paths: RunPaths) -> str:
    """Read the MLflow id of a run; empty if nothing was tracked yet."""
    return documents.read(Tracked, tracked_uri(paths)).mlflow_run_id if storage.exists(tracked_uri(paths)) else ""


def start(paths: RunPaths, config: Config, shards: RunShards, manifest: Manifest, progress: Progress = to_log) -> str:
    """Open the MLflow run of a run, creating it if there is none, and return its id.

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
        mlflow_run_id = tracking.start_run(config, paths.run_id, lineage, launch.pipeline_tags(config))
    except TrackingError as error:
        known = read(paths)
        if not known:
            raise
        progress(f"warning: going on with MLflow run {known}, which could not be opened: {error.line}")
        return known
    storage.publish_json(tracked_uri(paths), Tracked(mlflow_run_id=mlflow_run_id).to_dict())
    return mlflow_run_id


@contextlib.contextmanager
def restored_if_refused(paths: RunPaths, config: Config, progress: Progress) -> Iterator[None]:
    """Restore the MLflow status if the block, `start` and a launch, is refused because another job holds the run.

    `start` has opened the MLflow run. The launcher of the other job may be gone, and then nobody else would end a run
    that is shown as RUNNING.
    """
    known, before = read(paths), ""
    with contextlib.suppress(TrackingError):
        before = tracking.status_of(config.tracking.uri, known) if known else ""
    try:
        yield
    except OtherJobError:
        try:
            if before in ("FAILED", "KILLED"):
                tracking.finish_run(config.tracking.uri, known, cast(tracking.Status, before))
        except TrackingError as second:
            progress(f"the MLflow run could not be closed again: {second.line}")
        raise


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
        mlflow_run_id = read(paths)
    try:
        if mlflow_run_id and tracking.status_of(config.tracking.uri, mlflow_run_id) != "FINISHED":
            tracking.finish_run(config.tracking.uri, mlflow_run_id, end_status(error), tags)
    except KftrainError as second:
        progress(f"the MLflow run could not be marked as failed: {second.line}")


def end_status(error: BaseException) -> tracking.Status:
    """Return the MLflow status of a run that ended with `error`: KILLED if somebody stopped it, else FAILED."""
    return "KILLED" if isinstance(error, Preempted | InterruptedByUser | KeyboardInterrupt) else "FAILED"
