"""The launcher of Ray: a job of its job API whose driver (`ray_driver`) runs one worker a node of a placement group.

It speaks plain HTTP, so that only the cluster needs Ray. Of two launchers that live, the one that came last follows the
job, and the other one ends.
"""

from __future__ import annotations

import json
import math
import shlex
import time
import uuid
from collections.abc import Callable
from typing import Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import FencedError, LaunchError, Preempted, RetryableError
from kftrain.launch import scheduler
from kftrain.launch.base import JobStatus, Request
from kftrain.launch.ray_jobs import RayCluster, RayJob, read_job_standing
from kftrain.launch.ray_settings import RayConfig
from kftrain.launch.scheduler import GOING_SECONDS, SchedulerLauncher
from kftrain.launch.spec import JobSpec
from kftrain.run.best_effort import best_effort
from kftrain.run.job_tasks import find_job_task
from kftrain.run.paths import RunPaths

NEXT_SECONDS = 30.0
"""Seconds in which a failed job has a successor, if its launcher starts another attempt."""


class RayLauncher(SchedulerLauncher[RayJob]):
    """Runs the jobs of a run on the cluster at `launch.ray.address`."""

    scheduler_name = "Ray"
    submit_seconds = 60.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._settings = config.launch.ray
        self._cluster = RayCluster(config.launch.ray.dashboard)
        self._token = uuid.uuid4().hex

    def check(self) -> None:
        """Raise LaunchError if the cluster does not answer: see `Launcher.check`."""
        self._cluster.read_version()

    def build(self, spec: JobSpec) -> Request:
        """Build the request of the run's first job: see `Launcher.build`."""
        self._require_workers_alone(spec)
        content = build_job_request(spec, self._settings, number=1)
        address = shlex.quote(f"{self._settings.dashboard}/api/jobs/")
        header = "'Content-Type: application/json'"
        text = f"curl --fail-with-body {address} -H {header} -d {shlex.quote(json.dumps(content, indent=2))}\n"
        return Request(content, text)

    def run(self, spec: JobSpec) -> int:
        """Run a job: see `Launcher.run`. Raises FencedError once another launcher follows it."""
        storage.publish_json(_make_launcher_uri(spec), {"launcher": self._token})
        return super().run(spec)

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
        read_lines, ended_at = self._open_output(job), None
        while True:
            with scheduler.tolerate_absence(math.inf if follow else 0.0):
                for line in read_lines():
                    write(line)
                if not follow or (job.has_ended and job.state != "FAILED"):
                    return
                latest = self._find_job(run, task) or job
                if latest.job_id != job.job_id:
                    read_lines, ended_at = self._open_output(latest), None
                elif job.has_ended:
                    ended_at = ended_at or time.monotonic()
                    if time.monotonic() - ended_at > NEXT_SECONDS:
                        return
                job = latest
            time.sleep(scheduler.POLL_SECONDS)

    def _find_job(self, run: str, task: str) -> RayJob | None:
        """Return the newest job of a run's task."""
        jobs = [job for job in self._cluster.list_jobs() if job.belongs_to(run) and job.task == task]
        return jobs[-1] if jobs else None

    def _list_jobs(self, mine: bool = False) -> list[RayJob]:
        return self._cluster.list_jobs()

    def _submit(self, spec: JobSpec, jobs: list[RayJob]) -> str:
        request = build_job_request(spec, self._settings, jobs[-1].number + 1 if jobs else 1)
        self._cluster.submit(request)
        return str(request["submission_id"])

    def _tell_to_end(self, job: RayJob) -> None:
        self._cluster.stop(job)

    def _open_output(self, job: RayJob) -> Callable[[], list[str]]:
        lines = _NewLines()
        return lambda: lines.take(self._cluster.read_output(job))

    def _read_code(self, job: RayJob) -> int | None:
        if not job.has_ended:
            return None
        if job.state == "STOPPED":
            return Preempted.exit_code
        return 0 if job.state == "SUCCEEDED" else job.exit_code or RetryableError.exit_code

    def _require_lead(self, spec: JobSpec) -> None:
        """Raise FencedError once another launcher follows the job."""
        token = self._token
        with best_effort("whether another launcher follows the job is not known"):
            kept = storage.read_json_if_exists(_make_launcher_uri(spec)) or {}
            token = kept.get("launcher", token)
        if token != self._token:
            raise FencedError(f"{FencedError.BY_LAUNCHER} by now, and follows its job", where=spec.run_uri)

    def _make_status(self, job: RayJob) -> JobStatus:
        standing = read_job_standing(self._cluster.read_output(job))
        return JobStatus(
            run=RunPaths(job.run_uri).run_id,
            task=job.task,
            job=job.title,
            state=find_job_task(job.task).state if standing.has_nodes else "Queued",
            reason="" if standing.has_nodes else standing.waits_for or job.reason,
            progress=standing.progress,
            workers=f"{job.num_nodes if standing.has_nodes else 0}/{job.num_nodes}",
            age_seconds=time.time() - job.submitted_at,
        )


def build_launcher(config: Config) -> RayLauncher:
    """Build the launcher, without asking Ray anything."""
    return RayLauncher(config)


def build_job_request(spec: JobSpec, settings: RayConfig, number: int) -> dict[str, Any]:
    """Build the body of `POST /api/jobs/` for a run's job of this number."""
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
