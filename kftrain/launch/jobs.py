"""Jobs from start to proof: attempts within the restart budget, then the completion file, verified.

An exit code of 0 proves nothing; the completion file does. A retryable code leads to another attempt as long as
attempts make progress (`launch.max_restarts_without_progress`); a permanent one, or a request to stop, ends the job
with the error that its first failing process left behind.
"""

from __future__ import annotations

from kftrain import attempts, contracts, storage
from kftrain.config import Config
from kftrain.contracts import Completion, Evaluation, EvaluationRequest, EvaluationTarget, RunPaths
from kftrain.errors import FIRST_RETRYABLE_CODE, EvaluationError, KftrainError, LaunchError, error_from_dict
from kftrain.launch.base import Launcher, build_launcher
from kftrain.launch.spec import JobSpec, evaluate_job, train_job
from kftrain.progress import to_log


def run_training(paths: RunPaths, config: Config, mlflow_run_id: str = "") -> Completion:
    """Trains a run to its end; returns the verified completion. Raises the error of the attempt that was the last."""
    spec = train_job(paths, config, mlflow_run_id)
    _run_to_end(spec, paths, config, build_launcher(config))
    completion = contracts.read(Completion, paths.complete, LaunchError)
    if completion.step != config.train.steps or completion.training_digest != _training_digest(paths, config):
        raise LaunchError(
            "COMPLETE.json is of another training", where=paths.complete, value=completion.step, fix="start a new run"
        )
    return completion


def run_evaluation(
    paths: RunPaths, config: Config, evaluation_digest: str, targets: list[EvaluationTarget]
) -> list[Evaluation]:
    """Scores exports; returns their evaluations in order. Those that have metrics already are not scored again."""
    documents = [storage.join(target.output_uri, "metrics.json") for target in targets]
    missing = [target for target, uri in zip(targets, documents, strict=True) if not storage.exists(uri)]
    if missing:
        request = EvaluationRequest(evaluation_digest=evaluation_digest, targets=missing)
        storage.publish_json(paths.evaluation_request, request.to_dict())
        spec = evaluate_job(paths, config, storage.join(missing[-1].output_uri, "metrics.json"))
        _run_to_end(spec, paths, config, build_launcher(config))
    evaluations = [contracts.read(Evaluation, uri, EvaluationError) for uri in documents]
    for evaluation, target in zip(evaluations, targets, strict=True):
        if (evaluation.evaluation_digest, evaluation.export_digest) != (evaluation_digest, target.export_digest):
            raise EvaluationError(
                "metrics.json is of another evaluation", where=target.output_uri, fix="delete it and evaluate again"
            )
    return evaluations


def _run_to_end(spec: JobSpec, paths: RunPaths, config: Config, launcher: Launcher) -> None:
    failures_in_a_row = 0
    while True:
        storage.remove(paths.error)
        commits_before = attempts.last_start_step(paths)
        code = launcher.run(spec)
        if code == 0:
            return
        error = _error_of(spec, paths, code)
        failures_in_a_row = failures_in_a_row + 1 if attempts.last_start_step(paths) == commits_before else 1
        if launcher.interrupted or code < FIRST_RETRYABLE_CODE:
            raise error
        if failures_in_a_row > config.launch.max_restarts_without_progress:
            raise LaunchError(
                f"the {spec.task} job failed {failures_in_a_row} times without a new checkpoint, at last: {error.line}",
                where=spec.run_uri,
                fix="mend the cause and resume the run",
            )
        to_log(f"attempt failed, trying again from the last checkpoint: {error.line}")


def _error_of(spec: JobSpec, paths: RunPaths, code: int) -> KftrainError:
    document = storage.read_json_if_exists(paths.error)
    if document is None:
        return LaunchError(f"the {spec.task} job ended with exit code {code} and left no error", where=spec.run_uri)
    return error_from_dict(document)


def _training_digest(paths: RunPaths, config: Config) -> str:
    return config.training_digest(storage.read_json(paths.shards)["dataset_digest"])
