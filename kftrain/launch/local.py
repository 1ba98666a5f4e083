"""The local launcher: a job as processes of this machine, under the supervisor that worker pods have.

A job is done when its workers are. The nodes of its other roles run beside them; when one of those fails, the workers
are told to stop, and the attempt ends with that node's error.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.credentials import SERVER_SECRET_VARIABLE
from kftrain.errors import FIRST_RETRYABLE_CODE, LaunchError
from kftrain.launch.base import JobStatus, Launcher, Request
from kftrain.launch.role_processes import RoleProcesses, find_root_cause
from kftrain.launch.servers import ServersOfJob
from kftrain.launch.spec import NODE_RANK_ENV, JobSpec
from kftrain.process import presence
from kftrain.process.kept import KeptProcess
from kftrain.process.presence import WorkingProcess
from kftrain.process.signals import INTERRUPT, STOP, handle_signals, to_shell_code
from kftrain.run import commit
from kftrain.run.best_effort import REPORT_SECONDS, best_effort
from kftrain.run.error import read_error
from kftrain.run.job_tasks import find_job_task
from kftrain.run.logs import build_logs_uri, find_last_logs, find_next_attempt, publish_log
from kftrain.run.paths import RunPaths

GOING_SECONDS = 600.0
"""Seconds that a cancelled job may take to commit and to go."""

POLL_SECONDS = 0.2

COMMAND = (sys.executable, "-m", "kftrain")
"""The command `kftrain` of this very installation."""


class LocalLauncher(Launcher):
    """Runs jobs in a child process. The child and all below it die with this process, however it dies.

    The child is kept while another attempt may follow. Other processes of the same user find the jobs of
    this machine, and end them through their launcher: it alone knows that no further attempt is wanted.
    """

    job_words = "a job of this machine"

    def __init__(self) -> None:
        self._child: KeptProcess | None = None
        self._command: list[str] = []

    def build(self, spec: JobSpec) -> Request:
        """Return the command lines of workers and other roles, with their environments: see `Launcher.build`."""
        _require_one_worker_node(spec)
        workers: dict[str, Any] = {"command": ["kftrain", *spec.workers.arguments], "environment": spec.environment}
        others: list[dict[str, Any]] = [
            {"command": ["kftrain", *role.arguments], "environment": {**spec.environment, NODE_RANK_ENV: str(rank)}}
            for role in spec.others
            for rank in range(role.replicas)
        ]
        text = "".join(f"{_format_line(**other)} &\n" for other in others) + f"{_format_line(**workers)}\n"
        return Request({**workers, **({"others": others} if others else {})}, text)

    def prepare(self, spec: JobSpec) -> None:
        """Start the child that will run the job and let it import the libraries: see `Launcher.prepare`."""
        self._get_child(spec).prepare({**os.environ, **spec.environment})

    def run(self, spec: JobSpec) -> int:
        """Run one attempt in the child, visible to `kftrain status`: see `Launcher.run`."""
        _require_one_worker_node(spec)
        with handle_signals((INTERRUPT, *STOP), self._on_signal), presence.show_process(spec.run_uri, spec.task):
            return self._run(spec)

    def close(self) -> None:
        """End the child that was kept for another attempt."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def clean(self, paths: RunPaths, job_id: str) -> list[str]:
        """Remove the temporary files of the run, since dead processes leave no jobs: see `Launcher.clean`."""
        return remove_temporary_files(paths)

    def describe(self, run: str) -> list[JobStatus]:
        """Return the status of the run's jobs on this machine: see `Jobs.describe`."""
        return [_make_status(job) for job in _find_jobs(run)]

    def cancel(self, run: str) -> list[str]:
        """Tell the run's launchers on this machine to stop, and wait until they are gone: see `Jobs.cancel`."""
        assert run, "no run would mean every run"
        jobs = _find_jobs(run)
        if not jobs:
            raise LaunchError("this run has no job on this machine", where=run, fix="kftrain runs says how it ended")
        for job in jobs:
            job.terminate()
        deadline = time.monotonic() + GOING_SECONDS
        while any(job.is_there() for job in jobs):
            if time.monotonic() > deadline:
                raise LaunchError("the job was told to stop, and does not", where=_format_name(jobs[0]), fix="kill it")
            time.sleep(POLL_SECONDS)
        return [_format_name(job) for job in jobs]

    def logs(self, run: str, task: str, follow: bool, write: Callable[[str], None]) -> None:
        """Write the logs of the last attempt. They are there once it has ended; until then its terminal shows them."""
        while any(job.task == task for job in _find_jobs(run)):
            if not follow:
                raise LaunchError(
                    "the job is at work, and its output is where it was started", where=run, fix="wait for it: --follow"
                )
            time.sleep(POLL_SECONDS)
        folder = find_last_logs(RunPaths(run), task)
        names = sorted(storage.list_names(folder), key=lambda name: (len(name), name))
        if not names:
            raise LaunchError("this run has no logs of such a job", where=run, value=task)
        for name in names:
            prefix = f"[{name.removesuffix('.log').replace('-', ' ')}] " if len(names) > 1 else ""
            for line in storage.read_bytes(storage.join(folder, name)).decode(errors="replace").splitlines():
                write(prefix + line)

    def _run(self, spec: JobSpec) -> int:
        environment = {**os.environ, **spec.environment}
        code = self._run_roles(spec, environment) if spec.others else self._run_workers(spec, environment)
        if code < FIRST_RETRYABLE_CODE or self.interrupted:
            self.close()
        return code

    def _run_workers(self, spec: JobSpec, environment: Mapping[str, str], others: RoleProcesses | None = None) -> int:
        child = self._get_child(spec)
        child.start(environment)
        if self.interrupted or (others is not None and others.has_failed):  # before there was anybody to tell
            child.terminate()
        return to_shell_code(child.wait())

    def _run_roles(self, spec: JobSpec, environment: Mapping[str, str]) -> int:
        """Run all roles of the job; return the exit code of the workers, or of the node whose failure ended them."""
        paths = RunPaths(spec.run_uri)
        # Drawn for each attempt: whoever is left of another one can reach nobody of this.
        environment = {**environment, SERVER_SECRET_VARIABLE: secrets.token_hex(32)}
        attempt = None
        with best_effort("the attempt is not known"):
            attempt = find_next_attempt(paths, spec.task)  # now: its claim would change the answer
        with tempfile.TemporaryDirectory(prefix="kftrain-") as folder:
            child = self._get_child(spec)
            child.prepare(environment)
            servers = ServersOfJob(spec)
            nodes = (servers.resize(spec.others), environment, Path(folder), child.terminate, servers.is_needed)
            with RoleProcesses(COMMAND, *nodes) as others, servers.adding(others):
                code = self._run_workers(spec, environment, others)
                failures = others.wait_for_failures() if code and not self.interrupted else []
            with best_effort("why the job failed could not be written", REPORT_SECONDS):
                failure = find_root_cause(failures, read_error(paths.error)) if failures else None
                if failure is not None:
                    error = others.explain(failure, spec.task, attempt)
                    storage.publish_json(paths.error, error.to_dict())
                    code = error.exit_code
            for path in others.logs.values():
                publish_log(path, storage.join(build_logs_uri(paths, spec.task, attempt), path.name))
        return code

    def _get_child(self, spec: JobSpec) -> KeptProcess:
        """Return the child that is kept for this command; end one that was kept for another command."""
        command = [*COMMAND, *spec.workers.arguments]
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
    """Build the local launcher. Raises LaunchError for more than one node."""
    if config.launch.nodes != 1:
        what = "the local backend has one node"
        raise LaunchError(what, where="launch.nodes", value=config.launch.nodes, fix="set it to 1")
    return LocalLauncher()


def _require_one_worker_node(spec: JobSpec) -> None:
    """Raise LaunchError for several worker nodes: each needs a port of a machine of its own."""
    if spec.workers.replicas != 1:
        fix = "set launch.nodes to 1; launch.processes_per_node says how many processes it starts"
        where, nodes = f"role {spec.workers.name}", f"{spec.workers.replicas} nodes"
        raise LaunchError("the local backend has one node of workers", where=where, value=nodes, fix=fix)


def _format_line(command: list[str], environment: Mapping[str, str]) -> str:
    variables = (f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items()))
    return " ".join([*variables, shlex.join(command)])


def _find_jobs(run: str) -> list[WorkingProcess]:
    return presence.find_processes(storage.absolute(run) if run else "")


def _format_name(job: WorkingProcess) -> str:
    return f"{RunPaths(job.subject).run_id}-{job.task} (process {job.process_id})"


def _make_status(job: WorkingProcess) -> JobStatus:
    paths = RunPaths(job.subject)
    step = commit.find_last_step(paths)
    return JobStatus(
        run=paths.run_id,
        task=job.task,
        job=_format_name(job),
        state=find_job_task(job.task).state,
        reason="",
        progress=f"step {step} is committed" if step else "",
        workers="1/1",
        age_seconds=time.time() - job.since,
    )


STALE_SECONDS = 3600.0
"""Age in seconds beyond which a temporary file belongs to a process that is gone."""


def remove_temporary_files(paths: RunPaths) -> list[str]:
    """Remove what killed processes were still writing and return its paths; in an object store files appear whole."""
    if not storage.is_local(paths.uri):
        return []
    oldest = time.time() - STALE_SECONDS
    stale = [path for path in _iterate_temporary(storage.local_path(paths.uri)) if _read_modified_at(path) < oldest]
    for path in stale:
        storage.remove(str(path))
    return [str(path) for path in stale]


def _iterate_temporary(folder: Path) -> Iterator[Path]:
    """Yield files and folders that are being written; others may finish or delete theirs meanwhile."""
    for parent, folders, files in os.walk(folder):  # leaves out a folder that has vanished
        yield from (Path(parent, name) for name in sorted([*folders, *files]) if name.startswith(".tmp-"))


def _read_modified_at(path: Path) -> float:
    """Read when a path was last changed, in seconds since the epoch; infinite for what has vanished."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf
