"""The jobs of a Ray cluster by its job API, plain HTTP. A job's metadata says which run it works on."""

from __future__ import annotations

import http
import http.client
import json
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kftrain.core.progress import PREFIX, STEP
from kftrain.errors import LaunchError, RetryableError
from kftrain.launch.scheduler import JobStanding, ScheduledJob, SchedulerAwayError, parse_mark
from kftrain.launch.spec import JobSpec
from kftrain.run.job_tasks import find_job_task

REQUEST_SECONDS = 30.0

WAITS = "Ray waits: "
"""Beginning of a driver's line that says what the job waits for."""

WORKS = "Ray runs the job on "
"""Beginning of a driver's line that says that it waits no longer."""

STOP_FILE_ENV, WORKER_FILE_ENV = "KFTRAIN_RAY_STOP_FILE", "KFTRAIN_RAY_WORKER_FILE"
"""Variables of a node whose worker goes as soon as the first file is there; the second has the worker's process id."""

ENDED = frozenset(("STOPPED", "SUCCEEDED", "FAILED"))
"""Ray's words for jobs of which no process is left."""


@dataclass(frozen=True)
class RayJob(ScheduledJob):
    """A job of kftrain as Ray lists it; its id is Ray's submission id."""

    ended_states = ENDED
    cancelled_state = "STOPPED"

    exit_code: int | None
    """Exit code of its driver; None while there is none, and of a driver that was stopped."""

    @property
    def number(self) -> int:
        """Number of the job among those of its task and run, from 1: the end of its id."""
        return int(self.job_id.rpartition("-")[2])


def parse_job(document: dict[str, Any]) -> RayJob | None:
    """Parse a job as Ray's API writes it; None for a job of somebody else's."""
    try:
        metadata = document["metadata"] or {}
        return RayJob(
            **parse_mark(metadata),
            job_id=str(document["submission_id"]),
            state=str(document["status"]),
            reason=" ".join(str(document["message"] or "").split()),
            exit_code=document.get("driver_exit_code"),
            submitted_at=float(document["start_time"] or 0) / 1000,
            num_nodes=int(metadata["nodes"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


def build_entrypoint(spec: JobSpec, python: str, bundle: Mapping[str, float], environment: Mapping[str, str]) -> str:
    """Build the shell command of a job's driver; `bundle` is what it asks Ray for on each node."""
    document = {
        "command": [python, "-m", "kftrain", *spec.workers.arguments],
        "environment": dict(environment),
        "nodes": spec.workers.replicas,
        "bundle": dict(bundle),
    }
    return f"exec {shlex.join([python, '-m', 'kftrain.launch.ray_driver', json.dumps(document)])}"


def parse_exit_code(message: str) -> int:
    """Return the exit code of a driver from Ray's words about its end; that of a passing failure without any."""
    match = re.search(r"exit code (\d+)", message)
    return int(match[1]) if match else RetryableError.exit_code


def assess_output(job: RayJob, output: str) -> JobStanding:
    """Say how a job stands by all that its driver has printed: whether it has its nodes, or what it waits for."""
    waits_for, has_nodes, progress = job.reason, False, ""
    for line in output.splitlines():
        words = line.partition(PREFIX)[2]
        if words.startswith(WAITS) and not has_nodes:
            waits_for = words.removeprefix(WAITS)
        elif words.startswith(WORKS):
            waits_for, has_nodes = "", True
        elif match := STEP.match(words):
            progress = match[0]
    return JobStanding(find_job_task(job.task).state if has_nodes else "Queued", waits_for, progress, has_nodes)


class RayCluster:
    """The job API of a cluster at an address. Its methods raise SchedulerAwayError, or LaunchError in Ray's words."""

    def __init__(self, address: str) -> None:
        self.address = address

    def read_version(self) -> str:
        """Return the version of the cluster's Ray."""
        return str(self._ask("GET", "api/version")["ray_version"])

    def list_jobs(self) -> list[RayJob]:
        """List kftrain's jobs, those that have ended too, the newest last."""
        jobs = [job for document in self._ask("GET", "api/jobs/") if (job := parse_job(document)) is not None]
        return sorted(jobs, key=lambda job: job.submitted_at)

    def submit(self, request: dict[str, Any]) -> None:
        """Submit a job. Of two requests with the same submission id Ray refuses one."""
        self._ask("POST", "api/jobs/", request)

    def stop(self, job: RayJob) -> None:
        """Send SIGTERM to a job's driver; SIGKILL follows when RAY_JOB_STOP_WAIT_TIME_S of its environment is over."""
        self._ask("POST", f"api/jobs/{job.job_id}/stop")

    def read_output(self, job: RayJob) -> str:
        """Return all that a job's driver has printed; empty where it has not begun, and where Ray has forgotten it."""
        return str(self._ask("GET", f"api/jobs/{job.job_id}/logs", if_absent={}).get("logs") or "")

    def _ask(self, method: str, path: str, content: dict[str, Any] | None = None, if_absent: Any = None) -> Any:
        request = urllib.request.Request(
            f"{self.address}/{path}",
            None if content is None else json.dumps(content).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.NOT_FOUND and if_absent is not None:
                return if_absent
            lines = error.read().decode(errors="replace").strip().splitlines() or [f"HTTP status {error.code}"]
            kind = SchedulerAwayError if error.code >= 500 else LaunchError
            raise kind(re.sub(r"^(\w+\.)*\w+Error: ", "", lines[-1]), where=f"Ray at {self.address}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            fix = "see that the cluster runs, and that this machine reaches it"
            what = f"Ray's dashboard does not answer: {error}"
            raise SchedulerAwayError(what, where="launch.ray.address", value=self.address, fix=fix) from None
