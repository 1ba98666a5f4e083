"""All calls to MLflow.

Small functions over `MlflowClient`: nothing uses the process-wide active run, everything takes the URI.
Each function that writes may be repeated after a lost response; MLflow repeats requests itself, so what makes something
is called by `session.create_and_find`. Every failure is a TrackingError, see `session`.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kftrain.errors import TrackingError
from kftrain.tracking import endpoint, session
from kftrain.tracking.base import Point
from kftrain.tracking.session import StoredModel

MAX_VALUE_LENGTH = 6000
"""MLflow's limit for the value of a parameter; tags may be longer."""

_MAX_METRICS_PER_CALL = 1000
_MAX_PARAMS_PER_CALL = 100
_MAX_DATASET_DIGEST_LENGTH = 36


@dataclass(frozen=True)
class RunRecord:
    """What is recorded of a run. `latest`: metric name -> the point of its highest step."""

    experiment_id: str
    status: str
    params: dict[str, str]
    tags: dict[str, str]
    latest: dict[str, Point]
    dataset_name: str = ""
    """Of the dataset that was recorded first; empty: none."""
    start_time_ms: int = 0


@dataclass(frozen=True)
class RegisteredModel:
    """A registered model. `aliases`: alias -> version."""

    aliases: dict[str, int]
    tags: dict[str, str]


@dataclass(frozen=True)
class LoggedModel:
    """What a version was made of."""

    model_id: str
    artifact_uri: str
    tags: dict[str, str]


@dataclass(frozen=True)
class ModelVersion:
    """A version of a registered model. `source` and `run_id` never change, unlike tags and description."""

    name: str
    version: int
    source: str
    run_id: str
    tags: dict[str, str]


def require_installed() -> None:
    """Raises TrackingError where MLflow is missing; it is not imported."""
    if importlib.util.find_spec("mlflow") is None:
        raise TrackingError("MLflow is missing", fix="pip install 'kftrain[mlflow]'")


def ping(uri: str) -> None:
    """Raises TrackingError unless MLflow answers a request at the URI."""
    with session.connected(uri, "cannot use MLflow") as client:
        client.search_experiments(max_results=1)


# -- runs -----------------------------------------------------------------------------------------------------------


def ensure_experiment(uri: str, name: str, artifact_location: str | None) -> str:
    """Id of the experiment of this name; made with this artifact location if it is not there."""
    for _ in range(2):
        with session.connected(uri, f"cannot create the experiment {name}", session.TAKEN) as client:
            found = client.get_experiment_by_name(name)
            return str(found.experiment_id if found else client.create_experiment(name, artifact_location))
    raise TrackingError("the experiment cannot be found nor created", where=endpoint.redacted(uri), value=name)


def find_run(uri: str, experiment_id: str, tag: str, value: str) -> str | None:
    """Id of the oldest run that has the tag; None where there is none.

    Of several with one start, which a repeated request has made, those are deleted in which nothing was recorded.
    """
    with session.connected(uri, "cannot search runs") as client:
        query = f"tags.`{tag}` = '{_quotable(value)}'"
        found = client.search_runs([experiment_id], query, order_by=["attributes.start_time ASC"])
        twins = [run for run in found if run.info.start_time == found[0].info.start_time]
        twins.sort(key=lambda run: not run.data.params)
        for twin in [run for run in twins[1:] if not run.data.params]:
            client.delete_run(twin.info.run_id)
        return str(twins[0].info.run_id) if twins else None


def search_running(uri: str, tag: str, value: str) -> dict[str, dict[str, str]]:
    """Runs of all experiments that have the tag and are shown as RUNNING, id -> tags; a thousand of them at most."""
    with session.connected(uri, "cannot search runs") as client:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        query = f"attributes.status = 'RUNNING' and tags.`{tag}` = '{_quotable(value)}'"
        return {str(run.info.run_id): dict(run.data.tags) for run in client.search_runs(experiments, query)}


def create_run(uri: str, experiment_id: str, name: str, tags: Mapping[str, str]) -> str:
    """Id of a new run."""
    with session.connected(uri, "cannot create a run") as client:
        return str(client.create_run(experiment_id, run_name=name, tags=dict(tags)).info.run_id)


def read_run(uri: str, run_id: str) -> RunRecord:
    """What is recorded of a run."""
    with session.connected(uri, f"cannot read run {run_id}") as client:
        return _record(client.get_run(run_id))


def tagged_runs(uri: str, tag: str) -> dict[str, RunRecord]:
    """All runs of all experiments that have the tag, by id."""
    found: dict[str, RunRecord] = {}
    with session.connected(uri, "cannot search runs") as client:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        token: str | None = None
        while True:
            page = client.search_runs(experiments, f"tags.`{tag}` LIKE '%'", page_token=token)
            found.update((str(run.info.run_id), _record(run)) for run in page)
            token = page.token
            if not token:
                return found


def log_points(
    uri: str, run_id: str, points: Sequence[Point], model_id: str | None = None, dataset: tuple[str, str] = ("", "")
) -> None:
    """Records metrics, of a LoggedModel too if one is given, on a dataset (name, digest) if they are of one.

    A point that is there already stays as it is.
    """
    name, digest = dataset[0] or None, dataset[1][:_MAX_DATASET_DIGEST_LENGTH] or None
    metric = session.mlflow().entities.Metric
    with session.connected(uri, "cannot log metrics") as client:
        for start in range(0, len(points), _MAX_METRICS_PER_CALL):
            part = points[start : start + _MAX_METRICS_PER_CALL]
            metrics = [metric(p.key, p.value, p.timestamp_ms, p.step, model_id, name, digest) for p in part]
            client.log_batch(run_id, metrics=metrics)


def log_params(uri: str, run_id: str, params: Mapping[str, str]) -> None:
    """Records parameters; none may be there already, since MLflow never changes one."""
    param = session.mlflow().entities.Param
    entities = [param(key, value[:MAX_VALUE_LENGTH]) for key, value in params.items()]
    with session.connected(uri, "cannot log parameters") as client:
        for start in range(0, len(entities), _MAX_PARAMS_PER_CALL):
            client.log_batch(run_id, params=entities[start : start + _MAX_PARAMS_PER_CALL])


def set_tags(uri: str, run_id: str, tags: Mapping[str, str]) -> None:
    """Sets tags of a run."""
    tag = session.mlflow().entities.RunTag
    with session.connected(uri, "cannot set tags") as client:
        client.log_batch(run_id, tags=[tag(key, value[:MAX_VALUE_LENGTH]) for key, value in tags.items()])


def set_status(uri: str, run_id: str, status: str) -> None:
    """Sets the status of a run: RUNNING opens it again, another ends it now."""
    with session.connected(uri, f"cannot set the status of run {run_id}") as client:
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
    """Records a dataset as what the run was trained and is evaluated on.

    `profile`: counts by name. `fields`: name -> type.
    """
    entities = session.mlflow().entities
    dataset = entities.Dataset(
        name=name,
        digest=digest[:_MAX_DATASET_DIGEST_LENGTH],
        source_type=source_uri.split("://", 1)[0] if "://" in source_uri else "local",
        source=json.dumps({"uri": endpoint.redacted(source_uri)}),
        profile=json.dumps(dict(profile)) if profile else None,
        schema=json.dumps({"fields": dict(fields)}) if fields else None,
    )
    with session.connected(uri, "cannot log the dataset") as client:
        tags = [entities.InputTag("mlflow.data.context", "training, evaluation")]
        client.log_inputs(run_id, datasets=[entities.DatasetInput(dataset=dataset, tags=tags)])


def write_text(uri: str, run_id: str, text: str, artifact_name: str) -> None:
    """Stores a text as an artifact of the run; an older one of this name is replaced."""
    with session.connected(uri, f"cannot store {artifact_name}") as client:
        client.log_text(run_id, text, artifact_name)


# -- models ---------------------------------------------------------------------------------------------------------


def ensure_registered_model(uri: str, name: str, tags: Mapping[str, str], description: str = "") -> None:
    """Makes the registered model of this name, with these tags, if it is not there; one that is stays as it is."""
    with session.connected(uri, f"cannot create the registered model {name}", session.TAKEN) as client:
        client.create_registered_model(name, tags=dict(tags), description=description or None)


def get_registered_model(uri: str, name: str) -> RegisteredModel | None:
    """The registered model of this name; None where there is none."""
    with session.connected(uri, f"cannot read the registered model {name}", session.ABSENT) as client:
        found = client.get_registered_model(name)
        return RegisteredModel({alias: int(v) for alias, v in found.aliases.items()}, dict(found.tags))
    return None


def set_registered_model_tag(uri: str, name: str, key: str, value: str) -> None:
    """Sets a tag of a registered model. Last writer wins."""
    with session.connected(uri, f"cannot tag the registered model {name}") as client:
        session.upsert(client.set_registered_model_tag, name, key, value)


def find_logged_model(uri: str, experiment_id: str, tag: str, value: str) -> str | None:
    """Id of a complete LoggedModel that has the tag, or None; beside it those of its run that are not are deleted."""
    with session.connected(uri, "cannot search models") as client:
        found = client.search_logged_models([experiment_id], f"tags.`{tag}` = '{_quotable(value)}'")
        ready = [model for model in found if model.status == "READY"]
        for each in [model for model in found if ready and model.status == "PENDING"]:
            if each.source_run_id == ready[0].source_run_id:
                client.delete_logged_model(each.model_id)
        return str(ready[0].model_id) if ready else None


def create_logged_model(
    uri: str,
    run_id: str,
    name: str,
    tags: Mapping[str, str],
    params: Mapping[str, str],
    *,
    loader_module: str,
    data: str,
    stored: StoredModel,
) -> str:
    """Id of a new LoggedModel of a run with the files of `stored`, of which `loader_module` gets the one named `data`.

    Nothing is pickled. It becomes READY only when its files are there.
    """
    with session.connected(uri, f"cannot store the model {name}") as client, tempfile.TemporaryDirectory() as folder:
        experiment_id = client.get_run(run_id).info.experiment_id
        known = {key: value[:MAX_VALUE_LENGTH] for key, value in params.items()}
        model = client.create_logged_model(
            experiment_id, name=name, source_run_id=run_id, tags=dict(tags), params=known
        )
        session.write_model(Path(folder), run_id, model.model_id, loader_module, data, stored)
        client.log_model_artifacts(model.model_id, folder)
        client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)


def ensure_output(uri: str, run_id: str, model_id: str, step: int) -> None:
    """Shows a LoggedModel as what a run has made; MLflow fails a second time, which may be its own repetition."""
    with session.connected(uri, f"cannot link the model {model_id}") as client:
        try:
            if model_id not in _outputs(client, run_id):
                client.log_outputs(run_id, [session.mlflow().entities.LoggedModelOutput(model_id, step)])
        except session.mlflow().MlflowException:
            if model_id not in _outputs(client, run_id):
                raise


def get_logged_model(uri: str, model_id: str) -> LoggedModel | None:
    """A LoggedModel; None where there is none."""
    with session.connected(uri, f"cannot read the model {model_id}", session.ABSENT) as client:
        found = client.get_logged_model(model_id)
        return LoggedModel(str(found.model_id), str(found.artifact_location), dict(found.tags))
    return None


def read_model_file(uri: str, model: LoggedModel, name: str) -> str | None:
    """The text of a file of a LoggedModel; None where it has no such file."""
    with session.connected(uri, f"cannot read {name} of the model {model.model_id}"):
        return session.read_artifact(uri, model.artifact_uri.rstrip("/"), name)


def set_logged_model_tags(uri: str, model_id: str, tags: Mapping[str, str]) -> None:
    """Sets tags of a LoggedModel."""
    with session.connected(uri, f"cannot tag the model {model_id}") as client:
        client.set_logged_model_tags(model_id, dict(tags))


def create_version(
    uri: str, name: str, model_id: str, run_id: str, tags: Mapping[str, str], description: str = ""
) -> int:
    """Number of a new version of a registered model, made of a LoggedModel."""
    with session.connected(uri, f"cannot create a version of {name}") as client, session.as_default_uri(uri):
        made = client.create_model_version(
            name,
            f"models:/{model_id}",
            run_id=run_id,
            tags=dict(tags),
            description=description or None,
            await_creation_for=0,
            model_id=model_id,
        )
        return int(made.version)


def delete_version(uri: str, name: str, version: int) -> None:
    """Deletes a version, if it is there."""
    with session.connected(uri, f"cannot delete version {version} of {name}", session.ABSENT) as client:
        client.delete_model_version(name, str(version))


def get_version(uri: str, name: str, version: int) -> ModelVersion | None:
    """A version; None where there is none."""
    with session.connected(uri, f"cannot read version {version} of {name}", session.ABSENT) as client:
        return _version(client.get_model_version(name, str(version)))
    return None


def search_versions(uri: str, name: str, tag: str = "", value: str = "", run_id: str = "") -> list[ModelVersion]:
    """Versions of a model, all or those with a tag or of an MLflow run, lowest number first."""
    query = f"name = '{_quotable(name)}'" + (f" and tags.`{tag}` = '{_quotable(value)}'" if tag else "")
    query += f" and run_id = '{_quotable(run_id)}'" if run_id else ""
    found: list[ModelVersion] = []
    with session.connected(uri, f"cannot search versions of {name}") as client:
        token: str | None = None
        while True:
            page = client.search_model_versions(query, page_token=token)
            found.extend(_version(entity) for entity in page)
            token = page.token
            if not token:
                return sorted(found, key=lambda version: version.version)


def set_version_tags(uri: str, name: str, version: int, tags: Mapping[str, str]) -> None:
    """Sets tags of a version."""
    with session.connected(uri, f"cannot tag version {version} of {name}") as client:
        for key, value in tags.items():
            session.upsert(client.set_model_version_tag, name, str(version), key, value)


def get_aliases(uri: str, name: str) -> dict[str, int]:
    """Alias -> version; empty where there is no such model."""
    found = get_registered_model(uri, name)
    return found.aliases if found else {}


def set_alias(uri: str, name: str, alias: str, version: int | None) -> None:
    """Points an alias to a version, or takes it away. Last writer wins."""
    with session.connected(uri, f"cannot set the alias {alias} of {name}") as client:
        if version is None:
            client.delete_registered_model_alias(name, alias)
        else:
            session.upsert(client.set_registered_model_alias, name, alias, str(version))


def _record(run: Any) -> RunRecord:
    # The proto is the public view of the latest metrics that carries their steps.
    latest = {m.key: Point(m.key, m.value, m.step, m.timestamp) for m in run.data.to_proto().metrics}
    datasets = run.inputs.dataset_inputs if run.inputs else []
    name = str(datasets[0].dataset.name) if datasets else ""
    info, params, tags = run.info, dict(run.data.params), dict(run.data.tags)
    return RunRecord(info.experiment_id, info.status, params, tags, latest, name, info.start_time or 0)


def _outputs(client: Any, run_id: str) -> list[str]:
    outputs = client.get_run(run_id).outputs
    return [each.model_id for each in outputs.model_outputs] if outputs else []


def _version(entity: Any) -> ModelVersion:
    return ModelVersion(entity.name, int(entity.version), entity.source or "", entity.run_id or "", dict(entity.tags))


def _quotable(value: str) -> str:
    if set(value) & set("'\"`\\"):
        raise TrackingError("a name with quotes cannot be searched for", value=value, fix="use letters and digits")
    return value
