"""Jobs on the cluster, looked at and acted on from outside their launcher: status, cancel, suspend, unsuspend, gc.

What is garbage is decided by pure functions; the rest is a few calls.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from kftrain.config import Config
from kftrain.core.progress import Progress, to_log
from kftrain.errors import LaunchError
from kftrain.launch.base import Jobs, JobStatus
from kftrain.launch.kubernetes import observation, ownership, states
from kftrain.launch.kubernetes.job_client import JobClient, NotServedError
from kftrain.launch.kubernetes.kinds.kind import ENDED, SUCCEEDED, Kind, Object
from kftrain.launch.kubernetes.labels import (
    KFP_RUN_LABEL,
    PROGRESS_ANNOTATION,
    QUEUE_LABEL,
    RUN_LABEL,
    SUSPENDED_ANNOTATION,
    TASK_LABEL,
    make_label_value,
    make_selector,
)
from kftrain.launch.kubernetes.lease import delete_own, has_pods_at_work, release_pods
from kftrain.launch.kubernetes.logs import Logs
from kftrain.launch.kubernetes.observation import Observation
from kftrain.run.paths import RunPaths

FINISHED_SECONDS = 3600.0
"""A job that has ended so long ago has no launcher that would still take it away."""

UNSEEN_SECONDS = 2 * 3600.0
"""A job is garbage if its launcher runs in the cluster and has not looked at it for so many seconds."""

ABANDONED_SECONDS = 7 * 24 * 3600.0
"""The same limit for a launcher outside the cluster: a laptop may sleep over a weekend."""

POLL_SECONDS = 1.0
GOING_SECONDS = 600.0
"""Seconds that cancelled pods may take to go: their grace, and a slow node."""

NEXT_SECONDS = 60.0
"""Seconds in which a job that is gone has a successor, if its launcher starts another attempt."""

ENDED_PHASES = frozenset(("Succeeded", "Failed", "Error"))
GOING_PHASES = frozenset(("Pending", "Running"))
"""Phases of a Workflow that has not ended."""


@dataclass(frozen=True)
class Garbage:
    """A job that nobody else will delete, and why."""

    job: str
    uid: str
    version: str
    """Resource version that was judged: a job that somebody has adopted since is left alone."""
    why: str


class ClusterJobs(Jobs):
    """The jobs of a namespace, of some kinds. Connects when it is asked something.

    A run may be named by its id or by the URI of its folder.
    """

    def __init__(self, kinds: Sequence[Kind], namespace: str = "", warn: Progress = to_log) -> None:
        self._kinds = kinds
        self._namespace = namespace
        self._warn = warn

    @functools.cached_property
    def clusters(self) -> list[JobClient]:
        """Clients of the namespace, one for each kind of job. Raises LaunchError."""
        return [JobClient(kind, self._namespace, self._warn) for kind in self._kinds]

    def describe(self, run: str) -> list[JobStatus]:
        """Return the status of the run's jobs: see `Jobs.describe`."""
        jobs = list_run_jobs(self.clusters, RunPaths(run).run_id)
        jobs.sort(key=lambda pair: str(pair[1]["metadata"]["creationTimestamp"]))
        events = [observation.parse_event(event) for event in self.clusters[0].list_warnings()] if jobs else []
        return [_make_status(cluster, job, events, time.time()) for cluster, job in jobs]

    def cancel(self, run: str) -> list[str]:
        """Delete the run's jobs and wait until their pods are gone: see `Jobs.cancel`."""
        run_id = RunPaths(run).run_id
        living = _find_jobs(self.clusters, run_id)
        jobs = [(cluster, str(job["metadata"]["name"])) for cluster, job in living]
        for cluster, job in living:
            cluster.delete_job(job["metadata"]["name"], job["metadata"]["uid"])
        deadline = time.monotonic() + GOING_SECONDS
        while any(has_pods_at_work(cluster, name) for cluster, name in jobs):
            if time.monotonic() > deadline:
                fix = "kubectl get pods -o wide shows the node; delete them with --force --grace-period=0 if it is"
                what = "the job is deleted, but its pods do not go: their node may be dead"
                raise LaunchError(what, where=f"namespace {self.clusters[0].namespace}", value=run_id, fix=fix)
            for cluster, name in jobs:
                release_pods(cluster, name)
            time.sleep(POLL_SECONDS)
        return [name for _, name in jobs]

    def suspend(self, run: str) -> list[str]:
        """Suspend the run's jobs, by their queue where they have one: see `Jobs.suspend`."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return [_set_suspended(cluster, job, now) for cluster, job in _find_jobs(self.clusters, RunPaths(run).run_id)]

    def unsuspend(self, run: str) -> list[str]:
        """Let suspended jobs go on, by their queue where they have one: see `Jobs.unsuspend`."""
        return [_set_suspended(cluster, job, None) for cluster, job in _find_jobs(self.clusters, RunPaths(run).run_id)]

    def logs(self, run: str, task: str, follow: bool, write: Callable[[str], None]) -> None:
        """Write all that the pods have printed: see `Jobs.logs`. Raises BrokenPipeError if nobody reads it."""
        for cluster, job in _find_jobs(self.clusters, RunPaths(run).run_id):
            if job["metadata"]["labels"].get(TASK_LABEL) == task:
                successor: Mapping[str, Any] | None = job
                while successor is not None:
                    latest = _print_logs(cluster, successor, follow, write)
                    successor = _find_successor(cluster, latest) if follow else None


def list_jobs(clusters: Sequence[JobClient], selected: str) -> list[tuple[JobClient, Object]]:
    """List the jobs that match a label selector, of all kinds that the cluster has and shows to this account.

    Raises LaunchError, also where the cluster has or shows none of the kinds.
    """
    jobs, refused = [], []
    for cluster in clusters:
        try:
            jobs += [(cluster, job) for job in cluster.list_jobs(selected)]
        except NotServedError as error:
            refused.append(error)
    if refused and len(refused) == len(clusters):
        raise refused[0]
    return jobs


def list_run_jobs(clusters: Sequence[JobClient], run: str) -> list[tuple[JobClient, Object]]:
    """List the jobs of a run, by its id; an empty id lists those of all runs. Raises LaunchError."""
    return list_jobs(clusters, make_selector(RUN_LABEL, run) if run else RUN_LABEL)


def collect_garbage(clusters: Sequence[JobClient], dry_run: bool = False) -> list[Garbage]:
    """Delete the jobs that nobody else will delete, unless `dry_run`; return them. Raises LaunchError."""
    collected = []
    for cluster, job in list_run_jobs(clusters, ""):
        workflow = _find_workflow_name(job)
        owner = cluster.read_workflow(workflow) if workflow else None
        phase = str(((owner or {}).get("status") or {}).get("phase", ""))
        why = explain_garbage(cluster.kind, job, phase, time.time())
        if why:
            metadata = job["metadata"]
            collected.append((cluster, Garbage(metadata["name"], metadata["uid"], metadata["resourceVersion"], why)))
    for cluster, garbage in () if dry_run else collected:
        cluster.delete_job(garbage.job, garbage.uid, garbage.version)
    return [garbage for _, garbage in collected]


def explain_garbage(kind: Kind, job: Mapping[str, Any], workflow_phase: str, now: float) -> str:
    """Return the reason why nobody else will delete a job; empty where somebody will.

    `workflow_phase`: of the Workflow that owns it; empty where there is none or it may not be read. `now`: seconds
    since the epoch.
    """
    metadata = job["metadata"]
    if "deletionTimestamp" in metadata:
        return ""
    if workflow_phase in ENDED_PHASES:
        return f"its pipeline run has ended: {workflow_phase}"
    annotations = metadata.get("annotations") or {}
    seen = observation.find_last_look(job)
    if workflow_phase in GOING_PHASES:  # a launcher that may not annotate leaves no trace of its looks
        return ""
    ended = kind.read_conditions(job) & ENDED
    if ended and now - seen > FINISHED_SECONDS:
        return f"it has ended: {min(ended)}"
    if SUSPENDED_ANNOTATION in annotations:
        return ""
    limit = UNSEEN_SECONDS if _find_workflow_name(job) else ABANDONED_SECONDS
    return f"no launcher has looked at it for {(now - seen) / 3600:.0f} h" if now - seen > limit else ""


def _find_jobs(clusters: Sequence[JobClient], run: str) -> list[tuple[JobClient, Object]]:
    """List the jobs of a run. Raises LaunchError, with the runs that do have jobs, where there are none."""
    assert run, "no run would mean every run"
    jobs = list_run_jobs(clusters, run)
    if not jobs:
        others = sorted({job["metadata"]["labels"][RUN_LABEL] for _, job in list_run_jobs(clusters, "")})
        fix = f"runs with jobs: {', '.join(others)}" if others else "no run has one here; --namespace names another"
        raise LaunchError("this run has no job", where=f"namespace {clusters[0].namespace}", value=run, fix=fix)
    return jobs


def _make_status(
    cluster: JobClient, job: Mapping[str, Any], events: Sequence[observation.Event], now: float
) -> JobStatus:
    metadata, labels = job["metadata"], job["metadata"]["labels"]
    parsed = observation.parse_job(job, now, cluster.kind)
    pods = observation.keep_newest(observation.parse_pods(cluster.list_pods(metadata["name"]), now, cluster.kind))
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
        state=assessment.word,
        reason="; ".join(reason.text for reason in assessment.reasons),
        progress=progress,
        workers=f"{sum(pod.running for pod in pods)}/{parsed.num_pods}",
        age_seconds=parsed.age_seconds,
    )


def _print_logs(
    cluster: JobClient, job: Mapping[str, Any], follow: bool, write: Callable[[str], None]
) -> Mapping[str, Any]:
    """Write what the pods of a job print; return the job as it was seen last."""
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    kind = cluster.kind
    logs = Logs(cluster, sum(kind.count_replicas(job).values()), write, follow, limited=False)
    has_ended = bool(kind.read_conditions(job) & ENDED)
    while True:
        pods = observation.keep_newest(observation.parse_pods(cluster.list_pods(name), time.time(), kind))
        now = cluster.read_job(name)  # after its pods: where it is still the same, they are not those of a later job
        if now is None or now["metadata"]["uid"] != uid:
            break
        job = now
        logs.follow(pods)
        if not follow or has_ended or logs.is_broken:
            break
        has_ended = bool(kind.read_conditions(now) & ENDED)
        if not has_ended:  # else once more: a last pod may have come after the look at the pods
            time.sleep(POLL_SECONDS)
    logs.drain()
    return job


def _find_successor(cluster: JobClient, job: Mapping[str, Any]) -> Object | None:
    """Wait for the job of the next attempt, where each is a job of its own; None where none comes.

    `job`: as it was seen last: one that has succeeded is gone soon, and with it the sign that nobody starts another.
    """
    name, gone_at = job["metadata"]["name"], float("inf")
    if SUCCEEDED in cluster.kind.read_conditions(job):
        return None
    while cluster.kind.is_one_attempt and time.monotonic() - gone_at < NEXT_SECONDS:
        now = cluster.read_job(name)
        if now is not None and now["metadata"]["uid"] != job["metadata"]["uid"]:
            return now
        if now is not None and SUCCEEDED in cluster.kind.read_conditions(now):
            return None
        gone_at = time.monotonic() if now is not None or math.isinf(gone_at) else gone_at
        time.sleep(POLL_SECONDS)
    return None


def _set_suspended(cluster: JobClient, job: Mapping[str, Any], since: str | None) -> str:
    """Suspend a job, or with `since=None` let it go on; return its name.

    A launcher that follows the job must be able to tell that a person stopped its Workload. So the annotation is
    written before the Workload is stopped, and removed only after the Workload was let go.
    """
    name, suspended = str(job["metadata"]["name"]), since is not None
    workload = _find_workload_name(cluster, job)
    mark: dict[str, Any] = {"metadata": {"annotations": {SUSPENDED_ANNOTATION: since}}}
    if not workload:
        cluster.patch_job(name, {**mark, **cluster.kind.build_suspension(suspended)})
        return name
    if suspended:
        cluster.patch_job(name, mark)
    cluster.patch_workload(workload, {"spec": {"active": not suspended}})  # Kueue undoes what is done to its jobs
    if not suspended:
        cluster.patch_job(name, mark)
    return name


def _find_workload_name(cluster: JobClient, job: Mapping[str, Any]) -> str:
    """Return the name of a job's Workload; empty where the job has no queue. Raises LaunchError if it is not there."""
    if QUEUE_LABEL not in job["metadata"]["labels"]:
        return ""
    workload = cluster.find_workload(job["metadata"]["uid"])
    if workload is None:
        where = f"job {job['metadata']['name']} in namespace {cluster.namespace}"
        fix = "see that you may list workloads.kueue.x-k8s.io, and try again"
        raise LaunchError("its Workload cannot be found, by which Kueue is told", where=where, fix=fix)
    return str(workload["metadata"]["name"])


def _find_workflow_name(job: Mapping[str, Any]) -> str:
    owners = job["metadata"].get("ownerReferences") or []
    return next((str(owner["name"]) for owner in owners if owner["kind"] == "Workflow"), "")


def delete_jobs(clusters: Sequence[JobClient], config: Config, paths: RunPaths, job_id: str = "") -> list[str]:
    """Delete the jobs of a pipeline run that ends: those of a step that was killed are still there, and hold GPUs.

    `job_id`: Kubeflow's id of that pipeline run; another one may be at work on the same run. Raises LaunchError.
    """
    selectors = {make_selector(RUN_LABEL, paths.run_id)}
    if job_id:  # a configuration that lies in a file may name another run by now
        selectors.add(make_selector(KFP_RUN_LABEL, job_id))
    listed = [pair for selected in sorted(selectors) for pair in list_jobs(clusters, selected)]
    jobs = {job["metadata"]["uid"]: (cluster, job) for cluster, job in listed}.values()
    workflow = ownership.find_owner(clusters[0])[0] if jobs else None
    uid, digest = workflow["uid"] if workflow else "", config.digest()
    removed = []
    for cluster, job in jobs:
        name = str(job["metadata"]["name"])
        own = functools.partial(belongs, cluster.kind, workflow_uid=uid, job_id=job_id, config_digest=digest)
        if own(job) and delete_own(cluster, name, own):
            removed.append(f"job {name}")
    return removed


def belongs(kind: Kind, job: Mapping[str, Any], workflow_uid: str, job_id: str, config_digest: str) -> bool:
    """Tell whether a job belongs to this pipeline run, and not to another one that works on the same run.

    A job that names no pipeline run, because its launcher ran on a laptop or in another namespace, is ours if we know
    of no Workflow either and if the job was started for the configuration that the run has now.

    `workflow_uid` and `job_id` are those of this pipeline run, the former empty where it is not known.
    """
    metadata = job["metadata"]
    owners = [owner["uid"] for owner in metadata.get("ownerReferences") or [] if owner["kind"] == "Workflow"]
    label = (metadata.get("labels") or {}).get(KFP_RUN_LABEL, "")
    if owners or label:
        return workflow_uid in owners or (bool(label) and label == make_label_value(job_id))
    return not workflow_uid and kind.read_config_digest(job) == config_digest
