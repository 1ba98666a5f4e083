"""`kftrain run`: the pipeline that Kubeflow would run, compiled and run on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click

from kftrain import config as configuration
from kftrain.cli import log, runner
from kftrain.cli.child import PipelineProcess
from kftrain.cli.console import Display, display, show_step
from kftrain.cli.options import config_options, echo, resume_option
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import unmarked
from kftrain.errors import InterruptedByUser, StorageError
from kftrain.process import channel
from kftrain.process.channel import Channel
from kftrain.run.advice import Place, Situation
from kftrain.run.best_effort import best_effort
from kftrain.run.error import ErrorDocument, of_stage, read_error
from kftrain.run.paths import RunPaths
from kftrain.stages import dry_run as dry_runs
from kftrain.stages import parameters, preflight, resolve, tracked

ARGUMENTS = "arguments.json"


@click.command("run")
@config_options
@click.option(
    "--workdir", metavar="FOLDER", default=".", help="Relative paths start here; default: the current folder."
)
@resume_option
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
        echo(dry_runs.jobs_of_new_run(config, resume_run), nl=False)
        return 0
    require_installed("kfp")
    kept = (RunPaths.of(config.run.storage_root, resume_run).config,) if resume_run else ()
    return _conclude(*run_here(config, resume_run, folder, started_by(config_file or kept, overrides, workdir)))


def require_installed(module: str) -> None:
    """Raises ModuleNotFoundError, as importing it would: the pipeline's process could not say so any more."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


class Ended(NamedTuple):
    """How the pipeline's process has ended."""

    watched: Watched
    code: int
    """Its exit code."""
    stop_code: int
    """128 and the signal that stopped us; 0: none did."""
    situation: Situation


def run_here(config: Config, resume_run: str, folder: Path, command: str) -> Ended:
    """Runs the pipeline here and shows what it does. Raises ConfigError, DataError and StorageError before it starts.

    Args:
        config: With absolute paths.
        resume_run: Id of the run to go on with; empty starts a new one.
        folder: Where the pipeline runs and its log is written.
        command: What starts such a run anew, for people who read of a failure.
    """
    sources = [each.source for each in config.data.components] or [config.data.source]
    preflight.check_names(config, str(folder), () if resume_run else sources)  # a run that has shards needs none
    run_uri = RunPaths.of(config.run.storage_root, resume_run).uri if resume_run else ""
    with log.opened(folder, config.run.name, _warn) as log_file, _inputs(config, resume_run) as temporary:
        situation = Situation(Place.LAPTOP, run_uri, command, str(log_file.path))
        with display() as shown, channel.opened(temporary) as told:
            watched = Watched(shown, log_file, told)
            process = PipelineProcess(
                runner.OWN_PIPELINE, temporary / ARGUMENTS, temporary / "root", folder, situation.to_environment()
            )
            code = process.follow(watched.on_line)
            watched.listen()
    if process.killed:
        _after_kill(watched, config)
    return Ended(watched, code, process.stop_code, situation)


def started_by(config_file: tuple[str, ...], overrides: tuple[str, ...], workdir: str) -> str:
    """The command line that starts such a run anew."""
    elsewhere = [] if workdir == "." else ["--workdir", workdir]
    configured = [f"--config={name}" for name in config_file] + [f"--set={pair}" for pair in overrides]
    return shlex.join(["kftrain", "run", *elsewhere, *configured])


class TextSink(Protocol):
    """Takes text."""

    def write(self, text: str) -> Any:
        """Appends it."""


class Watched:
    """Sorts the pipeline's output: everything to the log, our own lines to the display; what decides is told."""

    def __init__(self, shown: Display, log: TextSink, told: Channel) -> None:
        self._shown = shown
        self._log = log
        self._told = told
        self.run_uri = ""
        self.error: ErrorDocument | None = None
        """The last error that a stage has announced."""

    def on_line(self, raw: str) -> None:
        """Takes one line of output."""
        self._log.write(raw)
        self.listen()
        text = unmarked(raw)
        if text is not None and not show_step(self._shown, text):
            self._shown.line(text)

    def listen(self) -> None:
        """Takes what the stages have told meanwhile."""
        for kind, content in self._told.messages():
            if kind == channel.ERROR:
                self.error = ErrorDocument.received(content)
            else:
                self.run_uri = content
                self._shown.line(f"run {RunPaths(self.run_uri).run_id} in {self.run_uri}")


def _warn(line: str) -> None:
    echo(line, err=True)


@contextlib.contextmanager
def _inputs(config: Config, resume_run: str) -> Iterator[Path]:
    """A folder for what the pipeline hands from step to step, with its arguments. Raises StorageError for no room."""
    with contextlib.ExitStack() as stack:
        try:
            temporary = tempfile.TemporaryDirectory(prefix="kftrain-run-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(temporary))
            (folder / ARGUMENTS).write_text(json.dumps(parameters.to_send(config, resume_run)))
        except OSError as error:
            what = f"temporary files cannot be written: {error.strerror}"
            raise StorageError(what, where=tempfile.gettempdir(), fix="make room, or set TMPDIR") from error
        yield folder


def resolved(config_file: tuple[str, ...], overrides: tuple[str, ...], folder: Path, resume: str) -> tuple[Config, str]:
    """The configuration with absolute paths, and the id of the run to resume; empty for a new one.

    A run that is resumed without --config keeps the configuration that it has.
    """
    keep = not config_file
    first = resolve.of_place(overrides) if resume and keep else overrides
    return placed(configuration.load(config_file, first), overrides, folder, resume, keep)


def placed(config: Config, overrides: Sequence[str], folder: Path, resume: str, keep: bool) -> tuple[Config, str]:
    """The same of a configuration that was read already; `keep`: a run that is resumed keeps its own."""
    config = resolve.anchored(config, folder)
    if not resume:
        return config, ""
    here = storage.absolute(resume)  # what a shell completes starts in the current folder
    is_here = "/" in resume and storage.is_local(here) and storage.exists(RunPaths(here).config)
    return resolve.resumed(config, overrides, here if is_here else resume, folder, keep=keep)


def _after_kill(watched: Watched, config: Config) -> None:
    """Says and records what the pipeline could not any more, because a second signal has killed it."""
    killed = InterruptedByUser("killed by a second signal")
    watched.error = watched.error or ErrorDocument.of(killed, stage="the pipeline")
    if not watched.run_uri:
        return
    if config.launch.is_remote:
        _warn(f"a job may still be on the cluster: kftrain cancel {watched.run_uri}")
        return
    paths, document = RunPaths(watched.run_uri), of_stage("run", killed)
    with best_effort("error.json could not be written"):
        storage.publish_json(paths.error, document.to_dict())
    tracked.mark_failed(paths, config, killed, document, _warn)


def _conclude(watched: Watched, code: int, stop_code: int, situation: Situation) -> int:
    """Prints the summary; returns 0, or what the failed stage says, or what stopped us."""
    from kftrain.cli import summary

    if code == 0:
        echo("\n".join(summary.success_lines(watched.run_uri)))
        return 0
    situation = dataclasses.replace(situation, run_uri=watched.run_uri or situation.run_uri)
    error = error_of(watched, stop_code, situation.log)
    code = stop_code or error.exit_code
    echo("\n".join(summary.failure_lines(error, situation)), err=True)
    echo(f"kftrain: error: {error.line}", err=True)
    sys.exit(code)


def error_of(watched: Watched, stop_code: int, log_path: str) -> ErrorDocument:
    """Why the pipeline failed: what a stage announced, or what the workers of one that could not have left behind."""
    if watched.error:
        return watched.error
    found = read_error(RunPaths(watched.run_uri).error) if watched.run_uri else None
    if found:
        return found
    if stop_code:
        return ErrorDocument.of(InterruptedByUser("interrupted"))
    return ErrorDocument(line=f"the pipeline ended without saying why; see {log_path}")
