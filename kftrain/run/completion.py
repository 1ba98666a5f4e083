"""What a job is started with, its configuration, and what proves that it is done.

That is COMPLETE.json with the export that it names, or the metrics of all that was to be scored. Launchers ask after a
job has ended, workers before they start: one that is started again at the very end must not wait for peers that are
gone.
"""

from __future__ import annotations

import contextlib
from typing import Literal

from kftrain import config as configuration
from kftrain import storage
from kftrain.config import Config
from kftrain.errors import ConfigError, EvaluationError, LaunchError
from kftrain.run import documents
from kftrain.run.documents import Completion, Evaluation, EvaluationRequest, EvaluationTarget, RunShards
from kftrain.run.paths import RunPaths

JobTask = Literal["train", "evaluate"]
"""What a job does."""

EXPORT_MANIFEST = "manifest.json"
"""The file that is written last into an export."""


def keep_config(paths: RunPaths, config: Config) -> None:
    """Keeps what a job is started for, for workers that are started again.

    Whoever opens the run meanwhile with other launch settings writes a new config.yaml.
    """
    storage.publish(_kept_config(paths, config.digest()), config.to_yaml())


def load_config(paths: RunPaths, digest: str) -> Config:
    """The resolved configuration of a job. Raises ConfigError where the one that it was started for is not there.

    A worker that somebody has started by hand takes the run's config.yaml.
    """
    uri, text = _config_text(paths, digest)
    resolved = configuration.parse(text, where=uri)
    if resolved.digest() != digest:
        raise ConfigError(
            "config.yaml is not the one this job was started for",
            where=uri,
            value=resolved.digest()[:16],
            fix="the job needs the same version of kftrain as its launcher",
        )
    return resolved


def is_complete(task: JobTask, paths: RunPaths, config: Config) -> bool:
    """Whether everything that a job was to produce is there and of this very job."""
    try:
        if task == "train":
            read_completion(paths, config)
        else:
            read_evaluations(paths, documents.read(EvaluationRequest, paths.evaluation_request, EvaluationError))
    except (LaunchError, EvaluationError):
        return False
    return True


def read_completion(paths: RunPaths, config: Config) -> Completion:
    """The verified completion of a training.

    Raises LaunchError where it is missing or of another training, or where what it names is gone.
    """
    completion = documents.read(Completion, paths.complete, LaunchError)
    if completion.step != config.train.steps or completion.training_digest != _training_digest(paths, config):
        raise LaunchError(
            "COMPLETE.json is of another training", where=paths.complete, value=completion.step, fix="start a new run"
        )
    if not has_export(completion):
        raise LaunchError("the export of this run is gone", where=completion.export_uri, fix="train the run again")
    return completion


def has_export(completion: Completion) -> bool:
    """Whether the trained model is there; without it a run has to export once more."""
    return is_export(completion.export_uri)


def is_export(uri: str) -> bool:
    """Whether a whole export is there: its manifest, and every file of it with its size. Only the manifest is read."""
    try:
        files = storage.read_json(storage.join(uri, EXPORT_MANIFEST))["files"]
        return bool(files) and all(
            storage.size_bytes(storage.join(uri, name)) == entry["bytes"] for name, entry in files.items()
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_evaluations(paths: RunPaths, request: EvaluationRequest) -> list[Evaluation]:
    """The evaluations of all targets but one that cannot be loaded, in order.

    Raises EvaluationError where one is missing or of something else.
    """
    return [_read_evaluation(target, request.evaluation_digest) for target in documents.to_be_scored(paths, request)]


def metrics_uri(target: EvaluationTarget) -> str:
    """Where a target's evaluation lies."""
    return storage.join(target.output_uri, "metrics.json")


def _kept_config(paths: RunPaths, digest: str) -> str:
    return storage.join(paths.uri, "configs", f"{digest[:16]}.yaml")


def _config_text(paths: RunPaths, digest: str) -> tuple[str, str]:
    """Where a job's configuration lies, and what it says."""
    for uri in (_kept_config(paths, digest), paths.config):
        with contextlib.suppress(FileNotFoundError):
            return uri, storage.read_text(uri)
    raise ConfigError("not a run: it has no config.yaml", where=paths.uri, fix="check the run's URI")


def _read_evaluation(target: EvaluationTarget, evaluation_digest: str) -> Evaluation:
    evaluation = documents.read(Evaluation, metrics_uri(target), EvaluationError)
    if (evaluation.evaluation_digest, evaluation.export_digest) != (evaluation_digest, target.export_digest):
        raise EvaluationError(
            "metrics.json is of another evaluation", where=target.output_uri, fix="delete it and evaluate again"
        )
    return evaluation


def _training_digest(paths: RunPaths, config: Config) -> str:
    return config.training_digest(documents.read(RunShards, paths.shards, LaunchError).dataset_digest)
