"""Connects this process to MLflow; the only module that imports it.

MLflow is imported by the first call, which takes about a second. Every failure is a TrackingError that shows no
credentials.

MLflow's own defaults hold a caller for four minutes when the server refuses (7 retries, each after twice the pause of
the one before), and longer when it is silent (120 s a request). Here a call gives up in well under a minute;
environment variables that a user has set win.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kftrain.core import outages
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
    """The content of a LoggedModel: its files besides `MLmodel`, and the signature that `MLmodel` states."""

    files: Mapping[str, bytes]
    input_example: Mapping[str, Any] = field(default_factory=dict)
    """Column -> its value in one row, as in the files; empty: the model gets no signature."""
    answer_types: Mapping[str, str] = field(default_factory=dict)
    """Column of the answer -> name of MLflow's type; empty: the types are not known."""


@functools.cache
def mlflow() -> Any:
    """Import MLflow, with our defaults for its settings, and return the package.

    Raises TrackingError if it is not installed.
    """
    # Before the import, at which MLflow starts its telemetry unless it is told not to; the others it reads at each use.
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
def _open_client(uri: str) -> Any:
    """Return MLflow's client of a URI, one per URI; makes the tables of an sqlite database if they are missing."""
    endpoint.require_supported(uri)
    path = endpoint.sqlite_path(uri)
    with endpoint.database_lock(uri):
        package = mlflow()
        if path is not None:
            from mlflow.store.db import utils

            utils.MAX_RETRY_COUNT = 4  # its own ten take 100 s
            if not path.exists() or not path.stat().st_size:
                _create_database(path, utils)
        client = package.MlflowClient(tracking_uri=uri, registry_uri=uri)
        if path is not None:
            client.search_registered_models(max_results=1)  # the registry's half of the database is made here
        return client


def _create_database(path: Path, utils: Any) -> None:
    """Make MLflow's tables. They are made elsewhere: its migrations cannot go on where a kill has ended them."""
    folder = path.with_name(f".{path.name}.new")  # a file's journal is removed with it; one that stays is replayed
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    engine = utils.create_sqlalchemy_engine_with_retry(f"sqlite:///{folder / path.name}")
    utils._initialize_tables(engine)
    engine.dispose()
    (folder / path.name).replace(path)
    folder.rmdir()


@contextlib.contextmanager
def connect(uri: str, failure: str, harmless: str = "") -> Iterator[Any]:
    """Yield the client; errors of MLflow, or of the driver of its artifacts, inside the block become MlflowError.

    `harmless`: MLflow's code of an error that is swallowed: it ends the block, and the caller goes on behind it.
    """
    expected = (mlflow().MlflowException, OSError, ImportError, *_list_database_errors())
    try:
        yield _open_client(uri)
    except KftrainError:
        raise
    except Exception as error:  # drivers of artifact stores raise what they like; bugs pass
        if not (isinstance(error, expected) or outages.is_from_driver(error)):
            raise
        if harmless and getattr(error, "error_code", "") == harmless:
            return
        message = endpoint.redact(str(error)).partition("\n")[0][:500]
        # Not chained: the cause may show credentials that are part of the URI.
        raise MlflowError(
            f"{failure}: {message}", where=f"MLflow at {endpoint.redact(uri)}", fix=_suggest_fix(message)
        ) from None


def _list_database_errors() -> tuple[type[Exception], ...]:
    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        return ()
    return (SQLAlchemyError,)


def _suggest_fix(message: str) -> str:
    if re.search("error code 40[13]", message):
        return "check MLFLOW_TRACKING_USERNAME and _PASSWORD or _TOKEN, and the server's --allowed-hosts"
    if "Max retries" in message or "timed out" in message:
        return "start it, or check tracking.uri and the network"
    return ""


def create_and_find(create: Callable[[], object], find: Callable[[], Found | None]) -> Found:
    """Call `create`, whose answer may be lost, then return what `find` finds.

    MLflow repeats requests, so that a lost answer may leave two objects: `find` must choose the same one in every
    process, and remove the others. Raises the error of `create` if nothing is found.
    """
    failure = TrackingError("what was made is not there")
    try:
        create()
    except TrackingError as error:
        failure = error
    result = find()
    if result is None:
        raise failure
    return result


def upsert(call: Callable[..., Any], *arguments: str) -> None:
    """Make a call that inserts or updates a row, a second time if another process inserts the row at the same moment.

    MLflow then fails one of the two on the database's constraint; the repetition finds the row and updates it.
    """
    try:
        call(*arguments)
    except mlflow().MlflowException as error:
        if "constraint" not in str(error).lower():
            raise
        call(*arguments)


@contextlib.contextmanager
def use_as_default_uri(uri: str) -> Iterator[None]:
    """Make the URI the process's default inside the block: the SQL registry looks up LoggedModels there.

    The default is process-wide, so a lock keeps threads apart; a value that the environment variable had is restored.
    Servers need none of this.
    """
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
    """Write a pyfunc model, whose loader gets the file `data` of `stored`, into a folder. Nothing is pickled."""
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
        model.signature = _make_signature(stored)
        model.saved_input_example_info = _EXAMPLE_INFO
    model.save(str(folder / "MLmodel"))


def _make_signature(stored: StoredModel) -> Any:
    """Return MLflow's signature of a model, or None. MLflow refuses inputs that the signature does not allow.

    A model of one text gets a column without a name, so that people may pass a list. Every form of a signature for
    arrays refuses some inputs that people pass, so models of arrays get one of the answer alone.
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
    """Return the text of an artifact; None if it is missing or no text.

    The folder is listed first: a failing download does not tell a missing file from an outage.
    """
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


def require_quotable(value: str) -> str:
    """Return a value that may stand in a filter of MLflow. Raises TrackingError for one with quotes."""
    if set(value) & set("'\"`\\"):
        raise TrackingError("a name with quotes cannot be searched for", value=value, fix="use letters and digits")
    return value
