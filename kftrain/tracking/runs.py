"""Runs in MLflow: a training has one, whatever number of attempts it takes.

The run is found by its tag `kftrain.run_id`, so a launcher that starts again, or whose request was answered
into the void, goes on with the run it made. Where Kubeflow Pipelines injects a run of its own
(MLFLOW_RUN_ID), ours becomes its child; nothing is written into theirs.
"""

from __future__ import annotations

import functools
import getpass
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kftrain.config import Config
from kftrain.errors import TrackingError
from kftrain.tracking import client, endpoint, session
from kftrain.tracking.base import MAX_NAME_LENGTH, Point, clean_metric_name, now_ms

RUN_ID_TAG = "kftrain.run_id"
TRAINING_DIGEST_TAG = "kftrain.training_digest"
GIT_TIMEOUT_SECONDS = 5.0

EVALUATION_PREFIX = "evaluation/"
"""Sets the metrics of a finished model apart from those of training under the same name."""

UNSET = ("", "None", "[]", "{}")

MODEL_SECTIONS = ("task", "model", "precision", "optimizer", "train")
MODEL_SETTINGS = ("data.source", "run.seed")

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class DatasetLineage:
    """The dataset that a run is trained on, as MLflow records it."""

    name: str
    digest: str
    uri: str
    """URI of the dataset's manifest."""
    num_samples: Mapping[str, int] = field(default_factory=dict)
    """Split -> number of its samples."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Field of a sample -> its type and shape, `uint16 [256]`."""


def check(uri: str) -> None:
    """Raise TrackingError, within seconds, unless runs can be recorded at the URI.

    An sqlite database is only checked as a file: the first process that records creates and migrates it.
    """
    endpoint.require_supported(uri)
    path = endpoint.sqlite_path(uri)
    if path is not None:
        client.require_installed()
        endpoint.probe_database(path)
        return
    if endpoint.is_http(uri):
        endpoint.probe(uri)
    client.ping(uri)


def start_run(
    config: Config, run_id: str, lineage: DatasetLineage, further_tags: Mapping[str, str] | None = None
) -> str:
    """Find or create the MLflow run of a training, open it, record parameters, tags and dataset, and return its id.

    A value '' among `further_tags` only replaces one that the run has. May be repeated. Raises TrackingError.
    """
    uri = config.tracking.uri
    endpoint.require_private_credentials(config.tracking)
    check(uri)
    tags = make_run_tags(config, run_id, lineage)
    experiment_id = client.ensure_experiment(uri, config.experiment, _choose_artifact_location(uri, config.experiment))
    mlflow_run_id = _find_run(uri, experiment_id, tags) or session.create_and_find(
        lambda: client.create_run(uri, experiment_id, run_id, tags), lambda: _find_run(uri, experiment_id, tags)
    )
    record = client.read_run(uri, mlflow_run_id)
    client.set_status(uri, mlflow_run_id, "RUNNING")
    further = {key: value for key, value in (further_tags or {}).items() if value or key in record.tags}
    client.set_tags(uri, mlflow_run_id, {**tags, **further})
    params = list_parameters(config)
    client.log_params(uri, mlflow_run_id, {k: v for k, v in params.items() if k not in record.params})
    profile = {f"num_{split}_samples": number for split, number in lineage.num_samples.items()}
    client.log_dataset(uri, mlflow_run_id, lineage.name, lineage.digest, lineage.uri, profile, lineage.fields)
    return mlflow_run_id


def _find_run(uri: str, experiment_id: str, tags: Mapping[str, str]) -> str | None:
    """Return the id of a run's MLflow run; None if there is none, or if it records another training.

    A run becomes another training only before its first commit, when somebody corrects its configuration. MLflow never
    changes parameters, so the old record is put aside under a tag of its own, and a new one is made.
    """
    mlflow_run_id = client.find_run_id(uri, experiment_id, RUN_ID_TAG, tags[RUN_ID_TAG])
    if mlflow_run_id is None:
        return None
    before = client.read_run(uri, mlflow_run_id).tags.get(TRAINING_DIGEST_TAG)
    if before in (None, tags[TRAINING_DIGEST_TAG]):
        return mlflow_run_id
    client.set_tags(uri, mlflow_run_id, {RUN_ID_TAG: f"{tags[RUN_ID_TAG]}, until it was changed"})
    return None


def read_status(uri: str, mlflow_run_id: str) -> str:
    """Return the status of a run as MLflow shows it. Raises TrackingError."""
    return client.read_run(uri, mlflow_run_id).status


def finish_run(uri: str, mlflow_run_id: str, status: Status, tags: Mapping[str, str] | None = None) -> None:
    """End a run as FINISHED, FAILED or KILLED; one that has this status keeps its time of end. Raises TrackingError."""
    if tags:
        client.set_tags(uri, mlflow_run_id, {key: endpoint.redact(value) for key, value in tags.items()})
    if read_status(uri, mlflow_run_id) != status:
        client.set_status(uri, mlflow_run_id, status)


def find_running(uri: str, tag: str, value: str) -> dict[str, dict[str, str]]:
    """Return the runs of all experiments with this tag that are shown as RUNNING, id -> tags. Raises TrackingError."""
    check(uri)
    return client.search_running(uri, tag, value)


def log_evaluation(uri: str, mlflow_run_id: str, metrics: Mapping[str, float]) -> None:
    """Record the metrics of the finished model as `evaluation/<name>`. May be repeated."""
    client.log_points(uri, mlflow_run_id, make_evaluation_points(uri, mlflow_run_id, metrics))


def log_missing(uri: str, mlflow_run_id: str, history: Sequence[Mapping[str, float]]) -> None:
    """Record the points of a training curve that the run lacks. May be repeated. Raises TrackingError."""
    latest = client.read_run(uri, mlflow_run_id).latest
    points = find_missing_points(history, {key: point.step for key, point in latest.items()}, now_ms())
    if points:
        client.log_points(uri, mlflow_run_id, points)


def find_missing_points(
    history: Sequence[Mapping[str, float]], highest_steps: Mapping[str, int], timestamp_ms: int
) -> list[Point]:
    """Return the points of a curve beyond the highest step that is recorded of their metric.

    Points are recorded in order, so all up to that step are there.
    """
    points = []
    for values in history:
        step = int(values["step"])
        for name, value in values.items():
            key = clean_metric_name(name)
            if name != "step" and step > highest_steps.get(key, -1):
                points.append(Point(key, float(value), step, timestamp_ms))
    return points


def log_text(uri: str, mlflow_run_id: str, text: str, artifact_name: str) -> None:
    """Store a text (a report) as an artifact of the run. Raises TrackingError."""
    client.write_text(uri, mlflow_run_id, text, artifact_name)


def make_evaluation_points(uri: str, mlflow_run_id: str, metrics: Mapping[str, float]) -> list[Point]:
    """Make the points of an evaluation; a value that the run has already keeps its time, and so is the same point.

    They stand at step 0: a metric with no other step is drawn by MLflow as bars, run beside run, not as lone dots.
    Where an earlier kftrain recorded them at the last step, new ones stand there, too: MLflow shows the value of the
    highest step.
    """
    latest = client.read_run(uri, mlflow_run_id).latest
    points = []
    for name, value in metrics.items():
        key = clean_metric_name(EVALUATION_PREFIX + name)
        known = latest.get(key)
        if known is not None and known.value == value:
            points.append(known)
        else:
            points.append(Point(key, value, known.step if known else 0, now_ms()))
    return points


def make_run_tags(config: Config, run_id: str, lineage: DatasetLineage) -> dict[str, str]:
    """Return the tags of a run: the training's identity, its code, and who started it."""
    tags = {
        RUN_ID_TAG: run_id,
        TRAINING_DIGEST_TAG: config.training_digest(lineage.digest),
        "kftrain.dataset_digest": lineage.digest,
        "kftrain.config_digest": config.digest(),
        **make_kind_tags(config),
        **make_code_tags(),
        **make_source_tags(),
        "mlflow.note.content": _describe_training(config, lineage),
    }
    parent = os.environ.get("MLFLOW_RUN_ID")
    return {**tags, "mlflow.parentRunId": parent} if parent else tags


def make_kind_tags(config: Config) -> dict[str, str]:
    """Return the tags with the kinds of task and model, by which people filter runs, LoggedModels and versions."""
    return {"kftrain.task": config.task.kind, "kftrain.model": config.model.kind}


def list_parameters(config: Config) -> dict[str, str]:
    """Return the configuration as MLflow's parameters, without settings that are not set.

    A setting that a later version adds and nobody uses must not stand as a difference between old runs and new ones.
    The settings of pods are left out if there are no pods.
    """
    params = {key: value for key, value in flatten(config.to_dict()).items() if value not in UNSET}
    if config.launch.has_pods:
        return params
    return {key: value for key, value in params.items() if not key.startswith("launch.kubernetes")}


def list_model_parameters(config: Config) -> dict[str, str]:
    """Return the parameters of the model and its training alone, for MLflow's table of models."""
    params = list_parameters(config).items()
    return {k: v for k, v in params if k.partition(".")[0] in MODEL_SECTIONS or k in MODEL_SETTINGS}


def read_dataset_name(uri: str, mlflow_run_id: str) -> str:
    """Return the name of the dataset that was recorded with a run; empty if there is none."""
    return client.read_run(uri, mlflow_run_id).dataset_name


def make_code_tags() -> dict[str, str]:
    """Return the tags that name the running code, the commit (`find_git_commit`) and KFTRAIN_IMAGE, as far as known."""
    tags = {"kftrain.git_commit": find_git_commit(), "kftrain.image": os.environ.get("KFTRAIN_IMAGE", "")}
    return {tag: value for tag, value in tags.items() if value}


def make_source_tags() -> dict[str, str]:
    """Return the tags that MLflow shows as Created by, Source and Git commit."""
    tags = {
        "mlflow.user": _get_user(),
        "mlflow.source.name": os.environ.get("KFTRAIN_STARTED_BY") or os.environ.get("KFP_POD_NAME") or "kftrain",
        "mlflow.source.type": "JOB" if os.environ.get("KFP_POD_NAME") else "LOCAL",
        "mlflow.source.git.commit": find_git_commit().removesuffix("-dirty"),
    }
    return {tag: endpoint.redact(value) for tag, value in tags.items() if value}


def find_git_commit() -> str:
    """Return KFTRAIN_GIT_COMMIT, else the commit of the current folder, else ''; `-dirty` marks changed files."""
    return os.environ.get("KFTRAIN_GIT_COMMIT") or _ask_git(os.getcwd())


@functools.cache
def _ask_git(folder: str) -> str:
    command = ["git", "-C", folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, no commit yet
        return ""
    return answer.stdout.strip()


def _get_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a pod's user without a name
        return ""


def _describe_training(config: Config, lineage: DatasetLineage) -> str:
    counts = ", ".join(f"{number:,} {split} samples" for split, number in lineage.num_samples.items())
    data = f"{lineage.name}{f' ({counts})' if counts else ''}"
    return f"kftrain: {config.task.kind} with {config.model.kind} on {data}, {config.train.steps:,} steps."


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Turn `{"train": {"steps": 2}}` into `{"train.steps": "2"}`, without credentials."""
    flat: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"[:MAX_NAME_LENGTH]] = endpoint.redact(str(value))
    return flat


def require_run(uri: str, mlflow_run_id: str) -> client.RunRecord:
    """Read the record of a run. Raises TrackingError, which names the missing step, if no run was started."""
    if not mlflow_run_id:
        raise TrackingError("no MLflow run was started", where=endpoint.redact(uri), fix="run the training first")
    return client.read_run(uri, mlflow_run_id)


def _choose_artifact_location(uri: str, experiment: str) -> str | None:
    """Return a folder beside the database; MLflow would take the current one. None: a server decides for itself."""
    path = endpoint.sqlite_path(uri)
    if path is None:
        return None
    return str(path.resolve().parent / "mlruns" / re.sub(r"[^\w.-]", "-", experiment))
