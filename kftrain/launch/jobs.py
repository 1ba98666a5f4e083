"""Jobs from start to proof: attempts within the restart budget, then the completion file, verified.

An exit code of 0 proves nothing; the completion file does. A retryable code leads to another attempt as long as
attempts make progress (`launch.max_restarts_without_progress`); a permanent one, or a request to stop, ends the job
with the error that its first failing process left behind. Attempts that are used up are permanent, too, unless the last
one failed for storage that is full or away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.errors import (
    FIRST_RETRYABLE_CODE,
    FencedError,
    KftrainError,
    LaunchError,
    Preempted,
    StorageError,
)
from kftrain.launch.base import Launcher, build_launcher
from kftrain.launch.spec import JobSpec, make_job
from kftrain.run import attempts
from kftrain.run.budget import RestartBudget, WorkerEnd, read_standing
from kftrain.run.completion import build_metrics_uri, read_completion, read_evaluations
from kftrain.run.config import keep_job_config
from kftrain.run.documents import (
    SHARES_ENV,
    Completion,
    Evaluation,
    EvaluationRequest,
    EvaluationTarget,
    PartShare,
)
from kftrain.run.error import read_error
from kftrain.run.job_tasks import BANDWIDTH, EVALUATION, JOB_TASKS, SHARDING, TRAINING, read_bandwidth
from kftrain.run.paths import RunPaths


def run_training(paths: RunPaths, config: Config, mlflow_run_id: Callable[[], str] = str) -> Completion:
    """Train a run to its end and return the verified completion. Raises the error of the last attempt.

    `mlflow_run_id` is called while the launcher gets ready.
    """
    with contextlib.closing(build_launcher(config)) as launcher:
        launcher.prepare(make_job(TRAINING, paths, config))
        _run_to_end(make_job(TRAINING, paths, config, mlflow_run_id()), paths, config, launcher)
    return read_completion(paths, config)


def run_evaluation(
    paths: RunPaths,
    config: Config,
    evaluation_digest: str,
    own: EvaluationTarget,
    others: Callable[[], list[EvaluationTarget]] = list,
) -> list[Evaluation]:
    """Score exports and return their evaluations, `own` first; a champion that cannot be loaded is left out.

    Exports that have metrics already are not scored again. `others` is called while the launcher gets ready.
    """
    with contextlib.ExitStack() as stack:
        launcher = None
        if not storage.exists(build_metrics_uri(own)):
            launcher = stack.enter_context(contextlib.closing(build_launcher(config)))
            launcher.prepare(make_job(EVALUATION, paths, config))
        targets = [own, *others()]
        missing = [target for target in targets if not storage.exists(build_metrics_uri(target))]
        if missing:
            launcher = launcher or stack.enter_context(contextlib.closing(build_launcher(config)))
            request = EvaluationRequest(evaluation_digest=evaluation_digest, targets=missing)
            storage.publish_json(paths.evaluation_request, request.to_dict())
            _run_to_end(make_job(EVALUATION, paths, config), paths, config, launcher)
    return read_evaluations(paths, EvaluationRequest(evaluation_digest=evaluation_digest, targets=targets))


def run_sharding(paths: RunPaths, config: Config, shares: Sequence[PartShare]) -> str:
    """Let a job encode shares of a source's parts, a pod each; return the folder of what leads to the parts.

    Raises the error of its last attempt.
    """
    pieces = (piece for share in shares for job in share.jobs for piece in job["pieces"])
    if not all("file" in piece for piece in pieces):  # nobody can tell whether they changed since an earlier job
        storage.remove(paths.encoded_parts)
    config = config.model_copy(update={"data": config.data.model_copy(update={"shard_pods": len(shares)})})
    for rank, share in enumerate(shares):
        storage.publish(paths.share(config.digest(), rank), share.model_dump_json())
    if not SHARDING.is_complete(paths, config):
        spec = make_job(SHARDING, paths, config)
        digests = ",".join(share.digest for share in shares)
        spec = replace(spec, environment={**spec.environment, SHARES_ENV: digests})
        with contextlib.closing(build_launcher(config)) as launcher:
            _run_to_end(spec, paths, config, launcher)
    SHARDING.read_results(paths, config)
    return paths.encoded_parts


def run_bandwidth(paths: RunPaths, config: Config) -> list[dict[str, Any]]:
    """Measure the network between the processes of a job; return the rows. Raises the error of its last attempt."""
    with contextlib.closing(build_launcher(config)) as launcher:
        _run_to_end(make_job(BANDWIDTH, paths, config), paths, config, launcher)
    return read_bandwidth(paths, config)


def _run_to_end(spec: JobSpec, paths: RunPaths, config: Config, launcher: Launcher) -> None:
    """Run attempts of a job until one succeeds, is stopped, fails for good, or the restart budget is spent."""
    keep_job_config(paths, config)
    task = JOB_TASKS[spec.task]
    standing = read_standing(paths, attempts.find_last_attempt(paths), task)
    budget = RestartBudget(
        config.launch.max_restarts_without_progress, step=standing.step, first_attempt=standing.last_attempt
    )
    while True:
        storage.remove(paths.error)  # before the start: whatever lies there afterwards is this attempt's own
        code = launcher.run(spec)
        if code == 0:
            return
        error = _find_error(spec, paths, code)
        if launcher.interrupted or code < FIRST_RETRYABLE_CODE:
            raise error
        budget = budget.advance(read_standing(paths, budget.first_attempt, task), [WorkerEnd(0, code)])
        if budget.is_spent:
            kind = StorageError if isinstance(error, StorageError) else LaunchError
            what = f"the {task.name} job failed {budget.num_failed} times without a new {task.progress}"
            raise kind(
                f"{what}, at last: {error.line}",
                where=spec.run_uri,
                fix=error.fix or "mend the cause and resume the run",
            ).of_class(error.failure_class)
        to_log(f"attempt failed, trying again from the last {task.progress}: {error.line}")


def _find_error(spec: JobSpec, paths: RunPaths, code: int) -> KftrainError:
    """Return the error of a failed attempt: the one in `error.json`, or one that its exit code alone tells."""
    if code == FencedError.exit_code:  # error.json is that of the launch that holds the run
        return FencedError(FencedError.BY_ATTEMPT, where=spec.run_uri)
    document = read_error(paths.error)
    if document is None and code == Preempted.exit_code:  # it came before the worker could say so
        return Preempted("stopped before it had started", where=spec.run_uri)
    if document is None:
        kind = StorageError if code == StorageError.exit_code else LaunchError  # one of ours could not write it
        return kind(f"the {spec.task} job ended with exit code {code} and left no error", where=spec.run_uri)
    return document.to_error()
