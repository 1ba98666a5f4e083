"""The exit handler: runs after every pipeline run, cleans up after it, and explains a failure.

It knows only what the pipeline was called with, because an exit handler gets no other task's outputs. It never fails
because the run did: its own failure would hide the other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kftrain import launch, reports
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress, to_log
from kftrain.errors import FailureClass, FencedError, KftrainError, LaunchError, RetryableError
from kftrain.kubeflow import parameters
from kftrain.launch.backends import POD_BACKENDS
from kftrain.run.advice import Situation
from kftrain.run.best_effort import REPORT_SECONDS, best_effort, retryable
from kftrain.run.config import is_opened, read_config
from kftrain.run.error import ErrorDocument, read_error, summarize_failure
from kftrain.run.paths import RunPaths
from kftrain.stages import firing, resolve
from kftrain.stages.outcome import Outcome
from kftrain.tracking import mlflow_run

SUCCESS_STATES = ("COMPLETE", "SUCCEEDED")
"""States of a pipeline run that ended well, in the words of Kubeflow's backend and of its local runner."""

FAILURE_REPORT = "failure.html"

UNREAD = f"launch: {{backend: {POD_BACKENDS[0]}}}"
"""Configuration assumed for a run to resume whose folder cannot be read: its jobs are pods, of some kind, since
`kftrain run` would have given the configuration."""


def finish(
    text: str,
    storage_root: str,
    resume_run: str,
    job_id: str,
    state: str,
    progress: Progress = to_log,
    values: Mapping[str, Any] | None = None,
) -> Outcome:
    """Clean up after a pipeline run that ended in `state`, and write the failure report if it failed.

    `text` and `values` are the pipeline's `config` and `config_json`.
    """
    knobs: resolve.Knobs = {"storage_root": storage_root}
    try:
        try:
            with retryable("the run's folder cannot be read", resume_run or storage_root):
                config, paths = _resolve(text, knobs, resume_run, job_id, values)
                if is_opened(paths):  # by the first step, with this configuration
                    config = read_config(paths)
        except RetryableError as error:
            progress(f"warning: {error.line}")
            given = "" if parameters.is_uri(text) else text.strip()
            config, paths = _resolve(given or UNREAD, knobs, resume_run, job_id, values)
    except KftrainError as error:  # the first step has failed with the very same one
        return _describe_failure(summarize_failure("configure", error), run_uri="")
    outcome, failure = _end_run(config, paths, resume_run, job_id, state, progress)
    firing.end_firing(config, paths, job_id, failure, progress)
    return outcome


def _end_run(
    config: Config, paths: RunPaths, resume_run: str, job_id: str, state: str, progress: Progress
) -> tuple[Outcome, ErrorDocument | None]:
    """Report and clean up; return the exit handler's outcome, and the error of the run if it failed."""
    explained, url = None if state in SUCCESS_STATES else _explain_state(state), config.tracking.kubeflow_url
    if explained is not None:
        is_refused = bool(resume_run) and not _is_opened_by(paths, job_id)  # to resume: the run stays as it was
        # Job, folder and MLflow run belong to somebody who is at work: nothing is cleaned up.
        if is_refused or explained.exit_code == FencedError.exit_code:
            return _describe_failure(explained, paths.uri, url), explained
    error_document = None
    with best_effort("error.json could not be read"):
        error_document = read_error(paths.error)
    error_document = error_document or explained
    # The report comes before the clean-up: whatever that meets, the reason of the failure is there.
    is_open = None if error_document is None else _leave_report(paths, error_document, url)
    removed, warnings = _clean_up(config, paths, job_id, progress)
    if error_document is None:
        return firing.find_skipped_outcome(paths, progress) or _describe_success(paths, removed, warnings), None
    if warnings:
        error_document = error_document.model_copy(update={"warnings": warnings})
        _leave_report(paths, error_document, url)
    if is_open:  # a step that was killed has left the MLflow run open
        mlflow_run.mark_failed(paths, config, error_document.to_error(), error_document, progress)
    return _describe_failure(error_document, paths.uri, url, is_there=is_open is not False), error_document


def _is_opened_by(paths: RunPaths, job_id: str) -> bool:
    """Return `resolve.is_opened_by`, or True if it cannot be read: an unknown run is taken for ours and cleaned up."""
    with best_effort("who has opened the run could not be read"):
        return resolve.is_opened_by(paths, job_id)
    return True


def _clean_up(config: Config, paths: RunPaths, job_id: str, progress: Progress) -> tuple[list[str], list[str]]:
    """Remove unfinished jobs; return their names, and warnings instead of errors: those would hide the run's error."""
    try:
        removed = launch.build_launcher(config).clean(paths, job_id)
    except KftrainError as error:
        progress(f"warning: the clean-up failed: {error.line}")
        return [], [f"The clean-up failed, so a job may still be there: {error.line}"]
    for name in removed:
        progress(f"removed {name}, which was never finished")
    return removed, []


def _leave_report(paths: RunPaths, error: ErrorDocument, url: str) -> bool | None:
    """Write the failure report into the run's folder if it is opened, and return whether it is; None if unknown."""
    is_open = None
    with best_effort("the failure report could not be written", REPORT_SECONDS):
        is_open = is_opened(paths)
        if is_open:
            storage.publish(storage.join(paths.uri, FAILURE_REPORT), _describe_failure(error, paths.uri, url).html)
    return is_open


def _resolve(
    text: str, knobs: resolve.Knobs, resume_run: str, job_id: str, values: Mapping[str, Any] | None
) -> tuple[Config, RunPaths]:
    """Return the run as the pipeline's parameters name it; its folder is read only if they hold no configuration."""
    config, resumed = resolve.resolve_run(text, knobs, resume_run, values=values)
    return config, RunPaths.of(config.run.storage_root, resolve.make_run_id(resumed, job_id, config.run.name))


def _describe_success(paths: RunPaths, removed: list[str], warnings: list[str]) -> Outcome:
    summary: dict[str, Any] = {"result": "the run succeeded", "run_uri": paths.uri, "report_uri": paths.report}
    lists = {"removed": removed, "warnings": warnings}
    section = reports.describe_success(paths.uri, paths.report, removed, warnings)
    return Outcome(
        run_uri=paths.uri,
        summary={**summary, **{name: values for name, values in lists.items() if values}},
        html=reports.render_section(section, "run"),
        markdown=reports.render_markdown(section),
    )


def _describe_failure(error: ErrorDocument, run_uri: str, kubeflow_url: str = "", is_there: bool = True) -> Outcome:
    """Return the outcome of a failure; its advice names the run to go on with only if the run `is_there`."""
    situation = replace(Situation.from_environment(run_uri if is_there else ""), kubeflow_url=kubeflow_url)
    stage = error.stage or "run"
    section = reports.describe_failure(error, stage, situation)
    return Outcome(
        run_uri=run_uri,
        summary={"result": f"{stage} failed: {error.line}", **error.list_known_fields(), "run_uri": run_uri},
        html=reports.render_section(section, stage),
        markdown=reports.render_markdown(section),
    )


def _explain_state(state: str) -> ErrorDocument:
    """Ask the Workflow why a step failed that could not say it: terminated, deleted, out of memory or time, fenced.

    If the Workflow does not know either, the error names Kubeflow's `state`.
    """
    cause = launch.explain_pipeline_run()
    if cause is None:
        return summarize_failure("run", LaunchError(f"a step ended without saying why; Kubeflow calls it {state}"))
    kind = FencedError if cause.failure_class is FailureClass.FENCED else LaunchError
    return summarize_failure("run", kind(cause.line)).with_findings(cause)
