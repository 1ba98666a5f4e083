"""How this process talks to MLflow; the only module that imports it.

MLflow is imported by the first call, which takes about a second. Every failure is a TrackingError that shows no
credentials.

MLflow's own defaults hold a caller for four minutes when the server is away (7 retries of 120 s). Here a
call gives up in well under a minute; environment variables that a user has set win.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kftrain import outages
from kftrain.errors import KftrainError, MlflowError, TrackingError
from kftrain.tracking import endpoint

_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

ABSENT = "RESOURCE_DOES_NOT_EXIST"
TAKEN = "RESOURCE_ALREADY_EXISTS"

MAX_VALUE_LENGTH = 6000
"""MLflow's limit for the value of a parameter; tags may be longer."""

_EXAMPLE_INFO = {
    "artifact_path": "input_example.json",
    "serving_input_path": "serving_input_example.json",
    "type": "dataframe",
    "pandas_orient": "split",
}

_default_uri_lock = threading.Lock()

Found = TypeVar("Found")


@dataclass(frozen=True)
class StoredModel:
    """What lies in a LoggedModel besides `MLmodel`, and what `MLmodel` says of it."""

    files: Mapping[str, bytes]
    input_example: Mapping[str, Any] = field(default_factory=dict)
    """Column -> its value in one row, as in the files; empty: no signature."""
    answer_types: Mapping[str, str] = field(default_factory=dict)
    """Column of the answer -> name of MLflow's type; empty: not known."""


@functools.cache
def mlflow() -> Any:
    """The package. Raises TrackingError where it is not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow as package
        import mlflow.entities
    except ImportError as error:
        raise TrackingError(f"MLflow is missing ({error})", fix="pip install 'kftrain[mlflow]'") from error
    for noisy in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return package


@functools.lru_cache(maxsize=8)
def _client(uri: str) -> Any:
    endpoint.require_supported(uri)
    with endpoint.database_lock(uri):
        package = mlflow()
        if not endpoint.is_http(uri):
            from mlflow.store.db import utils

            utils.MAX_RETRY_COUNT = 4  # its own ten take 100 s
        client = package.MlflowClient(tracking_uri=uri, registry_uri=uri)
        if not endpoint.is_http(uri):
            client.search_registered_models(max_results=1)  # the registry's half of the database is made here
        return client


@contextlib.contextmanager
def connected(uri: str, failure: str, harmless: str = "") -> Iterator[Any]:
    """Yields the client; what MLflow, or the driver of its artifacts, raises inside the block becomes a MlflowError.

    `harmless`: MLflow's code of an error that ends the block and nothing else.
    """
    expected = (mlflow().MlflowException, OSError, ImportError, *_database_errors())
    try:
        yield _client(uri)
    except KftrainError:
        raise
    except Exception as error:  # drivers of artifact stores raise what they like; bugs pass
        if not (isinstance(error, expected) or outages.is_of_a_driver(error)):
            raise
        if harmless and getattr(error, "error_code", "") == harmless:
            return
        message = endpoint.redacted(str(error)).partition("\n")[0][:500]
        # Not chained: the cause may show credentials that are part of the URI.
        raise MlflowError(
            f"{failure}: {message}", where=f"MLflow at {endpoint.redacted(uri)}", fix=_fix(message)
        ) from None


def _database_errors() -> tuple[type[Exception], ...]:
    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        return ()
    return (SQLAlchemyError,)


def _fix(message: str) -> str:
    if re.search("error code 40[13]", message):
        return "check MLFLOW_TRACKING_USERNAME and _PASSWORD or _TOKEN, and the server's --allowed-hosts"
    if "Max retries" in message or "timed out" in message:
        return "start it, or check tracking.uri and the network"
    return ""


def create_and_find(create: Callable[[], object], find: Callable[[], Found | None]) -> Found:
    """What `find` finds once `create` was called, whose answer may be lost; `find` removes what is there twice.

    Raises what `create` raises where nothing is found.
    """
    lost = TrackingError("what was made is not there")
    try:
        create()
    except TrackingError as error:
        lost = error
    found = find()
    if found is None:
        raise lost
    return found


def upsert(call: Callable[..., Any], *arguments: str) -> None:
    """Makes a call that sets a row; of two that insert it at once MLflow fails one, so that one repeats it."""
    try:
        call(*arguments)
    except mlflow().MlflowException as error:
        if "constraint" not in str(error).lower():
            raise
        call(*arguments)


@contextlib.contextmanager
def as_default_uri(uri: str) -> Iterator[None]:
    """Makes the URI the process's default for a moment: where the SQL registry looks up LoggedModels."""
    if endpoint.is_http(uri):
        yield
        return
    from mlflow.tracking._tracking_service.utils import _use_tracking_uri

    with _default_uri_lock:
        before = os.environ.get("MLFLOW_TRACKING_URI")
        try:
            with _use_tracking_uri(uri):
                yield
        finally:
            if before is not None:
                os.environ["MLFLOW_TRACKING_URI"] = before


def write_model(folder: Path, run_id: str, model_id: str, loader_module: str, data: str, stored: StoredModel) -> None:
    """Writes a pyfunc model, whose loader gets the file `data` of `stored`, into a folder. Nothing is pickled."""
    import mlflow.pyfunc
    from mlflow.models import Model

    for name, content in stored.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    model = Model(run_id=run_id, model_id=model_id)
    environment = ("conda.yaml", "python_env.yaml") if "conda.yaml" in stored.files else (None, None)
    mlflow.pyfunc.add_to_model(
        model, loader_module=loader_module, data=data, conda_env=environment[0], python_env=environment[1]
    )
    if stored.input_example:
        model.signature = _signature(stored)
        model.saved_input_example_info = _EXAMPLE_INFO
    model.save(str(folder / "MLmodel"))


def _signature(stored: StoredModel) -> Any:
    """MLflow refuses what it does not allow: a single text may come in a list, without the name of its column.

    Of arrays every form of a signature refuses some of what people pass, so it says the answer alone. None: nothing.
    """
    import pandas
    from mlflow.models import ModelSignature, infer_signature
    from mlflow.types import ColSpec, DataType, Schema

    answer: list[Any] = [ColSpec(DataType[kind], name) for name, kind in stored.answer_types.items()]
    if any(isinstance(value, list | dict) for value in stored.input_example.values()):
        return ModelSignature(outputs=Schema(answer)) if answer else None
    inputs = infer_signature(pandas.DataFrame({name: [value] for name, value in stored.input_example.items()})).inputs
    if [type(value) for value in stored.input_example.values()] == [str]:
        inputs = Schema([ColSpec(column.type) for column in inputs.inputs])
    return ModelSignature(inputs=inputs, outputs=Schema(answer) if answer else None)


def read_artifact(uri: str, folder_uri: str, name: str) -> str | None:
    """The text of an artifact; None where it is not there: a download does not tell that from an outage."""
    from mlflow.artifacts import download_artifacts, list_artifacts
    from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories as drivers

    scheme = urlsplit(folder_uri).scheme
    if scheme in ("models", "runs") or scheme not in drivers():  # of another model, which may be this one; or nowhere
        return None
    try:
        listed = list_artifacts(artifact_uri=folder_uri, tracking_uri=uri)
        if name not in [Path(info.path).name for info in listed if not info.is_dir]:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = download_artifacts(artifact_uri=f"{folder_uri}/{name}", dst_path=folder, tracking_uri=uri)
            return Path(path).read_text()
    except UnicodeDecodeError:
        return None
    except Exception as error:  # the place is what others have written: what reads it raises anything
        raise mlflow().MlflowException(outages.one_line(error)) from error


def quotable(value: str) -> str:
    """The value of a filter of MLflow. Raises TrackingError for one with quotes."""
    if set(value) & set("'\"`\\"):
        raise TrackingError("a name with quotes cannot be searched for", value=value, fix="use letters and digits")
    return value
