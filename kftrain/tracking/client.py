"""Calls to MLflow about runs; those about models and their versions are in `model_client`.

Small functions over `MlflowClient`: nothing uses the process-wide active run, everything takes the URI.
Each function that writes may be repeated after a lost response; MLflow repeats requests itself, so what makes something
is called by `session.create_and_find`. Every failure is a TrackingError, see `session`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kftrain.errors import TrackingError
from kftrain.tracking import endpoint, session
from kftrain.tracking.base import Point

_MAX_METRICS_PER_CALL = 1000
_MAX_PARAMS_PER_CALL = 100
_MAX_DATASET_DIGEST_LENGTH = 36


@dataclass(frozen=True)
class RunRecord:
    """The record of a run in MLflow. `latest`: metric name -> the point of its highest step."""

    experiment_id: str
    status: str
    params: dict[str, str]
    tags: dict[str, str]
    latest: dict[str, Point]
    dataset_name: str = ""
    """Name of the dataset that was recorded first; empty: none."""
    start_time_ms: int = 0


def require_installed() -> None:
    """Raise TrackingError if MLflow is not installed. It is not imported."""
    if importlib.util.find_spec("mlflow") is None:
        raise TrackingError("MLflow is missing", fix="pip install 'kftrain[mlflow]'")


def ping(uri: str) -> None:
    """Raise TrackingError unless MLflow answers a request at the URI."""
    with session.connect(uri, "cannot use MLflow") as client:
        client.search_experiments(max_results=1)


def ensure_experiment(uri: str, name: str, artifact_location: str | None) -> str:
    """Return the id of the experiment of this name; create it with this artifact location if it is missing."""
    for _ in range(2):  # if another process creates it between our two calls (TAKEN), the second round finds it
        with session.connect(uri, f"cannot create the experiment {name}", session.TAKEN) as client:
            experiment = client.get_experiment_by_name(name)
            return str(experiment.experiment_id if experiment else client.create_experiment(name, artifact_location))
    raise TrackingError("the experiment cannot be found nor created", where=endpoint.redact(uri), value=name)


def find_run_id(uri: str, experiment_id: str, tag: str, value: str) -> str | None:
    """Return the id of the oldest run that has the tag, or None.

    A repeated request may have created several runs with the same start; those without parameters are deleted.
    """
    with session.connect(uri, "cannot search runs") as client:
        query = f"tags.`{tag}` = '{session.require_quotable(value)}'"
        runs = client.search_runs([experiment_id], query, order_by=["attributes.start_time ASC"])
        twins = [run for run in runs if run.info.start_time == runs[0].info.start_time]
        twins.sort(key=lambda run: not run.data.params)  # stable: those with parameters come first, and are kept
        for twin in [run for run in twins[1:] if not run.data.params]:
            client.delete_run(twin.info.run_id)
        return str(twins[0].info.run_id) if twins else None


def search_running(uri: str, tag: str, value: str) -> dict[str, dict[str, str]]:
    """Return runs of all experiments that have the tag and are shown as RUNNING, id -> tags; at most a thousand."""
    with session.connect(uri, "cannot search runs") as client:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        query = f"attributes.status = 'RUNNING' and tags.`{tag}` = '{session.require_quotable(value)}'"
        return {str(run.info.run_id): dict(run.data.tags) for run in client.search_runs(experiments, query)}


def create_run(uri: str, experiment_id: str, name: str, tags: Mapping[str, str]) -> str:
    """Create a run and return its id; called through `session.create_and_find`, since the answer may be lost."""
    with session.connect(uri, "cannot create a run") as client:
        return str(client.create_run(experiment_id, run_name=name, tags=dict(tags)).info.run_id)


def read_run(uri: str, run_id: str) -> RunRecord:
    """Read the record of a run."""
    with session.connect(uri, f"cannot read run {run_id}") as client:
        return _make_record(client.get_run(run_id))


def find_tagged_runs(uri: str, tag: str) -> dict[str, RunRecord]:
    """Return the records of all runs that have the tag, in all experiments, by id."""
    records: dict[str, RunRecord] = {}
    with session.connect(uri, "cannot search runs") as client:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        token: str | None = None
        while True:
            page = client.search_runs(experiments, f"tags.`{tag}` LIKE '%'", page_token=token)
            records.update((str(run.info.run_id), _make_record(run)) for run in page)
            token = page.token
            if not token:
                return records


def log_points(
    uri: str, run_id: str, points: Sequence[Point], model_id: str | None = None, dataset: tuple[str, str] = ("", "")
) -> None:
    """Record metrics of a run, and of a LoggedModel if one is given.

    `dataset`: name and digest of the dataset that they were measured on, if any. A point that is there already stays
    as it is.
    """
    name, digest = dataset[0] or None, dataset[1][:_MAX_DATASET_DIGEST_LENGTH] or None
    metric = session.mlflow().entities.Metric
    with session.connect(uri, "cannot log metrics") as client:
        for start in range(0, len(points), _MAX_METRICS_PER_CALL):
            part = points[start : start + _MAX_METRICS_PER_CALL]
            metrics = [metric(p.key, p.value, p.timestamp_ms, p.step, model_id, name, digest) for p in part]
            client.log_batch(run_id, metrics=metrics)


def log_params(uri: str, run_id: str, params: Mapping[str, str]) -> None:
    """Record parameters; none of them may be there already, since MLflow never changes one."""
    param = session.mlflow().entities.Param
    entities = [param(key, value[: session.MAX_VALUE_LENGTH]) for key, value in params.items()]
    with session.connect(uri, "cannot log parameters") as client:
        for start in range(0, len(entities), _MAX_PARAMS_PER_CALL):
            client.log_batch(run_id, params=entities[start : start + _MAX_PARAMS_PER_CALL])


def set_tags(uri: str, run_id: str, tags: Mapping[str, str]) -> None:
    """Set tags of a run in one request; values are cut to MLflow's limit."""
    tag = session.mlflow().entities.RunTag
    with session.connect(uri, "cannot set tags") as client:
        client.log_batch(run_id, tags=[tag(key, value[: session.MAX_VALUE_LENGTH]) for key, value in tags.items()])


def set_status(uri: str, run_id: str, status: str) -> None:
    """Set the status of a run: RUNNING opens it again, any other ends it now."""
    with session.connect(uri, f"cannot set the status of run {run_id}") as client:
        if status == "RUNNING":
            client.update_run(run_id, status=status)
        else:
            client.set_terminated(run_id, status=status)


def log_dataset(
    uri: str,
    run_id: str,
    name: str,
    digest: str,
    source_uri: str,
    profile: Mapping[str, int],
    fields: Mapping[str, str],
) -> None:
    """Record a dataset as the one that the run is trained and evaluated on.

    `profile`: name -> count. `fields`: name -> type.
    """
    entities = session.mlflow().entities
    dataset = entities.Dataset(
        name=name,
        digest=digest[:_MAX_DATASET_DIGEST_LENGTH],
        source_type=source_uri.split("://", 1)[0] if "://" in source_uri else "local",
        source=json.dumps({"uri": endpoint.redact(source_uri)}),
        profile=json.dumps(dict(profile)) if profile else None,
        schema=json.dumps({"fields": dict(fields)}) if fields else None,
    )
    with session.connect(uri, "cannot log the dataset") as client:
        tags = [entities.InputTag("mlflow.data.context", "training, evaluation")]
        client.log_inputs(run_id, datasets=[entities.DatasetInput(dataset=dataset, tags=tags)])


def write_text(uri: str, run_id: str, text: str, artifact_name: str) -> None:
    """Store a text as an artifact of the run; it replaces an older one of this name."""
    with session.connect(uri, f"cannot store {artifact_name}") as client:
        client.log_text(run_id, text, artifact_name)


def _make_record(run: Any) -> RunRecord:
    # The proto is the public view of the latest metrics that carries their steps.
    latest = {m.key: Point(m.key, m.value, m.step, m.timestamp) for m in run.data.to_proto().metrics}
    datasets = run.inputs.dataset_inputs if run.inputs else []
    name = str(datasets[0].dataset.name) if datasets else ""
    info, params, tags = run.info, dict(run.data.params), dict(run.data.tags)
    return RunRecord(info.experiment_id, info.status, params, tags, latest, name, info.start_time or 0)
