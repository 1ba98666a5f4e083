"""The launcher of Ray: a job of its job API whose driver (`ray_driver`) runs one worker a node of a placement group.

It speaks plain HTTP, so that only the cluster needs Ray. A launcher that is killed leaves the job: the next one adopts
it. Of two that live, the one that came last follows the job, and the other one ends.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.errors import (
    FIRST_RETRYABLE_CODE,
    FailureClass,
    FencedError,
    LaunchError,
    OtherJobError,
    Preempted,
    RetryableError,
)
from kftrain.launch.base import JobStatus, Request
from kftrain.launch.local import remove_temporary_files
from kftrain.launch.ray_jobs import RayAwayError, RayCluster, RayJob, read_job_standing, ride_out_absence
from kftrain.launch.ray_settings import RayConfig
from kftrain.launch.spec import JobSpec
from kftrain.process.signals import INTERRUPT, STOP, handle_signals
from kftrain.run.best_effort import best_effort
from kftrain.run.error import read_error
from kftrain.run.job_tasks import find_job_task
from kftrain.run.paths import RunPaths

POLL_SECONDS = 2.0

GOING_SECONDS = 1800
"""Seconds that a job that was told to stop may take to commit and to go; then Ray kills its driver."""

NEXT_SECONDS = 30.0
"""Seconds in which a failed job has a successor, if its launcher starts another attempt."""

SUBMIT_SECONDS = 60.0
"""Seconds for which Ray may refuse a job, or be away, before it is given up."""


class RayLauncher:
    """Runs the jobs of a run on the cluster at `launch.ray.address`."""

    def __init__(self, config: Config) -> None:
        self.interrupted = False
        self._settings = config.launch.ray
        self._cluster = RayCluster(config.launch.ray.dashboard)
        self._token = uuid.uuid4().hex

    def check(self) -> None:
        """Raise LaunchError if the cluster does not answer: see `Launcher.check`."""
        self._cluster.read_version()

    def build(self, spec: JobSpec) -> Request:
        """Build the request of the run's first job: see `Launcher.build`."""
        content = build_job_request(spec, self._settings, number=1)
        address = shlex.quote(f"{self._settings.dashboard}/api/jobs/")
        header = "'Content-Type: application/json'"
        text = f"curl --fail-with-body {address} -H {header} -d {shlex.quote(json.dumps(content, indent=2))}\n"
        return Request(content, text)

    def prepare(self, spec: JobSpec) -> None:
        """Prepare nothing: a job that waits would hold its nodes."""

    def close(self) -> None:
        """Do nothing: no process is kept for another attempt."""

    def run(self, spec: JobSpec) -> int:
        """Submit or adopt a job, show its output, and return its exit code: see `Launcher.run`.

        Raises OtherJobError for a job with another configuration, FencedError once another launcher follows the job.
        """
        with handle_signals((INTERRUPT, *STOP), self._on_signal):
            storage.publish_json(_make_launcher_uri(spec), {"launcher": self._token})
            job = self._submit_or_adopt(spec)
            return Preempted.exit_code if job is None else self._follow(job, spec)

    def clean(self, paths: RunPaths, job_id: str) -> list[str]:
        """Stop the run's jobs, and remove its temporary files: see `Launcher.clean`."""
        return [*self._end(self._list_active(paths.uri)), *remove_temporary_files(paths)]

    def describe(self, run: str) -> list[JobStatus]:
        """Return the status of the run's jobs, whoever has started them: see `Jobs.describe`."""
        return [self._make_status(job) for job in self._list_active(run)]

    def cancel(self, run: str) -> list[str]:
        """End the run's jobs after a commit, and wait until they are gone: see `Jobs.cancel`."""
        assert run, "no run would mean every run"
        jobs = self._list_active(run)
        if not jobs:
            raise LaunchError("this run has no job in Ray", where=run, fix="kftrain runs says how it ended")
        return self._end(jobs)

    def suspend(self, run: str) -> list[str]:
        """Refuse: see `Jobs.suspend`."""
        raise LaunchError(
            "a job of Ray cannot be suspended",
            where=run,
            fix="end it with kftrain cancel; kftrain run --resume goes on from its last commit",
        )

    def unsuspend(self, run: str) -> list[str]:
        """Refuse: see `Jobs.unsuspend`."""
        return self.suspend(run)

    def logs(self, run: str, task: str, follow: bool, write: Callable[[str], None]) -> None:
        """Write what the newest job has printed, and its successors with `follow`: see `Jobs.logs`."""
        job = self._find_job(run, task)
        if job is None:
            raise LaunchError("Ray knows no such job of this run", where=run, value=task)
        lines, ended_at = _NewLines(), None
        while True:
            for line in lines.take(self._cluster.read_output(job)):
                write(line)
            if not follow or (job.has_ended and job.state != "FAILED"):
                return
            latest = self._find_job(run, task) or job
            if latest.name != job.name:
                lines, ended_at = _NewLines(), None
            elif job.has_ended:
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > NEXT_SECONDS:
                    return
            job = latest
            time.sleep(POLL_SECONDS)

    def _find_job(self, run: str, task: str) -> RayJob | None:
        """Return the newest job of a run's task."""
        jobs = [job for job in self._cluster.list_jobs() if job.belongs_to(run) and job.task == task]
        return jobs[-1] if jobs else None

    def _list_active(self, run: str) -> list[RayJob]:
        return [job for job in self._cluster.list_jobs() if not job.has_ended and (not run or job.belongs_to(run))]

    def _submit_or_adopt(self, spec: JobSpec) -> RayJob | None:
        """Return the job of the task, new or not; None where this process was told to stop before.

        Raises OtherJobError where a job with another configuration is at work on the run.
        """
        deadline, submitted = time.monotonic() + SUBMIT_SECONDS, ""
        while not self.interrupted or submitted:
            try:
                job = self._find_job(spec.run_uri, spec.task)
                if job is not None and (not job.has_ended or job.name == submitted):
                    if job.digest != spec.config_digest:
                        raise OtherJobError("a job with another configuration works on this run", where=spec.run_uri)
                    to_log(f"job {job.name} {'of Ray' if submitted else 'is there already: following it'}: {spec.size}")
                    return job
                request = build_job_request(spec, self._settings, job.number + 1 if job else 1)
                submitted = request["submission_id"]  # before: an answer that is lost leaves a job all the same
                self._cluster.submit(request)
            except RayAwayError as error:  # or another launcher was faster, and has taken the number
                if time.monotonic() > deadline:
                    raise
                to_log(f"warning: {error.line}")
                time.sleep(POLL_SECONDS)
        return None

    def _follow(self, job: RayJob, spec: JobSpec) -> int:
        """Show the job's output until it has ended; return its exit code."""
        lines, message = _NewLines(), ""
        while True:
            self._require_lead(spec)
            current: RayJob | None = job
            with ride_out_absence():
                current = next((other for other in self._cluster.list_jobs() if other.name == job.name), None)
                if current is None:
                    to_log(f"job {job.name}: Ray does not know it any more")
                    return RetryableError.exit_code
                if self.interrupted and not current.has_ended:
                    self._cluster.stop(current)
                for line in lines.take(self._cluster.read_output(current)):
                    sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
                if current.state == "PENDING" and current.message != message:
                    message = current.message
                    to_log(f"job {job.name} waits: {message}")
                if current.has_ended:
                    return self._judge(current, spec)
            time.sleep(POLL_SECONDS)

    def _require_lead(self, spec: JobSpec) -> None:
        """Raise FencedError once another launcher follows the job."""
        token = self._token
        with best_effort("whether another launcher follows the job is not known"):
            kept = storage.read_json_if_exists(_make_launcher_uri(spec)) or {}
            token = kept.get("launcher", token)
        if token != self._token:
            raise FencedError(f"{FencedError.BY_LAUNCHER} by now, and follows its job", where=spec.run_uri)

    def _judge(self, job: RayJob, spec: JobSpec) -> int:
        """Return the exit code of an ended job; the error that a worker left knows better what is for good."""
        if job.state == "STOPPED":
            if self.interrupted:
                return Preempted.exit_code
            raise LaunchError(
                "somebody stopped the job", where=f"job {job.name} of Ray", fix="resume the run"
            ).of_class(FailureClass.DELETED)
        code = 0 if job.state == "SUCCEEDED" else job.exit_code or RetryableError.exit_code
        error = read_error(RunPaths(spec.run_uri).error) if code else None
        if error is None and 0 < code < FIRST_RETRYABLE_CODE:
            raise LaunchError(
                "the job failed before its workers began", where=f"job {job.name}", value=job.message[-300:]
            )
        return error.exit_code if error is not None and 0 < error.exit_code < FIRST_RETRYABLE_CODE else code

    def _end(self, jobs: list[RayJob]) -> list[str]:
        """Stop jobs and wait until they have ended; return their names."""
        names, deadline = {job.name for job in jobs}, time.monotonic() + GOING_SECONDS
        while left := [job for job in self._cluster.list_jobs() if job.name in names and not job.has_ended]:
            if time.monotonic() > deadline:
                raise LaunchError("the job was told to stop, and does not", where=f"job {left[0].name} of Ray")
            for job in left:  # again and again: one may be about to begin
                self._cluster.stop(job)
            time.sleep(POLL_SECONDS)
        return [job.name for job in jobs]

    def _make_status(self, job: RayJob) -> JobStatus:
        standing = read_job_standing(self._cluster.read_output(job))
        return JobStatus(
            run=RunPaths(job.run_uri).run_id,
            task=job.task,
            job=job.name,
            state=find_job_task(job.task).state if standing.has_nodes else "Queued",
            reason="" if standing.has_nodes else standing.waits_for or job.message,
            progress=standing.progress,
            workers=f"{job.num_nodes if standing.has_nodes else 0}/{job.num_nodes}",
            age_seconds=time.time() - job.submitted_at,
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True


def build_launcher(config: Config) -> RayLauncher:
    """Build the launcher, without asking Ray anything."""
    return RayLauncher(config)


def build_job_request(spec: JobSpec, settings: RayConfig, number: int) -> dict[str, Any]:
    """Build the body of `POST /api/jobs/` for a run's job of this number. Raises LaunchError for roles of servers."""
    if spec.others:
        raise LaunchError(
            "the ray backend has workers alone",
            where="launch.backend",
            value=", ".join(role.name for role in spec.others),
            fix="launch it with a backend that runs all of them: launch.backend=local",
        )
    gpus = {"GPU": settings.gpus_per_node} if settings.gpus_per_node else {}
    document = {
        "command": [settings.python, "-m", "kftrain", *spec.workers.arguments],
        "environment": spec.environment,
        "nodes": spec.workers.replicas,
        "bundle": {"CPU": settings.cpus_per_node, **gpus, **settings.resources},
    }
    command = [settings.python, "-m", "kftrain.launch.ray_driver", json.dumps(document)]
    where = storage.sha256_text(spec.run_uri)[:8]  # another storage root may have a run of the same id
    return {
        # Counted, not random: of two launchers that submit at once, Ray refuses one.
        "submission_id": f"kftrain-{RunPaths(spec.run_uri).run_id}-{spec.task}-{where}-{number}",
        "entrypoint": f"exec {shlex.join(command)}",
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(GOING_SECONDS)}},
        "metadata": {
            **{"kftrain": "1", "run": spec.run_uri, "task": spec.task, "digest": spec.config_digest},
            "nodes": str(spec.workers.replicas),
        },
    }


class _NewLines:
    """Finds the lines that were added to an output since the last look."""

    def __init__(self) -> None:
        self._num_characters = 0

    def take(self, output: str) -> list[str]:
        """Return the whole lines of an output after those that were returned before."""
        end = output.rfind("\n") + 1
        new, self._num_characters = output[self._num_characters : end], max(self._num_characters, end)
        return new.splitlines()


def _make_launcher_uri(spec: JobSpec) -> str:
    """Return the file with the token of the launcher that follows a task's job."""
    return storage.join(spec.run_uri, "ray", f"{spec.task}.json")
