"""The launcher of Slurm: a job is a batch script whose step has one worker a node; its files lie in the run's folder.

The script requeues itself: a training that outlasts the time limit, or is preempted, goes on whether a launcher is
there or not. A launcher that is killed leaves the job: the next one of the same user adopts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import LaunchError, Preempted, RetryableError
from kftrain.launch import scheduler, slurm_queue, slurm_script
from kftrain.launch.base import JobStatus, Request
from kftrain.launch.scheduler import SchedulerLauncher
from kftrain.launch.slurm_queue import LogLines, SlurmJob
from kftrain.launch.spec import JobSpec
from kftrain.run import commit
from kftrain.run.best_effort import best_effort
from kftrain.run.job_tasks import find_job_task
from kftrain.run.paths import RunPaths

CODES = {
    "COMPLETED": 0,
    "OUT_OF_MEMORY": 137,
    **dict.fromkeys(("CANCELLED", "TIMEOUT", "PREEMPTED"), Preempted.exit_code),
}
"""Exit codes of jobs whose script could not write one; others are retryable."""

STATES = {"PENDING": "Queued", "COMPLETING": "Committing"}


class SlurmLauncher(SchedulerLauncher[SlurmJob]):
    """Runs the jobs of a run on the cluster whose commands this machine has, as the user of this process."""

    scheduler_name = "Slurm"
    forget_seconds = 60.0

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
        self._require_workers_alone(spec)
        return slurm_script.build_request(spec, self._config)

    def run(self, spec: JobSpec) -> int:
        """Run a job as the only launcher of it: see `Launcher.run`."""
        slurm_script.require_shared_folder(spec.run_uri)
        with slurm_queue.hold_job(_make_folder(spec.run_uri) / f"{spec.task}.launcher", spec.run_uri):
            return super().run(spec)

    def suspend(self, run: str) -> list[str]:
        """Requeue the run's jobs after a commit, and hold them: see `Jobs.suspend`."""
        return self._tell_until(
            self._require_active(run),
            lambda job: slurm_queue.tell_job(job, "USR2", ["scontrol", "hold"]),
            lambda job: job.is_held,
        )

    def unsuspend(self, run: str) -> list[str]:
        """Release the held jobs of the run: see `Jobs.unsuspend`."""
        jobs = [job for job in self._require_active(run) if job.is_held]
        for job in jobs:
            slurm_queue.ask_slurm(["scontrol", "release", job.job_id])
        return [job.title for job in jobs]

    def logs(self, run: str, task: str, follow: bool, write: Callable[[str], None]) -> None:
        """Write what the last job has printed on all its nodes, in all its restarts: see `Jobs.logs`."""
        uri = storage.absolute(run)
        folder = slurm_script.make_folder_path(uri)
        output: LogLines | None = None
        while True:
            # Before the look at the files: what is printed last is read, too. A launcher may begin another attempt.
            is_there = follow and (
                slurm_queue.is_held(folder / f"{task}.launcher")
                or any(job.task == task for job in self._list_active(uri))
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
            time.sleep(scheduler.POLL_SECONDS)

    def _list_jobs(self, mine: bool = False) -> list[SlurmJob]:
        return slurm_queue.list_jobs(mine)

    def _submit(self, spec: JobSpec, jobs: list[SlurmJob]) -> str:
        request = self.build(spec)
        return slurm_queue.ask_slurm(request.content["command"], request.content["script"]).strip().split(";")[0]

    def _tell_to_end(self, job: SlurmJob) -> None:
        slurm_queue.tell_job(job, "USR1", ["scancel", "--state=PENDING"])

    def _open_output(self, job: SlurmJob) -> Callable[[], list[str]]:
        return LogLines(_make_path(job, "log")).read

    def _read_code(self, job: SlurmJob) -> int | None:
        """Return the code that the script has written, or one for the word by which Slurm says how it ended."""
        path = _make_path(job, "code")
        text = path.read_text().strip() if path.exists() else ""
        if text.isdecimal():
            return int(text)
        if job.state == "FAILED":
            raise LaunchError(
                "the job failed before its workers began",
                where=f"job {job.job_id} of Slurm",
                fix=f"see that the nodes have the folder {job.run_uri}; scontrol show job {job.job_id} says more",
            )
        return CODES.get(job.state, RetryableError.exit_code) if job.has_ended else None

    def _make_status(self, job: SlurmJob) -> JobStatus:
        paths, step = RunPaths(job.run_uri), 0
        with best_effort("the last step is not known"):  # it may be somebody else's folder
            step = commit.find_last_step(paths)
        state = STATES.get(job.state, find_job_task(job.task).state if job.state == "RUNNING" else job.state)
        progress = slurm_queue.read_progress(_make_path(job, "log"))
        return JobStatus(
            run=paths.run_id,
            task=job.task,
            job=job.title,
            state="Suspended" if job.is_held else state,
            reason=job.reason,
            progress=progress or (f"step {step} is committed" if step else ""),
            workers=f"{job.num_nodes if job.state == 'RUNNING' else 0}/{job.num_nodes}",
            age_seconds=time.time() - job.submitted_at,
        )


def build_launcher(config: Config) -> SlurmLauncher:
    """Build the launcher, without asking Slurm anything."""
    return SlurmLauncher(config)


def _make_folder(run_uri: str) -> Path:
    """Make the folders of what a job and its workers print, which is for nobody else on a cluster of many users."""
    for folder in (slurm_script.make_folder_path(run_uri), storage.local_path(RunPaths(run_uri).logs)):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    return slurm_script.make_folder_path(run_uri)


def _make_path(job: SlurmJob, ending: str) -> Path:
    """Return the file with a job's output (`log`) or its script's exit code (`code`)."""
    return slurm_script.make_folder_path(job.run_uri) / f"{job.task}-{job.job_id}.{ending}"
