"""Proof that a job is done, and the reading of it.

A training is done with COMPLETE.json and the export that it names, an evaluation with the metrics of all that was to be
scored. Launchers ask after a job has ended, workers before they start: one that is started again at the very end must
not wait for peers that are gone.
"""

from __future__ import annotations

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import CheckpointError, DataError, EvaluationError, LaunchError, OtherTrainingError
from kftrain.run import documents
from kftrain.run.documents import Completion, Evaluation, EvaluationRequest, EvaluationTarget, RunShards
from kftrain.run.export import is_export
from kftrain.run.paths import RunPaths


def find_completion(paths: RunPaths, config: Config) -> Completion | None:
    """Read the completion of this very training; None where it is not complete, or its export is gone.

    Raises CheckpointError for a damaged one, and OtherTrainingError for one of another training.
    """
    completion = documents.read_if_exists(Completion, paths.complete, CheckpointError)
    if completion is None:
        return None
    dataset_digest = documents.read(RunShards, paths.shards).dataset_digest
    # A choice of the best step may end it early, and a script of the user's decides itself when it is done.
    may_differ = completion.selection is not None or bool(config.train.command)
    ended = completion.num_trained == config.train.steps or may_differ
    if not ended or completion.training_digest != config.training_digest(dataset_digest):
        raise OtherTrainingError(
            "COMPLETE.json is of another training",
            where=paths.complete,
            value=f"{completion.step} steps, {completion.training_digest}",
            fix="start a new run",
        )
    return completion if is_export(completion.export_uri) else None


def read_completion(paths: RunPaths, config: Config) -> Completion:
    """Read the completion that a training job has left. Raises LaunchError where the job is not proved complete."""
    try:
        completion = find_completion(paths, config)
    except (CheckpointError, DataError) as error:
        raise LaunchError(error.what, where=error.where, value=error.value, fix=error.fix) from error
    if completion is not None:
        return completion
    if storage.exists(paths.complete):
        raise LaunchError("the export of this run is gone", where=paths.complete, fix="train the run again")
    raise LaunchError("COMPLETE.json is missing", where=paths.complete, fix="run the stage that writes it first")


def read_evaluations(paths: RunPaths, request: EvaluationRequest) -> list[Evaluation]:
    """Read the evaluations of all targets, in order, without one that could not be loaded.

    Raises EvaluationError where one is missing or of something else.
    """
    return [
        _read_evaluation(target, target.evaluation_digest or request.evaluation_digest)
        for target in documents.list_targets_to_score(paths, request)
    ]


def build_metrics_uri(target: EvaluationTarget) -> str:
    """Return the URI of a target's `metrics.json`."""
    return storage.join(target.output_uri, "metrics.json")


def _read_evaluation(target: EvaluationTarget, evaluation_digest: str) -> Evaluation:
    evaluation = documents.read(Evaluation, build_metrics_uri(target), EvaluationError)
    if (evaluation.evaluation_digest, evaluation.export_digest) != (evaluation_digest, target.export_digest):
        raise EvaluationError(
            "metrics.json is of another evaluation", where=target.output_uri, fix="delete it and evaluate again"
        )
    return evaluation
