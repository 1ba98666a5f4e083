"""`kftrain submit`: the pipeline as a run on Kubeflow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kftrain.cli.compile import fix_for_compiling, launcher_options
from kftrain.cli.options import config_options, echo
from kftrain.cli.run import resolved
from kftrain.config import Config
from kftrain.errors import InterruptedByUser, LaunchError
from kftrain.kubeflow.client import TOKEN_ENV, Connection, Pipelines, UnavailableError, ui_url
from kftrain.kubeflow.submission import SUCCEEDED, RunState, Submission, changes, outcome, steps_of
from kftrain.run.paths import RunPaths
from kftrain.stages import parameters, remote, resolve

POLL_SECONDS = 5.0

OUTAGE_SECONDS = 300.0
"""How long the API server may stay away while a run is followed."""


@click.command("submit")
@config_options
@click.option("--host", metavar="URL", envvar="KF_PIPELINES_ENDPOINT", help="Kubeflow Pipelines, its UI or its API.")
@click.option("--namespace", default="", help="Yours, on a multi-user installation.")
@click.option(
    "--existing-token-env",
    metavar="VARIABLE",
    default=TOKEN_ENV,
    show_default=True,
    help="The environment variable with a bearer token, if one is needed.",
)
@click.option(
    "--ca-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="Certificates to trust; default: the public ones.",
)
@click.option("--experiment", default="", help="Of Kubeflow; default: named as that of MLflow.")
@click.option("--name", "run_name", default="", help="What the UI calls the run; default: its name and the time.")
@click.option("--resume", metavar="RUN", default="", help="Go on with a run: its id, or the URI of its folder.")
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
    config = _with_ui(config, connection["host"] or "")
    fix_for_compiling(steps_image, launcher_cpu, launcher_memory)
    submission = _submission(config, resume_run, experiment, run_name)
    if dry_run:
        echo(submission.to_yaml(), nl=False)
        return
    pipelines = Pipelines(Connection(**connection))
    run_id = _submit(pipelines, submission)
    echo(f"{run_id}\n{pipelines.run_url(run_id)}")
    run_uri = RunPaths.of(config.run.storage_root, resolve.make_run_id(resume_run, run_id, config.run.name)).uri
    echo(f"its folder will be {run_uri}", err=True)
    if wait:
        _wait(pipelines, submission, run_id, run_uri, timeout_seconds or float("inf"))


def _with_ui(config: Config, host: str) -> Config:
    """The configuration with the UI's address, without credentials, unless it has one."""
    url = re.sub(r"(?<=://)[^/]*@", "", config.tracking.kubeflow_url or ui_url(host))
    return config.model_copy(update={"tracking": config.tracking.model_copy(update={"kubeflow_url": url})})


def _submission(config: Config, resume_run: str, experiment: str, run_name: str) -> Submission:
    from kftrain.pipelines.compile import PIPELINE_NAME, compiled, version_name

    return Submission(
        pipeline=PIPELINE_NAME,
        version=version_name(),
        text=compiled(),
        experiment=experiment or config.experiment,
        run_name=run_name or f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}",
        parameters=parameters.to_send(config, resume_run),
    )


def _submit(pipelines: Pipelines, submission: Submission) -> str:
    """Uploads what is not there yet and starts the run; returns its id."""
    from kftrain.pipelines.compile import PIPELINE_DESCRIPTION

    pipeline_id = pipelines.ensure_pipeline(submission.pipeline, PIPELINE_DESCRIPTION)
    version_id, uploaded = pipelines.ensure_version(pipeline_id, submission.version, submission.text)
    echo(f"version {submission.version} {'uploaded' if uploaded else 'is there already'}", err=True)
    experiment_id = pipelines.ensure_experiment(submission.experiment)
    run_id = pipelines.start_run(submission, pipeline_id, version_id, experiment_id)
    echo(f"run {submission.run_name} started in experiment {submission.experiment}", err=True)
    return run_id


def _wait(pipelines: Pipelines, submission: Submission, run_id: str, run_uri: str, timeout_seconds: float) -> None:
    """Returns when the run has succeeded. Raises LaunchError, and InterruptedByUser, which leaves the run alone."""
    url, steps = pipelines.run_url(run_id), steps_of(submission.text)
    try:
        run = follow(lambda: pipelines.read_run(run_id, steps), url, timeout_seconds)
    except KeyboardInterrupt as error:
        raise InterruptedByUser(
            "not waiting any more; the run goes on",
            where=url,
            fix=f"watch it there; to end it, press Terminate there or POST {pipelines.terminate_url(run_id)}",
        ) from error
    if run.state != SUCCEEDED:
        raise LaunchError(outcome(run), where=url, fix="" if run.canceled else f"see error.json in {run_uri}")
    echo(outcome(run), err=True)


def follow(read: Callable[[], RunState], url: str, timeout_seconds: float) -> RunState:
    """Reads a run until it has ended, and prints what changes to stderr; returns its final state.

    Raises LaunchError where the run takes longer than `timeout_seconds`, or nobody answers for OUTAGE_SECONDS.
    """
    start = answered = time.monotonic()
    before, silent = RunState("PENDING"), False
    while True:
        try:
            now = read()
        except UnavailableError as error:
            if time.monotonic() - answered > OUTAGE_SECONDS:
                raise _gone(error, url) from error
            if not silent:
                echo(f"no answer, trying again: {error.what}", err=True)
            silent = True
        else:
            answered, silent = time.monotonic(), False
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


def _gone(error: UnavailableError, url: str) -> LaunchError:
    minutes = OUTAGE_SECONDS / 60
    return LaunchError(
        f"no answer for {minutes:g} minutes; the run may go on: {error.what}", where=url, fix="look for it there"
    )
