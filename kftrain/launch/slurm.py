"""The launcher of Slurm: a job is a batch script whose step has one worker a node; its files lie in the run's folder.

The script requeues itself: a training that outlasts the time limit, or is preempted, goes on whether a launcher is
there or not. A launcher that is killed leaves the job: the next one of the same user adopts it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.errors import FIRST_RETRYABLE_CODE, FailureClass, LaunchError, OtherJobError, Preempted, RetryableError
from kftrain.launch import slurm_queue, slurm_script
from kftrain.launch.base import JobStatus, Request
from kftrain.launch.local import remove_temporary_files
from kftrain.launch.slurm_queue import LogLines, SlurmJob
from kftrain.launch.spec import JobSpec
from kftrain.process.signals import INTERRUPT, STOP, handle_signals
from kftrain.run import commit
from kftrain.run.best_effort import best_effort
from kftrain.run.error import read_error
from kftrain.run.job_tasks import find_job_task
from kftrain.run.paths import RunPaths

UNKNOWN_SECONDS = 60.0
"""Seconds for which Slurm may not know a job that it was given, while its files do not say how it ended."""

CODES = {
    "COMPLETED": 0,
    "OUT_OF_MEMORY": 137,
    **dict.fromkeys(("CANCELLED", "TIMEOUT", "PREEMPTED"), Preempted.exit_code),
}
"""Exit codes of jobs whose script could not write one; others are retryable."""

STATES = {"PENDING": "Queued", "COMPLETING": "Committing"}


class SlurmLauncher:
    """Runs the jobs of a run on the cluster whose commands this machine has, as the user of this process."""

    def __init__(self, config: Config) -> None:
        self.interrupted = False
        self._config = config

    def check(self) -> None:
        """Raise LaunchError if no such jobs can be started from here: see `Launcher.check`."""
        slurm_queue.require_commands()
        slurm_script.require_shared_folder(self._config.run.storage_root)
        if self._config.launch.slurm.container == "pyxis" and "--container-image" not in slurm_queue.ask_slurm(
            ["srun", "--help"]
        ):
            raise LaunchError(
                "srun of this cluster has no pyxis",
                where="launch.slurm.container",
                value="pyxis",
                fix="its administrator installs https://github.com/NVIDIA/pyxis; or use apptainer",
            )
        if "proctrack/linuxproc" in slurm_queue.ask_slurm(["scontrol", "show", "config"]):
            raise LaunchError(
                "this cluster signals every process of a job, so that workers could not commit",
                where="ProctrackType",
                value="proctrack/linuxproc",
                fix="its administrator sets proctrack/cgroup, which has been Slurm's default since 2018",
            )

    def build(self, spec: JobSpec) -> Request:
        """Build the command line of sbatch and the script that it reads: see `Launcher.build`."""
        return slurm_script.build_request(spec, self._config)

    def prepare(self, spec: JobSpec) -> None:
        """Prepare nothing: a job that waits would hold its nodes."""

    def close(self) -> None:
        """Do nothing: no process is kept for another attempt."""

    def run(self, spec: JobSpec) -> int:
        """Submit or adopt a job, show its output, and return its exit code: see `Launcher.run`."""
        request, folder = self.build(spec), _make_folder(spec.run_uri)
        lock = slurm_queue.hold_job(folder / f"{spec.task}.launcher", spec.run_uri)
        with handle_signals((INTERRUPT, *STOP), self._on_signal), lock:
            job = self._submit_or_adopt(spec, request)
            if job is None:
                return Preempted.exit_code
            to_log(f"job {job.job_id} of Slurm: {spec.size}")
            return self._follow(job, spec)

    def clean(self, paths: RunPaths, job_id: str) -> list[str]:
        """Cancel the run's jobs of this user, and remove its temporary files: see `Launcher.clean`."""
        jobs = [
            job for job in slurm_queue.list_jobs(mine=True) if slurm_queue.belongs(job, paths.uri) and not job.has_ended
        ]
        return [*self._end(jobs), *remove_temporary_files(paths)]

    def describe(self, run: str) -> list[JobStatus]:
        """Return the status of the run's jobs, whoever has started them: see `Jobs.describe`."""
        return [
            _make_status(job)
            for job in slurm_queue.list_jobs()
            if not job.has_ended and (not run or slurm_queue.belongs(job, run))
        ]

    def cancel(self, run: str) -> list[str]:
        """End the run's jobs after a commit, and wait until they are gone: see `Jobs.cancel`."""
        return self._end(slurm_queue.find_active_jobs(run))

    def suspend(self, run: str) -> list[str]:
        """Requeue the run's jobs after a commit, and hold them: see `Jobs.suspend`."""
        return slurm_queue.signal_until(
            slurm_queue.find_active_jobs(run), "USR2", ["scontrol", "hold"], lambda job: job.is_held
        )

    def unsuspend(self, run: str) -> list[str]:
        """Release the held jobs of the run: see `Jobs.unsuspend`."""
        jobs = [job for job in slurm_queue.find_active_jobs(run) if job.is_held]
        for job in jobs:
            slurm_queue.ask_slurm(["scontrol", "release", job.job_id])
        return [slurm_queue.format_name(job) for job in jobs]

    def logs(self, run: str, task: str, follow: bool, write: Callable[[str], None]) -> None:
        """Write what the last job has printed on all its nodes, in all its restarts: see `Jobs.logs`."""
        uri = storage.absolute(run)
        folder = slurm_script.make_folder_path(uri)
        output: LogLines | None = None
        while True:
            # Before the look at the files: what is printed last is read, too. A launcher may begin another attempt.
            is_there = follow and (
                slurm_queue.is_held(folder / f"{task}.launcher")
                or any(
                    slurm_queue.belongs(job, uri) and job.task == task and not job.has_ended
                    for job in slurm_queue.list_jobs()
                )
            )
            files = sorted(folder.glob(f"{task}-*.log"), key=lambda path: int(path.stem.rpartition("-")[2]))
            if not files:
                raise LaunchError("this run has no logs of such a job", where=run, value=task)
            if output is None or output.path != files[-1]:
                for line in output.read() if output is not None else ():
                    write(line)
                output = LogLines(files[-1])
            for line in output.read():
                write(line)
            if not is_there:
                return
            time.sleep(slurm_queue.POLL_SECONDS)

    def _submit_or_adopt(self, spec: JobSpec, request: Request) -> SlurmJob | None:
        """Return the job of this user for the task, new or not; None where this process was told to stop before.

        Raises OtherJobError where a job with another configuration is at work on the run.
        """
        job_id = ""
        while not self.interrupted or job_id:
            with slurm_queue.tolerate_absence():
                jobs = [
                    job
                    for job in slurm_queue.list_jobs(mine=True)
                    if slurm_queue.belongs(job, spec.run_uri) and job.task == spec.task
                ]
                active = [job for job in jobs if not job.has_ended or job.job_id == job_id]
                if active and job_id not in ("", active[0].job_id):  # another launcher was faster
                    slurm_queue.ask_slurm(["scancel", job_id])
                if active and active[0].digest != spec.config_digest:
                    raise OtherJobError("a job with another configuration works on this run", where=spec.run_uri)
                if active:
                    if not job_id:
                        to_log(f"job {active[0].job_id} of Slurm is there already: following it")
                    return active[0]
                if not job_id:
                    job_id = (
                        slurm_queue.ask_slurm(request.content["command"], request.content["script"])
                        .strip()
                        .split(";")[0]
                    )
                    continue
            time.sleep(slurm_queue.POLL_SECONDS)
        return None

    def _follow(self, job: SlurmJob, spec: JobSpec) -> int:
        """Show the job's output until it has ended; return its exit code."""
        folder = slurm_script.make_folder_path(spec.run_uri)
        output, reason, known_at = LogLines(folder / f"{spec.task}-{job.job_id}.log"), "", time.monotonic()
        while True:
            current: SlurmJob | None = job
            with slurm_queue.tolerate_absence():
                current = next(
                    (other for other in slurm_queue.list_jobs(mine=True) if other.job_id == job.job_id), None
                )
                if self.interrupted and current is not None and not current.has_ended:
                    self._end([current])
            for line in output.read():
                sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            if current is not None:
                job, known_at = current, time.monotonic()
                if job.reason not in ("", reason):
                    to_log(f"job {job.job_id} waits: {job.reason}")
                reason = job.reason
            code_file = folder / f"{spec.task}-{job.job_id}.code"
            is_lost = time.monotonic() - known_at > UNKNOWN_SECONDS
            if job.has_ended or (current is None and (code_file.exists() or is_lost)):
                return self._judge(job, spec, code_file)
            time.sleep(slurm_queue.POLL_SECONDS)

    def _judge(self, job: SlurmJob, spec: JobSpec, code_file: Path) -> int:
        """Return the exit code of an ended job; the error that a worker left knows better what is for good."""
        text = code_file.read_text().strip() if code_file.exists() else ""
        code = int(text) if text.isdecimal() else CODES.get(job.state, RetryableError.exit_code)
        if code and job.state == "CANCELLED" and not self.interrupted:
            raise LaunchError(
                "somebody cancelled the job", where=f"job {job.job_id} of Slurm", fix="resume the run"
            ).of_class(FailureClass.DELETED)
        if job.state == "FAILED" and not text:
            raise LaunchError(
                "the job failed before its workers began",
                where=f"job {job.job_id} of Slurm",
                fix=f"see that the nodes have the folder {spec.run_uri}; scontrol show job {job.job_id} says more",
            )
        error = read_error(RunPaths(spec.run_uri).error) if code else None
        return error.exit_code if error is not None and 0 < error.exit_code < FIRST_RETRYABLE_CODE else code

    def _end(self, jobs: list[SlurmJob]) -> list[str]:
        return slurm_queue.signal_until(jobs, "USR1", ["scancel", "--state=PENDING"], lambda job: job.has_ended)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True


def build_launcher(config: Config) -> SlurmLauncher:
    """Build the launcher, without asking Slurm anything."""
    return SlurmLauncher(config)


def _make_folder(run_uri: str) -> Path:
    """Make the folders of what a job and its workers print, which is for nobody else on a cluster of many users."""
    for folder in (slurm_script.make_folder_path(run_uri), storage.local_path(RunPaths(run_uri).logs)):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    return slurm_script.make_folder_path(run_uri)


def _make_status(job: SlurmJob) -> JobStatus:
    paths = RunPaths(job.run_uri)
    step, log = 0, slurm_script.make_folder_path(job.run_uri) / f"{job.task}-{job.job_id}.log"
    with best_effort("the last step is not known"):  # it may be somebody else's folder
        step = commit.find_last_step(paths)
    state = STATES.get(job.state, find_job_task(job.task).state if job.state == "RUNNING" else job.state)
    return JobStatus(
        run=paths.run_id,
        task=job.task,
        job=slurm_queue.format_name(job),
        state="Suspended" if job.is_held else state,
        reason=job.reason,
        progress=slurm_queue.read_progress(log) or (f"step {step} is committed" if step else ""),
        workers=f"{job.num_nodes if job.state == 'RUNNING' else 0}/{job.num_nodes}",
        age_seconds=time.time() - job.submitted_at,
    )
