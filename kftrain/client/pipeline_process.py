"""The pipeline's process: started, watched and stopped here; as `python -m` the program that runs in it.

It leads a session of its own, so that Ctrl-C on the terminal reaches only us, and we decide: the first signal becomes
SIGTERM for everybody (training commits a checkpoint), the second one SIGKILL. When it has ended nothing of it is left.
A terminal that is closed counts as a signal, and so does an output that nobody reads any more.

The program is `python -m kftrain.client.pipeline_process SPEC ARGUMENTS ROOT` and runs a compiled pipeline through
`kfp.local`. SPEC is a compiled pipeline, or `-` for ours: compiling it there takes one import of kfp, not two. It is a
process of its own because kfp's local runner owns the standard output, the root logger and `print`, and because a task
must be stopped without stopping the runner: the exit handler still has to run. So the program only notes signals. The
running task gets them itself; the ones that start later find STOP_VARIABLE.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from kftrain.process import stage_lifetime
from kftrain.process.signals import HANGUP, INTERRUPT, STOP, handle_signals

OWN_PIPELINE = "-"
"""SPEC that stands for our own pipeline."""

CREATED = "{{$.pipeline_job_create_time_utc}}"
"""Text that Kubeflow replaces by the time at which a run was created, and `kfp.local` does not know."""

NEXT_STEP = "inputs.parameter_values['pipelinechannel--shard-next_step']"
"""Condition that `kfp.local` finds no value of. So all steps run here; later ones see that nothing is left."""

SIGNAL_CODE = 128
"""A program that a signal ended exits with this plus the signal's number."""

STOPPING = b"stopping: training commits a checkpoint first; a second signal kills everything here\n"

STOP_SECONDS = 330.0
"""Seconds that a pipeline gets to end after an error of ours: a launcher waits so long for pods of a deleted job."""


class PipelineProcess:
    """The process that runs the pipeline through kfp's local runner; signals to this process go on to it."""

    def __init__(
        self, spec: str | Path, arguments: Path, root: Path, workdir: Path, environment: Mapping[str, str]
    ) -> None:
        """`environment` comes over that of this process, which stays as it is."""
        parent = {stage_lifetime.PARENT_VARIABLE: str(os.getpid())}
        self._signal = 0
        self.killed = False
        """True if a second signal has killed it: what it had launched elsewhere may still be there."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kftrain.client.pipeline_process", str(spec), str(arguments), str(root)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=workdir,
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1", **parent},
            start_new_session=True,
        )

    @property
    def stop_code(self) -> int:
        """Exit code that tells which signal stopped us; 0: none did."""
        return SIGNAL_CODE + self._signal if self._signal else 0

    def follow(self, on_line: Callable[[str], None]) -> int:
        """Hand over every line of output, newline included, until the pipeline ends; return its exit code."""
        assert self._process.stdout is not None
        with handle_signals((INTERRUPT, *STOP), self._stop):
            try:
                for line in self._process.stdout:
                    on_line(line)
                return self._process.wait()
            finally:
                self._end()

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self._signal and number == HANGUP:  # a terminal that is closed says so twice: by its shell, by the kernel
            return
        if not self._signal:
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, STOPPING)  # not print: whatever is being printed was interrupted by this very handler
        self.killed = bool(self._signal)
        self._send(signal.SIGKILL if self.killed else signal.SIGTERM)
        self._signal = self._signal or number

    def _end(self) -> None:
        """Leave nothing running. A pipeline that still runs, because a line could not be shown, is asked first."""
        assert self._process.stdout is not None
        if self._process.poll() is None:
            self._send(signal.SIGTERM)
            limit = threading.Timer(STOP_SECONDS, self._send, [signal.SIGKILL])
            limit.start()
            for _line in self._process.stdout:  # until it has ended: it may have much to say
                pass
            limit.cancel()
        self._send(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def main() -> None:
    """Run the pipeline as this process; an exception, hence exit code 1, where a task failed."""
    spec, arguments, root = sys.argv[1:]
    stage_lifetime.end_with_parent()
    with handle_signals((signal.SIGTERM, INTERRUPT), _note_stop):
        _keep_python3()
        run_spec(spec, json.loads(Path(arguments).read_text()), root)


def run_spec(spec: str, arguments: dict[str, object], root: str) -> None:
    """Run a compiled pipeline with its artifacts below `root`, which is the caller's to delete."""
    from kfp import components, local

    from kftrain.pipelines.compile import compiled

    workspace = Path(root) / "workspace"  # kfp deletes it at the end, hence nothing that anybody else has put there
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=root, workspace_root=str(workspace))
    text = compiled() if spec == OWN_PIPELINE else Path(spec).read_text()
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = text.replace(CREATED, now).replace(NEXT_STEP, "('train')")
    components.load_component_from_text(text)(**arguments)


def _note_stop(_number: int, _frame: FrameType | None) -> None:
    os.environ[stage_lifetime.STOP_VARIABLE] = "1"


def _keep_python3() -> None:
    """Let the runner find this interpreter as `python3`.

    kfp replaces every `python3` in a task's command by `sys.executable`, in the arguments too: a path like
    /data/python3/corpus would come out broken. Replaced by itself it stays whole.
    """
    folder = Path(sys.executable).parent
    if (folder / "python3").exists():
        os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
        sys.executable = "python3"


if __name__ == "__main__":
    main()
