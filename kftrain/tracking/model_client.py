"""Calls to MLflow about models and their versions, under the rules that `client` states for its functions."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kftrain.tracking import session
from kftrain.tracking.session import StoredModel


@dataclass(frozen=True)
class RegisteredModel:
    """A registered model. `aliases`: alias -> version."""

    aliases: dict[str, int]
    tags: dict[str, str]


@dataclass(frozen=True)
class LoggedModel:
    """An MLflow LoggedModel: the files that versions are made of."""

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


def ensure_registered_model(uri: str, name: str, tags: Mapping[str, str], description: str = "") -> None:
    """Create the registered model of this name, with these tags, if it is missing; an existing one stays as it is."""
    with session.connect(uri, f"cannot create the registered model {name}", session.TAKEN) as client:
        client.create_registered_model(name, tags=dict(tags), description=description or None)


def get_registered_model(uri: str, name: str) -> RegisteredModel | None:
    """Return the registered model of this name, or None."""
    with session.connect(uri, f"cannot read the registered model {name}", session.ABSENT) as client:
        model = client.get_registered_model(name)
        return RegisteredModel({alias: int(v) for alias, v in model.aliases.items()}, dict(model.tags))
    return None


def set_registered_model_tag(uri: str, name: str, key: str, value: str) -> None:
    """Set a tag of a registered model. The last writer wins."""
    with session.connect(uri, f"cannot tag the registered model {name}") as client:
        session.upsert(client.set_registered_model_tag, name, key, value)


def find_logged_model(uri: str, experiment_id: str, run_id: str, tag: str, value: str) -> str | None:
    """Return the id of a complete LoggedModel of a run that has the tag, or None.

    Of several the newest counts. Older incomplete ones, which lost answers left behind, are deleted.
    """
    with session.connect(uri, "cannot search models") as client:
        models = client.search_logged_models([experiment_id], f"tags.`{tag}` = '{session.require_quotable(value)}'")
        models = [model for model in models if model.source_run_id == run_id]
        newest = next((place for place, model in enumerate(models) if model.status == "READY"), len(models))
        # MLflow lists the newest first. A newer one stays: the process that makes it finds it once it is complete.
        for older in models[newest + 1 :]:
            if older.status == "PENDING":
                client.delete_logged_model(older.model_id)
        return str(models[newest].model_id) if models[newest:] else None


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
    """Create a LoggedModel of a run with the files of `stored` and return its id. Nothing is pickled.

    `loader_module`: the module that loads the model from the file named `data`. The model becomes READY only after all
    its files are stored.
    """
    with session.connect(uri, f"cannot store the model {name}") as client, tempfile.TemporaryDirectory() as folder:
        experiment_id = client.get_run(run_id).info.experiment_id
        known = {key: value[: session.MAX_VALUE_LENGTH] for key, value in params.items()}
        model = client.create_logged_model(
            experiment_id, name=name, source_run_id=run_id, tags=dict(tags), params=known
        )
        session.write_model(Path(folder), run_id, model.model_id, loader_module, data, stored)
        client.log_model_artifacts(model.model_id, folder)
        client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)


def ensure_output(uri: str, run_id: str, model_id: str, step: int) -> None:
    """Show a LoggedModel as an output of a run. May be repeated.

    MLflow refuses a link that is there, and repeats requests by itself: the refusal may answer its own repetition.
    """
    with session.connect(uri, f"cannot link the model {model_id}") as client:
        try:
            if model_id not in _list_outputs(client, run_id):
                client.log_outputs(run_id, [session.mlflow().entities.LoggedModelOutput(model_id, step)])
        except session.mlflow().MlflowException:
            if model_id not in _list_outputs(client, run_id):
                raise


def get_logged_model(uri: str, model_id: str) -> LoggedModel | None:
    """Return a LoggedModel by its id, or None."""
    with session.connect(uri, f"cannot read the model {model_id}", session.ABSENT) as client:
        model = client.get_logged_model(model_id)
        return LoggedModel(str(model.model_id), str(model.artifact_location), dict(model.tags))
    return None


def read_model_file(uri: str, model: LoggedModel, name: str) -> str | None:
    """Return the text of a file of a LoggedModel; None if it has no such file."""
    with session.connect(uri, f"cannot read {name} of the model {model.model_id}"):
        return session.read_artifact(uri, model.artifact_uri.rstrip("/"), name)


def set_logged_model_tags(uri: str, model_id: str, tags: Mapping[str, str]) -> None:
    """Set tags of a LoggedModel in one request."""
    with session.connect(uri, f"cannot tag the model {model_id}") as client:
        client.set_logged_model_tags(model_id, dict(tags))


def create_version(
    uri: str, name: str, model_id: str, run_id: str, tags: Mapping[str, str], description: str = ""
) -> int:
    """Create a version of a registered model from a LoggedModel and return its number."""
    with session.connect(uri, f"cannot create a version of {name}") as client, session.use_as_default_uri(uri):
        version = client.create_model_version(
            name,
            f"models:/{model_id}",
            run_id=run_id,
            tags=dict(tags),
            description=description or None,
            await_creation_for=0,
            model_id=model_id,
        )
        return int(version.version)


def delete_version(uri: str, name: str, version: int) -> None:
    """Delete a version; nothing happens if there is none."""
    with session.connect(uri, f"cannot delete version {version} of {name}", session.ABSENT) as client:
        client.delete_model_version(name, str(version))


def get_version(uri: str, name: str, version: int) -> ModelVersion | None:
    """Return a version by its number, or None."""
    with session.connect(uri, f"cannot read version {version} of {name}", session.ABSENT) as client:
        return _make_version(client.get_model_version(name, str(version)))
    return None


def search_versions(uri: str, name: str, tag: str = "", value: str = "", run_id: str = "") -> list[ModelVersion]:
    """Return the versions of a model, all or those with a tag or of an MLflow run, lowest number first."""
    query = f"name = '{session.require_quotable(name)}'"
    query += f" and tags.`{tag}` = '{session.require_quotable(value)}'" if tag else ""
    query += f" and run_id = '{session.require_quotable(run_id)}'" if run_id else ""
    versions: list[ModelVersion] = []
    with session.connect(uri, f"cannot search versions of {name}") as client:
        token: str | None = None
        while True:
            page = client.search_model_versions(query, page_token=token)
            versions.extend(_make_version(entity) for entity in page)
            if not (token := page.token):
                return sorted(versions, key=lambda version: version.version)


def set_version_tags(uri: str, name: str, version: int, tags: Mapping[str, str]) -> None:
    """Set tags of a version, one request per tag."""
    with session.connect(uri, f"cannot tag version {version} of {name}") as client:
        for key, value in tags.items():
            session.upsert(client.set_model_version_tag, name, str(version), key, value)


def get_aliases(uri: str, name: str) -> dict[str, int]:
    """Return alias -> version of a registered model; empty if there is no such model."""
    return model.aliases if (model := get_registered_model(uri, name)) else {}


def set_alias(uri: str, name: str, alias: str, version: int | None) -> None:
    """Point an alias to a version, or remove it if `version` is None. The last writer wins."""
    with session.connect(uri, f"cannot set the alias {alias} of {name}") as client:
        if version is None:
            client.delete_registered_model_alias(name, alias)
        else:
            session.upsert(client.set_registered_model_alias, name, alias, str(version))


def _list_outputs(client: Any, run_id: str) -> list[str]:
    outputs = client.get_run(run_id).outputs
    return [output.model_id for output in outputs.model_outputs] if outputs else []


def _make_version(entity: Any) -> ModelVersion:
    return ModelVersion(entity.name, int(entity.version), entity.source or "", entity.run_id or "", dict(entity.tags))
