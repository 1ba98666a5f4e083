"""`kftrain run`: the pipeline that Kubeflow would run, compiled and run on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import click

from kftrain import config as configuration
from kftrain.advice import Place, Situation
from kftrain.cli import runner
from kftrain.cli.child import PipelineProcess
from kftrain.cli.console import Display, display, show_step
from kftrain.cli.options import config_options
from kftrain.config import Config
from kftrain.contracts import RunPaths
from kftrain.errors import BUG_CODE, ConfigError
from kftrain.progress import ERROR_LINE, RUN_LINE, unmarked
from kftrain.stages import dry_run as dry_runs
from kftrain.stages import failure, parameters, resolve


@click.command("run")
@config_options
@click.option(
    "--workdir", metavar="FOLDER", default=".", help="Relative paths start here; default: the current folder."
)
@click.option("--resume", metavar="RUN", default="", help="Go on with a run: its id, or the URI of its folder.")
@click.option("--dry-run", is_flag=True, help="Print the jobs of training and evaluation, and do nothing.")
def run_command(
    config_file: tuple[str, ...], overrides: tuple[str, ...], workdir: str, resume: str, dry_run: bool
) -> int:
    """The whole pipeline on this machine: shard, train, evaluate, register.

    It is the very pipeline that `kftrain compile` writes, run by Kubeflow's own local runner.
    """
    folder = Path(workdir).expanduser().resolve()
    config, resume_run = resolved(config_file, overrides, folder, resume)
    if dry_run:
        click.echo(dry_runs.jobs_of_new_run(config, resume_run), nl=False)
        return 0
    _make(folder, workdir)
    log_path = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{config.run.name}.log"
    log_path.parent.mkdir(exist_ok=True)
    situation = Situation(Place.LAPTOP, started_by=started_by(config_file, overrides, workdir), log=str(log_path))
    os.environ.update(situation.to_environment())
    with tempfile.TemporaryDirectory(prefix="kftrain-run-") as temporary, log_path.open("w", buffering=1) as log:
        arguments = _write_inputs(Path(temporary), config, resume_run)
        with display() as shown:
            watched = Watched(shown, log)
            process = PipelineProcess(runner.OWN_PIPELINE, arguments, Path(temporary) / "root", folder)
            code = process.follow(watched.on_line)
    if process.killed and config.launch.backend != "local" and watched.run_uri:
        click.echo(f"a job may still be on the cluster: kftrain cancel {watched.run_uri}", err=True)
    return _conclude(watched, code, process.stop_code, situation)


def started_by(config_file: tuple[str, ...], overrides: tuple[str, ...], workdir: str) -> str:
    """The command line that starts such a run anew."""
    elsewhere = [] if workdir == "." else ["--workdir", workdir]
    configured = [f"--config={name}" for name in config_file] + [f"--set={pair}" for pair in overrides]
    return shlex.join(["kftrain", "run", *elsewhere, *configured])


class Watched:
    """Sorts the pipeline's output: everything to the log, our own lines to the display, and what they tell to us."""

    def __init__(self, shown: Display, log: TextIO) -> None:
        self._shown, self._log = shown, log
        self.run_uri = ""
        self.error: dict[str, Any] | None = None
        """The last error that a stage has announced."""

    def on_line(self, raw: str) -> None:
        """Takes one line of output."""
        self._log.write(raw)
        text = unmarked(raw)
        if text is None or show_step(self._shown, text):
            return
        if text.startswith(ERROR_LINE):
            self.error = json.loads(text.removeprefix(ERROR_LINE))
        elif text.startswith(RUN_LINE):
            self.run_uri = text.removeprefix(RUN_LINE)
            self._shown.line(f"run {RunPaths(self.run_uri).run_id} in {self.run_uri}")
        else:
            self._shown.line(text)


def _make(folder: Path, workdir: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"not a folder: {error}", where="--workdir", value=workdir) from error


def resolved(config_file: tuple[str, ...], overrides: tuple[str, ...], folder: Path, resume: str) -> tuple[Config, str]:
    """The configuration with absolute paths, and the id of the run to resume; empty for a new one.

    A run that is resumed without --config keeps the configuration that it has.
    """
    config = resolve.anchored(configuration.load(config_file, overrides), folder)
    return resolve.resumed(config, overrides, resume, folder, keep=not config_file) if resume else (config, "")


def _write_inputs(folder: Path, config: Config, resume_run: str) -> Path:
    arguments = folder / "arguments.json"
    arguments.write_text(json.dumps(parameters.to_send(config, resume_run)))
    return arguments


def _conclude(watched: Watched, code: int, stop_code: int, situation: Situation) -> int:
    """Prints the summary; returns 0, or what the failed stage says, or what stopped us."""
    from kftrain.cli import summary

    if code == 0:
        click.echo("\n".join(summary.success_lines(watched.run_uri)))
        return 0
    situation = dataclasses.replace(situation, run_uri=watched.run_uri)
    error = _error(watched, situation.log)
    code = stop_code or int(error.get("exit_code", BUG_CODE))
    click.echo("\n".join(summary.failure_lines(error, situation)), err=True)
    click.echo(f"kftrain: error: {error['line']}", err=True)
    sys.exit(code)


def _error(watched: Watched, log: str) -> dict[str, Any]:
    """Why the pipeline failed: error.json of the run, or what a stage announced before there was one."""
    found = failure.read(RunPaths(watched.run_uri)) if watched.run_uri else None
    return found or watched.error or {"line": f"the pipeline ended without saying why; see {log}"}
