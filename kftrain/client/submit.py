"""Submits the pipeline to Kubeflow as a run, and follows the run until it has ended."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from kftrain.client.compile import compile_with
from kftrain.client.console import echo
from kftrain.config import Config
from kftrain.errors import InterruptedByUser, LaunchError, UnavailableError
from kftrain.kubeflow import parameters
from kftrain.kubeflow.client import Pipelines, build_ui_url
from kftrain.kubeflow.submission import SUCCEEDED, RunState, Submission, describe_changes, describe_outcome, read_steps
from kftrain.run.paths import RunPaths
from kftrain.stages import resolve

POLL_SECONDS = 5.0

OUTAGE_SECONDS = 300.0
"""Time in seconds for which the API server may stay away while a run is followed."""


@dataclass(frozen=True)
class SubmittedRun:
    """A run that was started on Kubeflow, and how to wait for its end."""

    id: str
    """Kubeflow's id of the run, a UUID."""
    url: str
    """Page of the run in the UI."""
    run_uri: str
    """Folder of the run, which the run's first step creates."""
    pipelines: Pipelines
    submission: Submission

    def wait(self, timeout_seconds: float | None = None) -> str:
        """Wait until the run has succeeded and return that in words; print each change of a step to stderr meanwhile.

        Raises LaunchError where it failed, or has not ended after `timeout_seconds`, and InterruptedByUser, which
        leaves the run alone.
        """
        steps = read_steps(self.submission.text)
        try:
            run = follow(lambda: self.pipelines.read_run(self.id, steps), self.url, timeout_seconds or float("inf"))
        except KeyboardInterrupt as error:
            end = f"to end it, press Terminate there or POST {self.pipelines.build_terminate_url(self.id)}"
            raise InterruptedByUser(
                "not waiting any more; the run goes on", where=self.url, fix=f"watch it there; {end}"
            ) from error
        if run.state != SUCCEEDED:
            fix = "" if run.canceled else f"see error.json in {self.run_uri}"
            raise LaunchError(describe_outcome(run), where=self.url, fix=fix)
        return describe_outcome(run)


def build_submission(
    config: Config,
    resume_run: str,
    host: str,
    experiment: str,
    run_name: str,
    *,
    steps_image: str | None = None,
    launcher_cpu: str | None = None,
    launcher_memory: str | None = None,
) -> Submission:
    """Compile the pipeline and build what is sent to Kubeflow at `host`; an empty experiment or name has its default.

    Raises ConfigError where the configuration is too large, or for what is no quantity of Kubernetes.
    """
    url = re.sub(r"(?<=://)[^/]*@", "", config.tracking.kubeflow_url or build_ui_url(host))  # without credentials
    sent = config.model_copy(update={"tracking": config.tracking.model_copy(update={"kubeflow_url": url})})
    with compile_with(steps_image, launcher_cpu, launcher_memory):
        from kftrain.pipelines.compile import PIPELINE_NAME, compiled, version_name

        return Submission(
            pipeline=PIPELINE_NAME,
            version=version_name(),
            text=compiled(),
            experiment=experiment or config.experiment,
            run_name=run_name or f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}",
            parameters=parameters.make_parameters(sent, resume_run),
        )


def upload(pipelines: Pipelines, submission: Submission) -> tuple[str, str, bool]:
    """Upload the pipeline unless it is there; return its id, the version's id, and whether it was uploaded now."""
    from kftrain.pipelines.compile import PIPELINE_DESCRIPTION

    pipeline_id = pipelines.ensure_pipeline(submission.pipeline, PIPELINE_DESCRIPTION)
    return pipeline_id, *pipelines.ensure_version(pipeline_id, submission.version, submission.text)


def submit(pipelines: Pipelines, submission: Submission, config: Config, resume_run: str) -> SubmittedRun:
    """Upload the pipeline unless it is there, and start a run of it."""
    pipeline_id, version_id, uploaded = upload(pipelines, submission)
    echo(f"version {submission.version} {'uploaded' if uploaded else 'is there already'}", err=True)
    experiment_id = pipelines.ensure_experiment(submission.experiment)
    run_id = pipelines.start_run(submission, pipeline_id, version_id, experiment_id)
    echo(f"run {submission.run_name} started in experiment {submission.experiment}", err=True)
    folder = resolve.make_run_id(resume_run, run_id, config.run.name)
    run_uri = RunPaths.of(config.run.storage_root, folder).uri
    return SubmittedRun(run_id, pipelines.build_run_url(run_id), run_uri, pipelines, submission)


def follow(read: Callable[[], RunState], url: str, timeout_seconds: float) -> RunState:
    """Read a run until it has ended, and print what changes to stderr; return its final state.

    Raises LaunchError where the run takes longer than `timeout_seconds`, or nobody answers for OUTAGE_SECONDS.
    """
    start = time.monotonic()
    before, silent_since = RunState("PENDING"), None
    while True:
        try:
            now = read()
        except UnavailableError as error:
            if silent_since is None:  # not when it answered last: this machine may have slept since
                silent_since = time.monotonic()
                echo(f"no answer, trying again: {error.what}", err=True)
            if time.monotonic() - silent_since > OUTAGE_SECONDS:
                line = f"no answer for {OUTAGE_SECONDS / 60:g} minutes; the run may go on: {error.what}"
                raise LaunchError(line, where=url, fix="look for it there") from error
        else:
            silent_since = None
            for line in describe_changes(before, now):
                echo(line, err=True)
            if now.ended:
                return now
            before = now
        if time.monotonic() - start > timeout_seconds:
            raise LaunchError(
                f"the run has not ended after {timeout_seconds:g} s; it goes on", where=url, fix="watch it there"
            )
        time.sleep(POLL_SECONDS)
