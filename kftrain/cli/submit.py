"""`kftrain submit`: the pipeline as a run on Kubeflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kftrain.cli.compile import launcher_options
from kftrain.cli.options import Command, config_options, resume_option
from kftrain.client.console import echo
from kftrain.client.local_run import load_run
from kftrain.client.submit import build_submission, submit
from kftrain.kubeflow.client import ENDPOINT_ENV, TOKEN_ENV, Connection, Pipelines
from kftrain.stages import preflight


def connection_options(command: Command) -> Command:
    """Add the options that say where Kubeflow Pipelines is, and as whom to talk to it."""
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
    config, resume_run = load_run(config_file, overrides, Path.cwd(), resume)
    preflight.require_remote(config)
    submission = build_submission(
        config,
        resume_run,
        connection["host"] or "",
        experiment,
        run_name,
        steps_image=steps_image,
        launcher_cpu=launcher_cpu,
        launcher_memory=launcher_memory,
    )
    if dry_run:
        echo(submission.to_yaml(), nl=False)
        return
    submitted = submit(Pipelines(Connection(**connection)), submission, config, resume_run)
    echo(f"{submitted.id}\n{submitted.url}")
    echo(f"its folder will be {submitted.run_uri}", err=True)
    if wait:
        echo(submitted.wait(timeout_seconds), err=True)
