"""The launcher of Ray: a job of its job API whose driver (`ray_driver`) runs one worker a node of a placement group.

It speaks plain HTTP, so that only the cluster needs Ray.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import FIRST_RETRYABLE_CODE, LaunchError, Preempted, RetryableError
from kftrain.launch.base import Request
from kftrain.launch.ray_jobs import RayCluster, RayJob, assess_output, build_entrypoint
from kftrain.launch.ray_settings import RayConfig
from kftrain.launch.scheduler import GOING_SECONDS, JobOutput, JobStanding, SchedulerLauncher
from kftrain.launch.spec import JobSpec, require_workers_alone
from kftrain.process.signals import to_shell_code
from kftrain.run.paths import RunPaths


class RayLauncher(SchedulerLauncher[RayJob]):
    """Runs the jobs of a run on the cluster at `launch.ray.address`."""

    job_words = "a job of Ray"
    scheduler_name = "Ray"
    submit_seconds = 60.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._settings = config.launch.ray
        self._cluster = RayCluster(config.launch.ray.dashboard)

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

    def _find_output(self, run: str, task: str, follow: bool) -> JobOutput:
        jobs = [job for job in self._cluster.list_jobs() if job.belongs_to(run) and job.task == task]
        if not jobs:
            raise LaunchError("Ray knows no such job of this run", where=run, value=task)
        job, code = jobs[-1], self._read_code(jobs[-1])
        is_final = job.state == job.cancelled_state or (code is not None and code < FIRST_RETRYABLE_CODE)
        return JobOutput(job.job_id, self._open_output(job), code is None, is_final)

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
        return 0 if job.state == "SUCCEEDED" else to_shell_code(job.exit_code or RetryableError.exit_code)

    def _assess(self, job: RayJob) -> JobStanding:
        return assess_output(job, self._cluster.read_output(job))


def build_launcher(config: Config) -> RayLauncher:
    """Build the launcher, without asking Ray anything."""
    return RayLauncher(config)


def build_job_request(spec: JobSpec, settings: RayConfig, number: int) -> dict[str, Any]:
    """Build the body of `POST /api/jobs/` for a run's job of this number. Raises LaunchError for other roles."""
    require_workers_alone(spec, "the ray backend")
    gpus = {"GPU": settings.gpus_per_node} if settings.gpus_per_node else {}
    bundle = {"CPU": settings.cpus_per_node, **gpus, **settings.resources}
    where = storage.sha256_text(spec.run_uri)[:8]  # another storage root may have a run of the same id
    return {
        # Counted, not random: of two launchers that submit at once, Ray refuses one.
        "submission_id": f"kftrain-{RunPaths(spec.run_uri).run_id}-{spec.task}-{where}-{number}",
        "entrypoint": build_entrypoint(spec, settings.python, bundle, spec.environment),
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
