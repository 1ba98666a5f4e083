"""Jobs on the cluster, looked at and acted on from outside their launcher: status, cancel, suspend, resume, gc.

What is garbage is decided by pure functions; the rest is a few calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from kftrain.errors import LaunchError
from kftrain.launch.kubernetes import observation, states
from kftrain.launch.kubernetes.annotations import PROGRESS_ANNOTATION, SUSPENDED_ANNOTATION
from kftrain.launch.kubernetes.client import Cluster
from kftrain.launch.kubernetes.kinds.pytorchjob import RUN_LABEL, TASK_LABEL, label_value
from kftrain.launch.kubernetes.lease import any_pods
from kftrain.launch.kubernetes.logs import Logs
from kftrain.launch.kubernetes.observation import Observation

FINISHED_SECONDS = 3600.0
"""A job that has ended so long ago has no launcher that would still take it away."""

UNSEEN_SECONDS = 2 * 3600.0
"""A job whose launcher runs in the cluster and has not looked at it for so long."""

ABANDONED_SECONDS = 7 * 24 * 3600.0
"""A job whose launcher runs somewhere else: a laptop may sleep over a weekend."""

POLL_SECONDS = 1.0
GOING_SECONDS = 600.0
"""How long cancelled pods may take: their grace, and a slow node."""

ENDED_PHASES = frozenset(("Succeeded", "Failed", "Error"))
GOING_PHASES = frozenset(("Pending", "Running"))
"""Of a Workflow."""

ENDED_CONDITIONS = frozenset(("Succeeded", "Failed"))
"""Of a job."""


@dataclass(frozen=True)
class JobStatus:
    """One line of `kftrain status`."""

    run: str
    task: str
    job: str
    state: str
    reason: str
    progress: str
    workers: str
    """How many of them run: `2/4`."""
    age_seconds: float


@dataclass(frozen=True)
class Garbage:
    """A job that nobody will take away."""

    job: str
    uid: str
    version: str
    """As it was looked at: one that somebody has adopted since is left alone."""
    why: str


def status(cluster: Cluster, run: str = "") -> list[JobStatus]:
    """The jobs of the namespace, or of one run, oldest first. Raises LaunchError."""
    jobs = sorted(_jobs(cluster, run), key=lambda job: str(job["metadata"]["creationTimestamp"]))
    events = [observation.parse_event(event) for event in cluster.list_warnings()] if jobs else []
    return [_status(cluster, job, events, time.time()) for job in jobs]


def cancel(cluster: Cluster, run: str) -> list[str]:
    """Deletes the jobs of a run and waits until their pods are gone; returns their names. Raises LaunchError.

    Workers commit a checkpoint first, within the grace of their pods.
    """
    names = []
    for job in _some(cluster, run):
        metadata = job["metadata"]
        cluster.delete_job(metadata["name"], metadata["uid"])
        names.append(str(metadata["name"]))
    deadline = time.monotonic() + GOING_SECONDS
    while any(any_pods(cluster, name) for name in names):
        if time.monotonic() > deadline:
            raise LaunchError(
                "the job is deleted, but its pods do not go: their node may be dead",
                where=f"namespace {cluster.namespace}",
                value=run,
                fix="kubectl get pods -o wide shows the node; delete them with --force --grace-period=0 if it is",
            )
        time.sleep(POLL_SECONDS)
    return names


def suspend(cluster: Cluster, run: str) -> list[str]:
    """Takes the pods of a run's jobs away after a commit, until `resume`; returns names. Raises LaunchError."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return [_set_suspended(cluster, job, now) for job in _some(cluster, run)]


def resume(cluster: Cluster, run: str) -> list[str]:
    """Lets suspended jobs of a run go on, through their queue where they have one. Raises LaunchError."""
    return [_set_suspended(cluster, job, None) for job in _some(cluster, run)]


def print_logs(cluster: Cluster, run: str, task: str, follow: bool, write: Callable[[str], None]) -> None:
    """Writes what the workers of a run's job have printed, all of it; with `follow` until the job has ended or is gone.

    Raises LaunchError, and BrokenPipeError where nobody reads what is written.
    """
    for job in _some(cluster, run):
        if job["metadata"]["labels"].get(TASK_LABEL) == task:
            _print_logs(cluster, job, follow, write)


def collect_garbage(cluster: Cluster, dry_run: bool = False) -> list[Garbage]:
    """Deletes the jobs that nobody will take away; returns them. Raises LaunchError."""
    found = []
    for job in _jobs(cluster, ""):
        workflow = _workflow_name(job)
        read = cluster.read_workflow(workflow) if workflow else None
        phase = str(((read or {}).get("status") or {}).get("phase", ""))
        why = why_garbage(job, phase, time.time())
        if why:
            metadata = job["metadata"]
            found.append(Garbage(metadata["name"], metadata["uid"], metadata["resourceVersion"], why))
    for garbage in () if dry_run else found:
        cluster.delete_job(garbage.job, garbage.uid, garbage.version)
    return found


def why_garbage(job: Mapping[str, Any], workflow_phase: str, now: float) -> str:
    """Why nobody will take a job away; empty where somebody will.

    Args:
        job: The PyTorchJob.
        workflow_phase: Of the Workflow that owns it; empty where it has none or it may not be read.
        now: Seconds since the epoch.
    """
    metadata = job["metadata"]
    if "deletionTimestamp" in metadata:
        return ""
    if workflow_phase in ENDED_PHASES:
        return f"its pipeline run has ended: {workflow_phase}"
    annotations = metadata.get("annotations") or {}
    seen = observation.last_seen(job)
    if workflow_phase in GOING_PHASES:  # a launcher that may not annotate leaves no trace of its looks
        return ""
    ended = observation.parse_job(job, now).conditions & ENDED_CONDITIONS
    if ended and now - seen > FINISHED_SECONDS:
        return f"it has ended: {min(ended)}"
    if SUSPENDED_ANNOTATION in annotations:
        return ""
    limit = UNSEEN_SECONDS if _workflow_name(job) else ABANDONED_SECONDS
    return f"no launcher has looked at it for {(now - seen) / 3600:.0f} h" if now - seen > limit else ""


def _jobs(cluster: Cluster, run: str) -> list[dict[str, Any]]:
    return cluster.list_jobs(f"{RUN_LABEL}={label_value(run)}" if run else RUN_LABEL)


def _some(cluster: Cluster, run: str) -> list[dict[str, Any]]:
    assert run, "no run would mean every run"
    jobs = _jobs(cluster, run)
    if not jobs:
        others = sorted({job["metadata"]["labels"][RUN_LABEL] for job in _jobs(cluster, "")})
        raise LaunchError(
            "this run has no job",
            where=f"namespace {cluster.namespace}",
            value=run,
            fix=f"runs with jobs: {', '.join(others)}" if others else "no run has one here; --namespace names another",
        )
    return jobs


def _status(cluster: Cluster, job: Mapping[str, Any], events: Sequence[observation.Event], now: float) -> JobStatus:
    metadata, labels = job["metadata"], job["metadata"]["labels"]
    parsed = observation.parse_job(job, now)
    pods = observation.parse_workers(cluster.list_pods(metadata["name"]), now)
    workload = cluster.find_workload(parsed.uid) if parsed.has_queue else None
    progress = (metadata.get("annotations") or {}).get(PROGRESS_ANNOTATION, "")
    step, target = observation.parse_progress(progress)
    seen = Observation(
        job=parsed,
        pods=pods,
        events=events,
        workload=observation.parse_workload(workload) if workload else None,
        step=step,
        target_step=target,
        sees_workloads=cluster.sees_workloads,
    )
    assessment = states.assess(seen)
    return JobStatus(
        run=labels[RUN_LABEL],
        task=parsed.task,
        job=metadata["name"],
        state=assessment.state.value,
        reason="; ".join(reason.text for reason in assessment.reasons),
        progress=progress,
        workers=f"{sum(pod.running for pod in pods)}/{parsed.num_workers}",
        age_seconds=parsed.age_seconds,
    )


def _print_logs(cluster: Cluster, job: Mapping[str, Any], follow: bool, write: Callable[[str], None]) -> None:
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    num_workers = observation.parse_job(job, 0.0).num_workers
    logs = Logs(cluster, num_workers, write, follow, limited=False)
    now: Mapping[str, Any] | None = job
    while now is not None and now["metadata"]["uid"] == uid:
        logs.follow(observation.parse_workers(cluster.list_pods(name), time.time()))
        if not follow or logs.is_broken or observation.parse_job(now, time.time()).conditions & ENDED_CONDITIONS:
            break
        time.sleep(POLL_SECONDS)
        now = cluster.read_job(name)
    logs.drain()


def _set_suspended(cluster: Cluster, job: Mapping[str, Any], since: str | None) -> str:
    """A launcher that follows the job must know of an inactive Workload that a person did it.

    So the annotation comes before the Workload is stopped, and goes after it was let go.
    """
    name, suspended = str(job["metadata"]["name"]), since is not None
    workload = _workload_name(cluster, job)
    mark: dict[str, Any] = {"metadata": {"annotations": {SUSPENDED_ANNOTATION: since}}}
    if not workload:
        cluster.patch_job(name, {**mark, "spec": {"runPolicy": {"suspend": suspended}}})
        return name
    if suspended:
        cluster.patch_job(name, mark)
    cluster.patch_workload(workload, {"spec": {"active": not suspended}})  # Kueue undoes what is done to its jobs
    if not suspended:
        cluster.patch_job(name, mark)
    return name


def _workload_name(cluster: Cluster, job: Mapping[str, Any]) -> str:
    """Kueue's Workload of a job; empty where it has no queue. Raises LaunchError where it cannot be found."""
    if not observation.parse_job(job, 0.0).has_queue:
        return ""
    workload = cluster.find_workload(job["metadata"]["uid"])
    if workload is None:
        raise LaunchError(
            "its Workload cannot be found, by which Kueue is told",
            where=f"job {job['metadata']['name']} in namespace {cluster.namespace}",
            fix="see that you may list workloads.kueue.x-k8s.io, and try again",
        )
    return str(workload["metadata"]["name"])


def _workflow_name(job: Mapping[str, Any]) -> str:
    owners = job["metadata"].get("ownerReferences") or []
    return next((str(owner["name"]) for owner in owners if owner["kind"] == "Workflow"), "")
