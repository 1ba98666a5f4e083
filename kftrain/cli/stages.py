"""`kftrain shard | train | evaluate | register | gate`: one stage at a time, without Kubeflow.

Progress goes to stderr; the last line on stdout is the stage's summary as JSON, with `run_uri` for the next stage.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import click

from kftrain import config as configuration
from kftrain.cli.options import config_options, override_option, rehash_option
from kftrain.client.console import Display, echo, open_display, show_output
from kftrain.core import storage
from kftrain.core.progress import ERROR_LINE, Progress
from kftrain.stages import resolve
from kftrain.stages.outcome import Outcome

dry_run_option = click.option("--dry-run", is_flag=True, help="Print the job that would be started, and start none.")


@click.command("shard")
@config_options
@rehash_option
@click.option("--run", "run_id", metavar="NAME", default="", help="Id of the run; an existing one is opened again.")
def shard_command(config_file: tuple[str, ...], overrides: tuple[str, ...], run_id: str) -> None:
    """Start a run: check everything cheap, write the dataset's shards."""
    from kftrain.stages.shard import shard

    config = resolve.anchor_paths(configuration.load(config_file, overrides), ".")
    chosen = resolve.require_run_id(run_id or new_run_id(config.run.name))
    _run(lambda progress: shard(config, chosen, progress=progress))


@click.command("train")
@click.argument("run_uri")
@dry_run_option
def train_command(run_uri: str, dry_run: bool) -> None:
    """Train the model of a run, from its last checkpoint if it has one."""
    from kftrain.stages.train import train

    _run_job("train", train, storage.absolute(run_uri), dry_run)


@click.command("evaluate")
@click.argument("run_uri")
@dry_run_option
def evaluate_command(run_uri: str, dry_run: bool) -> None:
    """Measure the trained model of a run, and the champion on the same data."""
    from kftrain.stages.evaluate import evaluate

    _run_job("evaluate", evaluate, storage.absolute(run_uri), dry_run)


@click.command("register")
@click.argument("run_uri")
def register_command(run_uri: str) -> None:
    """Register the model of a run and promote it by policy."""
    from kftrain.stages.register import register

    _run(lambda progress: register(storage.absolute(run_uri), progress))


@click.command("gate")
@click.argument("run_uri")
@override_option
def gate_command(run_uri: str, overrides: tuple[str, ...]) -> None:
    """Decide again whether a run's registered model becomes champion, e.g. with --set registry.promotion=auto."""
    from kftrain.stages.register import gate

    _run(lambda progress: gate(storage.absolute(run_uri), overrides, progress))


def new_run_id(name: str) -> str:
    """Make an id that nobody else has: the name, the time, and four random digits."""
    return f"{name}-{time.strftime('%Y%m%d%H%M%S')}-{secrets.token_hex(2)}"


def _run_job(task: str, stage: Callable[[str, Progress], Outcome], run_uri: str, dry_run: bool) -> None:
    from kftrain.stages.dry_run import describe_job_of_run

    if dry_run:
        echo(describe_job_of_run(run_uri, task), nl=False)
    else:
        _run(lambda progress: stage(run_uri, progress))


def _run(stage: Callable[[Progress], Outcome]) -> None:
    with open_display() as display, _show_workers(display):
        outcome = stage(lambda line: _show(display, line))
    echo(json.dumps(outcome.summary))


@contextlib.contextmanager
def _show_workers(display: Display) -> Iterator[None]:
    """Show in the block what a job's processes write to stdout: steps move the bar, other lines of ours stay.

    They inherit the descriptor, so it is the descriptor that is redirected.
    """
    reading, writing = os.pipe()
    stdout = os.dup(1)
    os.dup2(writing, 1)
    os.close(writing)

    def show_all() -> None:
        with open(reading, errors="replace") as stream:
            for line in stream:
                show_output(display, line)

    reader = threading.Thread(target=show_all, daemon=True, name="worker-output")
    reader.start()
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        reader.join()


def _show(display: Display, line: str) -> None:
    """Show a stage's line; errors are printed by whoever ends the program, once."""
    if not line.startswith(ERROR_LINE):
        display.line(line)
