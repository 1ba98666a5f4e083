"""The launcher of Slurm: a job is a batch script whose step has one worker a node; its files lie in the run's folder.

The script requeues itself: a training that outlasts the time limit, or is preempted, goes on whether a launcher is
there or not. A launcher that is killed leaves the job: the next one of the same user adopts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import FIRST_RETRYABLE_CODE, LaunchError, Preempted, RetryableError
from kftrain.launch import slurm_queue, slurm_script
from kftrain.launch.base import Request
from kftrain.launch.scheduler import JobOutput, JobStanding, SchedulerLauncher
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
        slurm_queue.require_commands(self._host)
        slurm_script.require_shared_folder(self._config.run.storage_root)
        has_pyxis = self._config.launch.slurm.container == "pyxis"
        if has_pyxis and "--container-image" not in self._ask(["srun", "--help"]):
            fix = "its administrator installs https://github.com/NVIDIA/pyxis; or use apptainer"
            what = "srun of this cluster has no pyxis"
            raise LaunchError(what, where="launch.slurm.container", value="pyxis", fix=fix)
        if "proctrack/linuxproc" in self._ask(["scontrol", "show", "config"]):
            fix = "its administrator sets proctrack/cgroup, which has been Slurm's default since 2018"
            what = "this cluster signals every process of a job, so that workers could not commit"
            raise LaunchError(what, where="ProctrackType", value="proctrack/linuxproc", fix=fix)

    def build(self, spec: JobSpec) -> Request:
        """Build the command line of sbatch and the script that it reads: see `Launcher.build`."""
        return slurm_script.build_request(spec, self._config)

    def run(self, spec: JobSpec) -> int:
        """Run a job: see `Launcher.run`."""
        slurm_script.require_shared_folder(spec.run_uri)
        folder = str(_make_folder(spec.run_uri))
        if self._host and self._ask(["sh", "-c", 'test -d "$0" && echo yes || echo no', folder]) != "yes\n":
            fix = "set run.storage_root to a path that the launcher and all nodes share, and that you may read"
            what = "this host does not reach the folder of the run"
            raise LaunchError(what, where="launch.slurm.host", value=self._host, fix=fix)
        return super().run(spec)

    def suspend(self, run: str) -> list[str]:
        """Requeue the run's jobs after a commit, and hold them: see `Jobs.suspend`."""
        return self._tell_until(
            self._require_active(run),
            lambda job: slurm_queue.tell_job(job, "USR2", ["scontrol", "hold"], self._host),
            lambda job: job.is_held,
        )

    def unsuspend(self, run: str) -> list[str]:
        """Release the held jobs of the run: see `Jobs.unsuspend`."""
        jobs = [job for job in self._require_active(run) if job.is_held]
        for job in jobs:
            self._ask(["scontrol", "release", job.job_id])
        return [job.title for job in jobs]

    def _find_output(self, run: str, task: str, follow: bool) -> JobOutput:
        """Return the log of the last job, on all its nodes, in all its restarts; Slurm is asked with `follow` alone."""
        uri = storage.absolute(run)
        is_active = follow and any(job.task == task for job in self._list_active(uri))
        files = slurm_script.make_folder_path(uri).glob(f"{task}-*.log")
        path = max(files, key=lambda path: int(path.stem.rpartition("-")[2]), default=None)
        if path is None:
            raise LaunchError("this run has no logs of such a job", where=run, value=task)
        code = _read_script_code(path.with_suffix(".code"))
        return JobOutput(path.name, LogLines(path).read, is_active, code is not None and code < FIRST_RETRYABLE_CODE)

    @property
    def _host(self) -> str:
        return self._config.launch.slurm.host

    def _ask(self, command: list[str], text: str = "") -> str:
        return slurm_queue.ask_slurm(command, text, self._host)

    def _list_jobs(self, mine: bool = False) -> list[SlurmJob]:
        return slurm_queue.list_jobs(mine, self._host)

    def _recall(self, job: SlurmJob) -> SlurmJob | None:
        state = slurm_queue.read_past_state(job.job_id, self._host)
        return replace(job, state=state) if state in slurm_queue.ENDED else None

    def _submit(self, spec: JobSpec, jobs: list[SlurmJob]) -> str:
        request = self.build(spec)
        return self._ask(request.content["command"], request.content["script"]).strip().split(";")[0]

    def _tell_to_end(self, job: SlurmJob) -> None:
        slurm_queue.tell_job(job, "USR1", ["scancel", "--state=PENDING"], self._host)

    def _open_output(self, job: SlurmJob) -> Callable[[], list[str]]:
        return LogLines(_make_path(job, "log")).read

    def _read_code(self, job: SlurmJob) -> int | None:
        """Return the code that the script has written, or one for the word by which Slurm says how it ended."""
        code = _read_script_code(_make_path(job, "code"))
        if code is not None:
            return code
        if job.state == "FAILED":
            fix = f"see that the nodes have the folder {job.run_uri}; scontrol show job {job.job_id} says more"
            raise LaunchError("the job failed before its workers began", where=f"job {job.job_id} of Slurm", fix=fix)
        return CODES.get(job.state, RetryableError.exit_code) if job.has_ended else None

    def _assess(self, job: SlurmJob) -> JobStanding:
        step = 0
        with best_effort("the last step is not known"):  # it may be somebody else's folder
            step = commit.find_last_step(RunPaths(job.run_uri))
        state = STATES.get(job.state, find_job_task(job.task).state if job.state == "RUNNING" else job.state)
        state = "Suspended" if job.is_held else state
        progress = slurm_queue.read_progress(_make_path(job, "log")) or (f"step {step} is committed" if step else "")
        return JobStanding(state, job.reason, progress, job.state == "RUNNING")


def build_launcher(config: Config) -> SlurmLauncher:
    """Build the launcher, without asking Slurm anything."""
    return SlurmLauncher(config)


def _make_folder(run_uri: str) -> Path:
    """Make the folders of what a job and its workers print, which is for nobody else on a cluster of many users."""
    for folder in (slurm_script.make_folder_path(run_uri), storage.local_path(RunPaths(run_uri).logs)):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    return slurm_script.make_folder_path(run_uri)


def _read_script_code(path: Path) -> int | None:
    """Read the exit code that a script has written; None for none, or none yet."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None


def _make_path(job: SlurmJob, ending: str) -> Path:
    """Return the file with a job's output (`log`) or its script's exit code (`code`)."""
    return slurm_script.make_folder_path(job.run_uri) / f"{job.task}-{job.job_id}.{ending}"
