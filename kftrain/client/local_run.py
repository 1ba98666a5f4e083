"""Runs the whole pipeline on this machine: chooses the run, starts the pipeline's process and shows what it does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from kftrain import config as configuration
from kftrain.client.console import Display, echo, open_display, show_output
from kftrain.client.pipeline_process import OWN_PIPELINE, PipelineProcess
from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import ConfigError, InterruptedByUser, StorageError
from kftrain.kubeflow import parameters
from kftrain.process import channel
from kftrain.process.channel import Channel
from kftrain.run.advice import Place, Situation
from kftrain.run.best_effort import best_effort
from kftrain.run.error import ErrorDocument, read_error, summarize_failure
from kftrain.run.paths import RunPaths
from kftrain.stages import preflight, resolve
from kftrain.tracking import mlflow_run

ARGUMENTS = "arguments.json"


@dataclass(frozen=True)
class EndedRun:
    """The end of a pipeline that has run here."""

    run_uri: str
    """Folder of the run; empty where the pipeline failed before there was one."""
    error: ErrorDocument | None
    """The reason why the pipeline failed; None where it has completed."""
    stop_code: int
    """128 and the signal that stopped us; 0: none did."""
    situation: Situation
    """Place and command of its start, for the advice after a failure."""


def load_run(config_file: Sequence[str], overrides: Sequence[str], folder: Path, resume: str) -> tuple[Config, str]:
    """Load the configuration with absolute paths; return it and the id of the run to resume, empty for a new one.

    A run that is resumed without configuration files keeps the configuration that it has.
    """
    keep = not config_file
    first = resolve.select_place_overrides(overrides) if resume and keep else overrides
    return place_run(configuration.load(config_file, first), overrides, folder, resume, keep)


def place_run(config: Config, overrides: Sequence[str], folder: Path, resume: str, keep: bool) -> tuple[Config, str]:
    """Make the paths of a configuration absolute; return it and the id of the run to resume, empty for a new one.

    With `keep` a run that is resumed keeps its own configuration, but for the overrides.
    """
    config = resolve.anchor_paths(config, folder)
    if not resume:
        return config, ""
    here = storage.absolute(resume)  # what a shell completes starts in the current folder
    is_here = "/" in resume and storage.is_local(here) and storage.exists(RunPaths(here).config)
    return resolve.resume_config(config, overrides, here if is_here else resume, folder, keep=keep)


def run_here(config: Config, resume_run: str, folder: Path, command: str) -> EndedRun:
    """Run the pipeline here and show what it does. Raises ConfigError, DataError and StorageError before it starts.

    Args:
        config: With absolute paths.
        resume_run: Id of the run to go on with; empty starts a new one.
        folder: Where the pipeline runs and its log is written.
        command: What starts such a run anew, for people who read of a failure.
    """
    sources = [component.source for component in config.data.components] or [config.data.source]
    preflight.check_names(config, str(folder), () if resume_run else sources)  # a run that has shards needs none
    run_uri = RunPaths.of(config.run.storage_root, resume_run).uri if resume_run else ""
    with open_log(folder, config.run.name, _warn) as log, _write_arguments(config, resume_run) as temporary:
        situation = Situation(Place.LAPTOP, run_uri, command, str(log.path))
        with open_display() as display, channel.open_channel(temporary) as messages:
            output = PipelineOutput(display, log, messages)
            process = PipelineProcess(
                OWN_PIPELINE, temporary / ARGUMENTS, temporary / "root", folder, situation.to_environment()
            )
            code = process.follow(output.take_line)
            output.read_messages()
    if process.killed:
        _record_kill(output, config)
    return output.end(code, process.stop_code, situation)


class PipelineOutput:
    """Sorts the pipeline's output: everything goes to the log, our own lines to the display.

    What decides comes as messages, beside the output: whatever is printed may be a user's.
    """

    def __init__(self, display: Display, log: Log | TextIO, messages: Channel) -> None:
        self._display = display
        self._log = log
        self._messages = messages
        self.run_uri = ""
        self.error: ErrorDocument | None = None
        """The last error that a stage has announced."""

    def take_line(self, raw: str) -> None:
        """Log one line of output, and show it if it is one of ours."""
        self._log.write(raw)
        self.read_messages()
        show_output(self._display, raw)

    def read_messages(self) -> None:
        """Read what the stages have told since the last time: which run it is, and why a stage failed."""
        for kind, content in self._messages.read_messages():
            if kind == channel.ERROR:
                self.error = ErrorDocument.salvage(content)
            else:
                self.run_uri = content
                self._display.line(f"run {RunPaths(self.run_uri).run_id} in {self.run_uri}")

    def end(self, code: int, stop_code: int, situation: Situation) -> EndedRun:
        """Return how the pipeline's process ended, which had exit code `code`."""
        situation = dataclasses.replace(situation, run_uri=self.run_uri or situation.run_uri)
        error = self._find_error(stop_code, situation.log) if code else None
        return EndedRun(self.run_uri, error, stop_code, situation)

    def _find_error(self, stop_code: int, log_path: str) -> ErrorDocument:
        """Find why the pipeline failed: what a stage announced, or what the workers of a killed one left behind."""
        error = self.error or (read_error(RunPaths(self.run_uri).error) if self.run_uri else None)
        if error is None and stop_code:
            error = ErrorDocument.of(InterruptedByUser("interrupted"))
        return error or ErrorDocument(line=f"the pipeline ended without saying why; see {log_path}")


class Log:
    """A file whose disk may be full: that costs the lines which find no room, and neither the run nor its summary."""

    def __init__(self, stream: BinaryIO, path: Path, warn: Callable[[str], None]) -> None:
        """`stream` is not buffered, so that a line which could not be written is not tried again at the end."""
        self._stream = stream
        self._warn = warn
        self.path = path
        self._failed = False

    def write(self, text: str) -> None:
        """Append a text; warn once where that fails."""
        try:
            self._stream.write(text.encode(errors="replace"))
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._warn(f"warning: {self.path} has gaps from here on: {error.strerror}")


@contextlib.contextmanager
def open_log(folder: Path, name: str, warn: Callable[[str], None]) -> Iterator[Log]:
    """Create a log file `logs/<time>-<name>.log` below `folder`. Raises ConfigError where there can be none."""
    path = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(
            f"the log file cannot be written: {error}",
            where="--workdir",
            value=str(folder),
            fix="use a folder that can be written and has room",
        ) from error
    with stream:
        yield Log(stream, path, warn)


@contextlib.contextmanager
def _write_arguments(config: Config, resume_run: str) -> Iterator[Path]:
    """Make a folder for what the pipeline hands from step to step, with its arguments. Raises StorageError for no room.

    The folder goes with the block.
    """
    with contextlib.ExitStack() as stack:
        try:
            temporary = tempfile.TemporaryDirectory(prefix="kftrain-run-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(temporary))
            (folder / ARGUMENTS).write_text(json.dumps(parameters.make_parameters(config, resume_run)))
        except OSError as error:
            what = f"temporary files cannot be written: {error.strerror}"
            raise StorageError(what, where=tempfile.gettempdir(), fix="make room, or set TMPDIR") from error
        yield folder


def _record_kill(output: PipelineOutput, config: Config) -> None:
    """Say and record what the pipeline could not any more, because a second signal has killed it."""
    killed = InterruptedByUser("killed by a second signal")
    output.error = output.error or ErrorDocument.of(killed, stage="the pipeline")
    if not output.run_uri:
        return
    if config.launch.is_remote:
        _warn(f"a job may still be on the cluster: kftrain cancel {output.run_uri}")
        return
    paths, document = RunPaths(output.run_uri), summarize_failure("run", killed)
    with best_effort("error.json could not be written"):
        storage.publish_json(paths.error, document.to_dict())
    mlflow_run.mark_failed(paths, config, killed, document, _warn)


def _warn(line: str) -> None:
    echo(line, err=True)
