"""One MLflow run per training, whatever number of attempts it takes.

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
from kftrain.tracking.base import MAX_NAME_LENGTH, Point, metric_name, now_ms

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
    """What a run was trained on."""

    name: str
    digest: str
    uri: str
    """Where its manifest lies."""
    num_samples: Mapping[str, int] = field(default_factory=dict)
    """Split -> samples."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Field of a sample -> its type and shape, `uint16 [256]`."""


def check(uri: str) -> None:
    """Raises TrackingError, within seconds, unless runs can be recorded at the URI.

    Of an sqlite database only what a file must be: it is made and migrated by whoever records first.
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
    """MLflow id of the run of a training: found or made, open, with parameters, tags and dataset.

    Of `further_tags` one that is '' is only set where the run has it. May be repeated. Raises TrackingError.
    """
    uri = config.tracking.uri
    endpoint.require_private_credentials(config.tracking)
    check(uri)
    tags = run_tags(config, run_id, lineage)
    experiment_id = client.ensure_experiment(uri, config.experiment, _artifact_location(uri, config.experiment))
    mlflow_run_id = _find(uri, experiment_id, tags) or session.create_and_find(
        lambda: client.create_run(uri, experiment_id, run_id, tags), lambda: _find(uri, experiment_id, tags)
    )
    record = client.read_run(uri, mlflow_run_id)
    client.set_status(uri, mlflow_run_id, "RUNNING")
    further = {key: value for key, value in (further_tags or {}).items() if value or key in record.tags}
    client.set_tags(uri, mlflow_run_id, {**tags, **further})
    known = parameters(config)
    client.log_params(uri, mlflow_run_id, {k: v for k, v in known.items() if k not in record.params})
    profile = {f"num_{split}_samples": number for split, number in lineage.num_samples.items()}
    client.log_dataset(uri, mlflow_run_id, lineage.name, lineage.digest, lineage.uri, profile, lineage.fields)
    return mlflow_run_id


def _find(uri: str, experiment_id: str, tags: Mapping[str, str]) -> str | None:
    """The MLflow run of a run, unless it is of another training: its parameters can never be changed.

    A run becomes another training only before its first commit, by a mistake that is mended. What was recorded until
    then stays under a tag of its own.
    """
    mlflow_run_id = client.find_run(uri, experiment_id, RUN_ID_TAG, tags[RUN_ID_TAG])
    if mlflow_run_id is None:
        return None
    before = client.read_run(uri, mlflow_run_id).tags.get(TRAINING_DIGEST_TAG)
    if before in (None, tags[TRAINING_DIGEST_TAG]):
        return mlflow_run_id
    client.set_tags(uri, mlflow_run_id, {RUN_ID_TAG: f"{tags[RUN_ID_TAG]}, until it was changed"})
    return None


def status_of(uri: str, mlflow_run_id: str) -> str:
    """Status of a run as MLflow shows it. Raises TrackingError."""
    return client.read_run(uri, mlflow_run_id).status


def finish_run(uri: str, mlflow_run_id: str, status: Status, tags: Mapping[str, str] | None = None) -> None:
    """Ends a run: FINISHED, FAILED or KILLED. One that has ended so keeps its end. Raises TrackingError."""
    if tags:
        client.set_tags(uri, mlflow_run_id, {key: endpoint.redacted(value) for key, value in tags.items()})
    if status_of(uri, mlflow_run_id) != status:
        client.set_status(uri, mlflow_run_id, status)


def running(uri: str, tag: str, value: str) -> dict[str, dict[str, str]]:
    """The runs with this tag that are shown as RUNNING, id -> tags, of all experiments. Raises TrackingError."""
    check(uri)
    return client.search_running(uri, tag, value)


def log_evaluation(uri: str, mlflow_run_id: str, metrics: Mapping[str, float]) -> None:
    """Records the metrics of the finished model as `evaluation/<name>`. May be repeated."""
    client.log_points(uri, mlflow_run_id, evaluation_points(uri, mlflow_run_id, metrics))


def log_missing(uri: str, mlflow_run_id: str, history: Sequence[Mapping[str, float]]) -> None:
    """Records the points of a training curve that the run does not have. May be repeated. Raises TrackingError."""
    latest = client.read_run(uri, mlflow_run_id).latest
    points = missing_points(history, {key: point.step for key, point in latest.items()}, now_ms())
    if points:
        client.log_points(uri, mlflow_run_id, points)


def missing_points(
    history: Sequence[Mapping[str, float]], highest_steps: Mapping[str, int], timestamp_ms: int
) -> list[Point]:
    """The points of a curve beyond the highest step that is recorded of their metric: they are recorded in order."""
    points = []
    for values in history:
        step = int(values["step"])
        for name, value in values.items():
            key = metric_name(name)
            if name != "step" and step > highest_steps.get(key, -1):
                points.append(Point(key, float(value), step, timestamp_ms))
    return points


def log_text(uri: str, mlflow_run_id: str, text: str, artifact_name: str) -> None:
    """Stores a text (a report) as an artifact of the run. Raises TrackingError."""
    client.write_text(uri, mlflow_run_id, text, artifact_name)


def evaluation_points(uri: str, mlflow_run_id: str, metrics: Mapping[str, float]) -> list[Point]:
    """The points of an evaluation; one that the run has already keeps its time, and so is the same point.

    They stand at step 0: of a metric that has no other MLflow draws bars, run beside run, instead of lone dots. Where
    an earlier kftrain recorded some at the last step, new ones stand there: MLflow shows the value of the highest step.
    """
    latest = client.read_run(uri, mlflow_run_id).latest
    points = []
    for name, value in metrics.items():
        key = metric_name(EVALUATION_PREFIX + name)
        known = latest.get(key)
        if known is not None and known.value == value:
            points.append(known)
        else:
            points.append(Point(key, value, known.step if known else 0, now_ms()))
    return points


def run_tags(config: Config, run_id: str, lineage: DatasetLineage) -> dict[str, str]:
    """Tags that say what the run is a training of, and in whose name."""
    tags = {
        RUN_ID_TAG: run_id,
        TRAINING_DIGEST_TAG: config.training_digest(lineage.digest),
        "kftrain.dataset_digest": lineage.digest,
        "kftrain.config_digest": config.digest(),
        **kind_tags(config),
        **code_tags(),
        **source_tags(),
        "mlflow.note.content": _description(config, lineage),
    }
    parent = os.environ.get("MLFLOW_RUN_ID")
    return {**tags, "mlflow.parentRunId": parent} if parent else tags


def kind_tags(config: Config) -> dict[str, str]:
    """What people filter by, on runs, LoggedModels and versions alike."""
    return {"kftrain.task": config.task.kind, "kftrain.model": config.model.kind}


def parameters(config: Config) -> dict[str, str]:
    """The configuration as MLflow's parameters, without what is not set.

    A setting that a later version adds and nobody uses must not stand as a difference between old runs and new ones.
    Without the pods' settings where there are no pods.
    """
    known = {key: value for key, value in flatten(config.to_dict()).items() if value not in UNSET}
    if config.launch.has_pods:
        return known
    return {key: value for key, value in known.items() if not key.startswith("launch.kubernetes")}


def model_parameters(config: Config) -> dict[str, str]:
    """Those that say what the model is and how it was trained: what MLflow's table of models shows."""
    known = parameters(config).items()
    return {k: v for k, v in known if k.partition(".")[0] in MODEL_SECTIONS or k in MODEL_SETTINGS}


def dataset_name(uri: str, mlflow_run_id: str) -> str:
    """Name of the dataset that was recorded with a run; empty where none was."""
    return client.read_run(uri, mlflow_run_id).dataset_name


def code_tags() -> dict[str, str]:
    """Which code runs: KFTRAIN_GIT_COMMIT, or the commit of the folder that a laptop's run works in; KFTRAIN_IMAGE."""
    known = {"kftrain.git_commit": git_commit(), "kftrain.image": os.environ.get("KFTRAIN_IMAGE", "")}
    return {tag: value for tag, value in known.items() if value}


def source_tags() -> dict[str, str]:
    """What MLflow shows as Created by, Source and Git commit."""
    tags = {
        "mlflow.user": _user(),
        "mlflow.source.name": os.environ.get("KFTRAIN_STARTED_BY") or os.environ.get("KFP_POD_NAME") or "kftrain",
        "mlflow.source.type": "JOB" if os.environ.get("KFP_POD_NAME") else "LOCAL",
        "mlflow.source.git.commit": git_commit().removesuffix("-dirty"),
    }
    return {tag: endpoint.redacted(value) for tag, value in tags.items() if value}


def git_commit() -> str:
    """KFTRAIN_GIT_COMMIT; else the commit of the current folder, with `-dirty` where files were changed; else empty."""
    return os.environ.get("KFTRAIN_GIT_COMMIT") or _commit_of(os.getcwd())


@functools.cache
def _commit_of(folder: str) -> str:
    command = ["git", "-C", folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, no commit yet
        return ""
    return answer.stdout.strip()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a pod's user without a name
        return ""


def _description(config: Config, lineage: DatasetLineage) -> str:
    counts = ", ".join(f"{number:,} {split} samples" for split, number in lineage.num_samples.items())
    data = f"{lineage.name}{f' ({counts})' if counts else ''}"
    return f"kftrain: {config.task.kind} with {config.model.kind} on {data}, {config.train.steps:,} steps."


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`{"train": {"steps": 2}}` as `{"train.steps": "2"}`, without credentials."""
    flat: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"[:MAX_NAME_LENGTH]] = endpoint.redacted(str(value))
    return flat


def require_run(uri: str, mlflow_run_id: str) -> client.RunRecord:
    """The record of a run. Raises TrackingError that names the missing step if no run was started."""
    if not mlflow_run_id:
        raise TrackingError("no MLflow run was started", where=endpoint.redacted(uri), fix="run the training first")
    return client.read_run(uri, mlflow_run_id)


def _artifact_location(uri: str, experiment: str) -> str | None:
    """Beside the database, instead of MLflow's default, the current folder. A server decides for itself."""
    path = endpoint.sqlite_path(uri)
    if path is None:
        return None
    return str(path.resolve().parent / "mlruns" / re.sub(r"[^\w.-]", "-", experiment))
