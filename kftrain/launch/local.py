"""The local launcher: a job as processes of this machine, under the supervisor that worker pods have."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from types import FrameType

from kftrain import storage
from kftrain.config import Config
from kftrain.errors import FIRST_RETRYABLE_CODE, LaunchError
from kftrain.launch.base import JobStatus, Request
from kftrain.launch.spec import JobSpec
from kftrain.process import presence
from kftrain.process.kept import KeptProcess
from kftrain.process.presence import Present
from kftrain.process.signals import INTERRUPT, STOP, handled, shell_code
from kftrain.run import commit
from kftrain.run.paths import RunPaths
from kftrain.run.temporary import remove_temporary_files

GOING_SECONDS = 600.0
"""How long a cancelled job may take to commit and to go."""

POLL_SECONDS = 0.2


class LocalLauncher:
    """Runs jobs in a child process. The child and all below it die with this process, however it dies.

    A child whose attempt may be followed by another is kept for it. Other processes of the same user find the jobs of
    this machine, and end them through their launcher: it alone knows that no further attempt is wanted.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._child: KeptProcess | None = None
        self._command: list[str] = []

    def check(self) -> None:
        """See `Launcher.check`: processes can always be started."""

    def build(self, spec: JobSpec) -> Request:
        """See `Launcher.build`."""
        environment = [f"{name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items())]
        command = ["kftrain", *spec.workers.arguments]
        content = {"command": command, "environment": spec.environment}
        return Request(content, f"{' '.join([*environment, shlex.join(command)])}\n")

    def prepare(self, spec: JobSpec) -> None:
        """See `Launcher.prepare`."""
        self._child_for(spec).prepare({**os.environ, **spec.environment})

    def run(self, spec: JobSpec) -> int:
        """See `Launcher.run`."""
        with handled((INTERRUPT, *STOP), self._on_signal), presence.shown(spec.run_uri, spec.task):
            return self._run(spec)

    def close(self) -> None:
        """Ends the child that was kept."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def clean(self, paths: RunPaths, job_id: str) -> list[str]:
        """See `Launcher.clean`."""
        return remove_temporary_files(paths)

    def describe(self, run: str) -> list[JobStatus]:
        """See `Jobs.describe`."""
        return [_status(found) for found in _found(run)]

    def cancel(self, run: str) -> list[str]:
        """See `Jobs.cancel`."""
        jobs = _some(run)
        for job in jobs:
            job.terminate()
        deadline = time.monotonic() + GOING_SECONDS
        while any(job.is_there() for job in jobs):
            if time.monotonic() > deadline:
                raise LaunchError("the job was told to stop, and does not", where=_name(jobs[0]), fix="kill it")
            time.sleep(POLL_SECONDS)
        return [_name(job) for job in jobs]

    def suspend(self, run: str) -> list[str]:
        """See `Jobs.suspend`."""
        raise _never_suspended(run)

    def unsuspend(self, run: str) -> list[str]:
        """See `Jobs.unsuspend`."""
        raise _never_suspended(run)

    def logs(self, run: str, task: str, follow: bool, write: Callable[[str], None]) -> None:
        """See `Jobs.logs`: of the last attempt. Logs are kept when it ends; until then its terminal shows them."""
        while any(job.task == task for job in _found(run)):
            if not follow:
                raise LaunchError(
                    "the job is at work, and its output is where it was started", where=run, fix="wait for it: --follow"
                )
            time.sleep(POLL_SECONDS)
        folder = _last_logs(RunPaths(run), task)
        names = sorted(storage.list_names(folder), key=lambda name: (len(name), name))
        if not names:
            raise LaunchError("this run has no logs of such a job", where=run, value=task)
        for name in names:
            prefix = f"[{name.removesuffix('.log').replace('-', ' ')}] " if len(names) > 1 else ""
            for line in storage.read_bytes(storage.join(folder, name)).decode(errors="replace").splitlines():
                write(prefix + line)

    def _run(self, spec: JobSpec) -> int:
        child = self._child_for(spec)
        child.start({**os.environ, **spec.environment})
        if self.interrupted:
            child.terminate()
        code = shell_code(child.wait())
        if code < FIRST_RETRYABLE_CODE or self.interrupted:
            self.close()
        return code

    def _child_for(self, spec: JobSpec) -> KeptProcess:
        command = [sys.executable, "-m", "kftrain", *spec.workers.arguments]
        if self._child is None or command != self._command:
            self.close()
            # A session of its own: Ctrl-C on a terminal must reach the job once, through us, as SIGTERM.
            self._child = KeptProcess(command, new_session=True)
            self._command = command
        return self._child

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        if self._child is not None:
            self._child.terminate()


def build_launcher(config: Config) -> LocalLauncher:
    """The launcher. Raises LaunchError for more than one node."""
    if config.launch.nodes != 1:
        raise LaunchError(
            "the local backend has one node", where="launch.nodes", value=config.launch.nodes, fix="set it to 1"
        )
    return LocalLauncher()


def _found(run: str) -> list[Present]:
    return presence.find(storage.absolute(run) if run else "")


def _some(run: str) -> list[Present]:
    assert run, "no run would mean every run"
    found = _found(run)
    if not found:
        raise LaunchError("this run has no job on this machine", where=run, fix="kftrain runs says how it ended")
    return found


def _last_logs(paths: RunPaths, task: str) -> str:
    """Folder of the logs of the last attempt, or of the evaluation; it may not be there."""
    if task == "evaluate":
        return storage.join(paths.logs, "evaluation")
    names = [name for name in storage.list_names(paths.logs) if name.startswith("attempt-")]
    return storage.join(paths.logs, max(names, key=lambda name: (len(name), name), default="attempt-1"))


def _name(job: Present) -> str:
    return f"{RunPaths(job.subject).run_id}-{job.task} (process {job.process_id})"


def _status(job: Present) -> JobStatus:
    paths = RunPaths(job.subject)
    step = commit.last_step(paths)
    return JobStatus(
        run=paths.run_id,
        task=job.task,
        job=_name(job),
        state="Evaluating" if job.task == "evaluate" else "Training",
        reason="",
        progress=f"step {step} is committed" if step else "",
        workers="1/1",
        age_seconds=time.time() - job.since,
    )


def _never_suspended(run: str) -> LaunchError:
    return LaunchError(
        "a job of this machine cannot be suspended",
        where=run,
        fix="end it with kftrain cancel; kftrain run --resume goes on from its last commit",
    )
