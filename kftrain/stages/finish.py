"""The exit handler: runs after every pipeline run, cleans up after it, and explains a failure.

It knows only what the pipeline was called with, because an exit handler gets no other task's outputs. It never fails
because the run did: its own failure would hide the other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kftrain import launch, report, storage
from kftrain.config import Config
from kftrain.errors import FailureClass, FencedError, KftrainError, LaunchError, RetryableError
from kftrain.launch.backends import POD_BACKENDS
from kftrain.progress import Progress, to_log
from kftrain.run.advice import Situation
from kftrain.run.best_effort import REPORT_SECONDS, best_effort, retryable
from kftrain.run.config import is_opened, read_config
from kftrain.run.error import ErrorDocument, of_stage, read_error
from kftrain.run.paths import RunPaths
from kftrain.stages import firing, parameters, resolve, tracked
from kftrain.stages.outcome import Outcome

SUCCESS_STATES = ("COMPLETE", "SUCCEEDED")
"""How the other steps ended well, in the words of Kubeflow's backend and of its local runner."""

FAILURE_REPORT = "failure.html"

UNREAD = f"launch: {{backend: {POD_BACKENDS[0]}}}"
"""What is known of a run to go on with that cannot be read: its jobs are pods, of some kind, since `kftrain run` would
have given the configuration."""


def finish(
    text: str,
    storage_root: str,
    resume_run: str,
    job_id: str,
    state: str,
    progress: Progress = to_log,
    values: Mapping[str, Any] | None = None,
) -> Outcome:
    """Cleans up after a pipeline run that ended in `state`, and writes the failure report if it failed.

    `text` and `values` are the pipeline's `config` and `config_json`.
    """
    knobs: resolve.Knobs = {"storage_root": storage_root}
    try:
        try:
            with retryable("the run's folder cannot be read", resume_run or storage_root):
                config, paths = _opened(text, knobs, resume_run, job_id, values)
        except RetryableError as error:
            progress(f"warning: {error.line}")
            given = "" if parameters.is_uri(text) else text.strip()
            config, paths = _named(given or UNREAD, knobs, resume_run, job_id, values)
    except KftrainError as error:  # the first step has failed with the very same one
        return _failed(of_stage("configure", error), run_uri="")
    outcome, failure = _ended(config, paths, resume_run, job_id, state, progress)
    firing.end(config, paths, job_id, failure, progress)
    return outcome


def _ended(
    config: Config, paths: RunPaths, resume_run: str, job_id: str, state: str, progress: Progress
) -> tuple[Outcome, ErrorDocument | None]:
    """What the exit handler returns, and why the run failed, if it did."""
    explained, url = None if state in SUCCESS_STATES else _explained(state), config.tracking.kubeflow_url
    if explained is not None and resume_run and not _is_opened_by(paths, job_id):
        return _failed(explained, paths.uri, url), explained  # going on with it was refused: it stays as it was
    if explained is not None and explained.exit_code == FencedError.exit_code:
        return _failed(explained, paths.uri, url), explained  # job, folder and MLflow run are those of who is at work
    error_document = None
    with best_effort("error.json could not be read"):
        error_document = read_error(paths.error)
    error_document = error_document or explained
    # The report comes before the clean-up: whatever that meets, the reason of the failure is there.
    is_open = None if error_document is None else _leave_report(paths, error_document, url)
    removed, warnings = _clean_up(config, paths, job_id, progress)
    if error_document is None:
        return firing.skipped_outcome(paths, progress) or _succeeded(paths, removed, warnings), None
    if warnings:
        error_document = error_document.model_copy(update={"warnings": warnings})
        _leave_report(paths, error_document, url)
    if is_open:  # a step that was killed has left the MLflow run open
        tracked.mark_failed(paths, config, error_document.to_error(), error_document, progress)
    return _failed(error_document, paths.uri, url, is_there=is_open is not False), error_document


def _is_opened_by(paths: RunPaths, job_id: str) -> bool:
    """See `resolve.is_opened_by`; where that cannot be read, the run is taken for ours."""
    with best_effort("who has opened the run could not be read"):
        return resolve.is_opened_by(paths, job_id)
    return True


def _clean_up(config: Config, paths: RunPaths, job_id: str, progress: Progress) -> tuple[list[str], list[str]]:
    """What was removed, and what went wrong: a failure of its own must not hide the run's."""
    try:
        removed = launch.build_launcher(config).clean(paths, job_id)
    except KftrainError as error:
        progress(f"warning: the clean-up failed: {error.line}")
        return [], [f"The clean-up failed, so a job may still be there: {error.line}"]
    for name in removed:
        progress(f"removed {name}, which was never finished")
    return removed, []


def _leave_report(paths: RunPaths, error: ErrorDocument, url: str) -> bool | None:
    """Writes the failure report into the run's folder; False where nobody has opened that, None where it is unknown."""
    is_open = None
    with best_effort("the failure report could not be written", REPORT_SECONDS):
        is_open = is_opened(paths)
        if is_open:
            storage.publish(storage.join(paths.uri, FAILURE_REPORT), _failed(error, paths.uri, url).html)
    return is_open


def _opened(
    text: str, knobs: resolve.Knobs, resume_run: str, job_id: str, values: Mapping[str, Any] | None
) -> tuple[Config, RunPaths]:
    """The run as the first step has opened it, with the knobs of the pipeline run. Raises ConfigError."""
    config, paths = _named(text, knobs, resume_run, job_id, values)
    return (read_config(paths) if is_opened(paths) else config), paths


def _named(
    text: str, knobs: resolve.Knobs, resume_run: str, job_id: str, values: Mapping[str, Any] | None
) -> tuple[Config, RunPaths]:
    """The run as the pipeline was called, out of its folder only where no configuration was given."""
    config, resumed = resolve.resolve_run(text, knobs, resume_run, values=values)
    return config, RunPaths.of(config.run.storage_root, resolve.make_run_id(resumed, job_id, config.run.name))


def _succeeded(paths: RunPaths, removed: list[str], warnings: list[str]) -> Outcome:
    summary: dict[str, Any] = {"result": "the run succeeded", "run_uri": paths.uri, "report_uri": paths.report}
    found = {"removed": removed, "warnings": warnings}
    return Outcome(
        run_uri=paths.uri,
        summary={**summary, **{name: values for name, values in found.items() if values}},
        html=report.finish_html(paths.uri, paths.report, removed, warnings),
        markdown=report.finish_markdown(paths.uri, paths.report, removed, warnings),
    )


def _failed(error: ErrorDocument, run_uri: str, kubeflow_url: str = "", is_there: bool = True) -> Outcome:
    """The outcome of a failure; with a run that is not there nobody can go on."""
    situation = replace(Situation.from_environment(run_uri if is_there else ""), kubeflow_url=kubeflow_url)
    stage = error.stage or "run"
    return Outcome(
        run_uri=run_uri,
        summary={"result": f"{stage} failed: {error.line}", **error.known(), "run_uri": run_uri},
        html=report.failure_html(error, stage, situation),
        markdown=report.failure_markdown(error, stage, situation),
    )


def _explained(state: str) -> ErrorDocument:
    """What the Workflow says of a step that could not: terminated, deleted, out of memory, out of time, or fenced."""
    found = launch.explain_pipeline_run()
    if found is None:
        return of_stage("run", LaunchError(f"a step ended without saying why; Kubeflow calls it {state}"))
    kind = FencedError if found.failure_class is FailureClass.FENCED else LaunchError
    return of_stage("run", kind(found.line)).found_out(found)
