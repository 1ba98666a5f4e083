"""`kftrain submit`: the pipeline as a run on Kubeflow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kftrain.cli.compile import compiling_with, launcher_options
from kftrain.cli.options import Command, config_options, echo, resume_option
from kftrain.cli.run import resolved
from kftrain.config import Config
from kftrain.errors import InterruptedByUser, LaunchError, UnavailableError
from kftrain.kubeflow.client import ENDPOINT_ENV, TOKEN_ENV, Connection, Pipelines, ui_url
from kftrain.kubeflow.submission import SUCCEEDED, RunState, Submission, changes, outcome, steps_of
from kftrain.run.paths import RunPaths
from kftrain.stages import parameters, remote, resolve

POLL_SECONDS = 5.0

OUTAGE_SECONDS = 300.0
"""How long the API server may stay away while a run is followed."""


def connection_options(command: Command) -> Command:
    """Where Kubeflow Pipelines is, and as whom to talk to it."""
    for option in (
        click.option(
            "--ca-file",
            metavar="FILE",
            type=click.Path(exists=True, dir_okay=False),
            help="Certificates to trust; default: the public ones.",
        ),
        click.option(
            "--existing-token-env",
            metavar="VARIABLE",
            default=TOKEN_ENV,
            show_default=True,
            help="The environment variable with a bearer token, if one is needed.",
        ),
        click.option("--namespace", default="", help="Yours, on a multi-user installation."),
        click.option("--host", metavar="URL", envvar=ENDPOINT_ENV, help="Kubeflow Pipelines, its UI or its API."),
    ):
        command = option(command)
    return command


@click.command("submit")
@config_options
@connection_options
@click.option("--experiment", default="", help="Of Kubeflow; default: named as that of MLflow.")
@click.option("--name", "run_name", default="", help="What the UI calls the run; default: its name and the time.")
@resume_option
@click.option("--steps-image", help="Image of the steps; default: the one of this version.")
@launcher_options
@click.option("--wait", is_flag=True, help="Follow the run; exit 0 only if it succeeds.")
@click.option("--timeout-seconds", type=click.FloatRange(min=0, min_open=True), help="Give up waiting after this.")
@click.option("--dry-run", is_flag=True, help="Print what would be sent, and send nothing.")
def submit_command(
    config_file: tuple[str, ...],
    overrides: tuple[str, ...],
    experiment: str,
    run_name: str,
    resume: str,
    steps_image: str | None,
    launcher_cpu: str | None,
    launcher_memory: str | None,
    wait: bool,
    timeout_seconds: float | None,
    dry_run: bool,
    **connection: Any,
) -> None:
    """Upload the pipeline to Kubeflow and start a run: its id and its URL go to stdout."""
    if timeout_seconds and not wait:
        raise click.UsageError("--timeout-seconds needs --wait.")
    if not (connection["host"] or dry_run):
        raise click.UsageError("Missing option '--host'.")
    config, resume_run = resolved(config_file, overrides, Path.cwd(), resume)
    remote.require_remote(config)
    with compiling_with(steps_image, launcher_cpu, launcher_memory):
        submission = prepared(config, resume_run, connection["host"] or "", experiment, run_name)
    if dry_run:
        echo(submission.to_yaml(), nl=False)
        return
    submitted = send(Pipelines(Connection(**connection)), submission, config, resume_run)
    echo(f"{submitted.id}\n{submitted.url}")
    echo(f"its folder will be {submitted.run_uri}", err=True)
    if wait:
        echo(submitted.wait(timeout_seconds), err=True)


@dataclass(frozen=True)
class SubmittedRun:
    """A run on Kubeflow."""

    id: str
    """Kubeflow's id of it, a UUID."""
    url: str
    """Its page in the UI."""
    run_uri: str
    """Where its folder is, or will be."""
    pipelines: Pipelines
    submission: Submission

    def wait(self, timeout_seconds: float | None = None) -> str:
        """Returns when the run has succeeded, and in which words; prints each change of a step to stderr meanwhile.

        Raises LaunchError where it failed, or has not ended after `timeout_seconds`, and InterruptedByUser, which
        leaves the run alone.
        """
        steps = steps_of(self.submission.text)
        try:
            run = follow(lambda: self.pipelines.read_run(self.id, steps), self.url, timeout_seconds or float("inf"))
        except KeyboardInterrupt as error:
            end = f"to end it, press Terminate there or POST {self.pipelines.terminate_url(self.id)}"
            raise InterruptedByUser(
                "not waiting any more; the run goes on", where=self.url, fix=f"watch it there; {end}"
            ) from error
        if run.state != SUCCEEDED:
            fix = "" if run.canceled else f"see error.json in {self.run_uri}"
            raise LaunchError(outcome(run), where=self.url, fix=fix)
        return outcome(run)


def send(pipelines: Pipelines, submission: Submission, config: Config, resume_run: str) -> SubmittedRun:
    """Uploads the pipeline unless it is there, and starts a run of it."""
    from kftrain.pipelines.compile import PIPELINE_DESCRIPTION

    pipeline_id = pipelines.ensure_pipeline(submission.pipeline, PIPELINE_DESCRIPTION)
    version_id, uploaded = pipelines.ensure_version(pipeline_id, submission.version, submission.text)
    echo(f"version {submission.version} {'uploaded' if uploaded else 'is there already'}", err=True)
    experiment_id = pipelines.ensure_experiment(submission.experiment)
    run_id = pipelines.start_run(submission, pipeline_id, version_id, experiment_id)
    echo(f"run {submission.run_name} started in experiment {submission.experiment}", err=True)
    folder = resolve.make_run_id(resume_run, run_id, config.run.name)
    run_uri = RunPaths.of(config.run.storage_root, folder).uri
    return SubmittedRun(run_id, pipelines.run_url(run_id), run_uri, pipelines, submission)


def _with_ui(config: Config, host: str) -> Config:
    """The configuration with the UI's address, without credentials, unless it has one."""
    url = re.sub(r"(?<=://)[^/]*@", "", config.tracking.kubeflow_url or ui_url(host))
    return config.model_copy(update={"tracking": config.tracking.model_copy(update={"kubeflow_url": url})})


def prepared(config: Config, resume_run: str, host: str, experiment: str, run_name: str) -> Submission:
    """What is sent to Kubeflow at `host`; an empty experiment or name has its default.

    Raises ConfigError where the configuration is too large.
    """
    from kftrain.pipelines.compile import PIPELINE_NAME, compiled, version_name

    return Submission(
        pipeline=PIPELINE_NAME,
        version=version_name(),
        text=compiled(),
        experiment=experiment or config.experiment,
        run_name=run_name or f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}",
        parameters=parameters.to_send(_with_ui(config, host), resume_run),
    )


def follow(read: Callable[[], RunState], url: str, timeout_seconds: float) -> RunState:
    """Reads a run until it has ended, and prints what changes to stderr; returns its final state.

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
            for line in changes(before, now):
                echo(line, err=True)
            if now.ended:
                return now
            before = now
        if time.monotonic() - start > timeout_seconds:
            raise LaunchError(
                f"the run has not ended after {timeout_seconds:g} s; it goes on", where=url, fix="watch it there"
            )
        time.sleep(POLL_SECONDS)
