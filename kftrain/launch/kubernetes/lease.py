"""Create a job or adopt the one that is there: at most one live job for each run and task, whoever asks how often.

The name follows from run and task alone, so the API server itself lets only one be created. What stands under that
name decides: the very same specification is adopted, a job that is being deleted or has ended is waited for and
replaced, and any other one is refused with the difference.

A launch that fails on the way leaves nothing behind: what it has created it deletes, also where the answer to the
creation was lost. A job bears the mark of the launch that holds it; who adopts it puts its own there, and from then on
the launch before, which may only have been cut off, leaves it alone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kftrain.core.progress import to_log
from kftrain.errors import LaunchError, OtherJobError
from kftrain.launch.kubernetes.job_client import JobClient
from kftrain.launch.kubernetes.kinds.kind import ENDED, Kind
from kftrain.launch.kubernetes.labels import DIGEST_ANNOTATION, KFP_RUN_LABEL, LAUNCH_ANNOTATION, RUN_LABEL
from kftrain.launch.kubernetes.observation import Pod, is_node_lost, parse_pods
from kftrain.launch.kubernetes.states import OVERDUE_SECONDS

POLL_SECONDS = 1.0
GOING_SECONDS = 900.0
"""Seconds that an older job and its pods may take to go: a pod has its grace, and its node may be slow."""

OWNER_SECONDS = 0.5
"""Seconds that the garbage collector may take to delete a job without its owner: some 20 ms on a quiet cluster."""

MAX_SHOWN = 8
MAX_CHARACTERS = 160


@dataclass(frozen=True)
class Lease:
    """A job, and the mark of the launch that holds it."""

    name: str
    mark: str
    uid: str = ""
    """Uid of the job; empty where the answer to the creation or adoption was lost: the mark tells which job it is."""

    def is_lost(self, job: Mapping[str, Any]) -> bool:
        """Tell whether another launch has adopted or created this job of the lease's name."""
        return read_mark(job) != self.mark


def read_mark(job: Mapping[str, Any]) -> str:
    """Return the mark of the launch that holds a job; empty where the job bears none."""
    return str((job["metadata"].get("annotations") or {}).get(LAUNCH_ANNOTATION, ""))


def create_or_adopt(
    cluster: JobClient, document: dict[str, Any], is_stopped: Callable[[], bool] = lambda: False
) -> Lease | None:
    """Create the job of this document, or adopt the live one of the same specification; return its lease.

    Returns None if `is_stopped` becomes true while an older job is still going. Raises LaunchError, and OtherJobError
    where a job of another specification holds the run.
    """
    creation = _Creation(cluster, document)
    try:
        return _create_or_adopt(cluster, creation, is_stopped)
    except LaunchError as error:
        try:
            creation.take_back()
        except LaunchError as away:
            run = document["metadata"]["labels"][RUN_LABEL]
            left = f"job {document['metadata']['name']} may be there all the same: kftrain cancel {run} deletes it"
            fix = f"{error.fix}; {left}" if error.fix else left
            raise LaunchError(error.what, where=error.where, value=error.value, fix=fix) from away
        raise


def delete_held(cluster: JobClient, lease: Lease) -> bool:
    """Delete the job of a lease; False where another launch holds the job by now. Raises LaunchError."""
    return delete_own(cluster, lease.name, lambda job: not lease.is_lost(job))


def delete_own(cluster: JobClient, name: str, is_own: Callable[[dict[str, Any]], bool]) -> bool:
    """Delete the job of this name as long as it `is_own`; False where it is not. Raises LaunchError.

    The resource version ties the deletion to the job as it was judged, so that nobody can adopt it in between. A job
    changes all the time, so this may take several looks.
    """
    while True:
        job = cluster.read_job(name)
        if job is not None and not is_own(job):
            return False
        if job is None or "deletionTimestamp" in job["metadata"]:
            return True
        cluster.delete_job(name, job["metadata"]["uid"], job["metadata"]["resourceVersion"])


def has_pods_at_work(cluster: JobClient, name: str) -> bool:
    """Tell whether a deleted job of this name or pods that it left behind are still at work; False while it lives."""
    job = cluster.read_job(name)
    if job is not None:  # an operator may have to do something first: then a deletion takes a moment
        return "deletionTimestamp" in job["metadata"]
    return _pods_at_work(cluster, name)


def release_pods(cluster: JobClient, name: str) -> None:
    """Force-delete what is left of a deleted attempt and does not end by itself. Does nothing for other kinds of jobs.

    That is a pod on a dead node, long after its grace, which nobody else looks after; and one that has not begun:
    KubeRay lets it wait in a shell that does not hear SIGTERM.
    """
    if not cluster.kind.is_one_attempt:
        return
    for pod in parse_pods(cluster.list_pods(name), time.time(), cluster.kind):
        if pod.terminating and not pod.ended and (not pod.has_log or _is_on_dead_node(cluster, pod)):
            cluster.force_delete_pod(pod.name, pod.uid)


def _is_on_dead_node(cluster: JobClient, pod: Pod) -> bool:
    node = cluster.read_node(pod.node) if pod.overdue_seconds > OVERDUE_SECONDS else None
    return node is not None and is_node_lost(node)


class _Creation:
    """The creation or adoption of one job, which this launch knows by a mark even where an answer is lost."""

    def __init__(self, cluster: JobClient, document: dict[str, Any]) -> None:
        metadata = document["metadata"]
        self._lease = Lease(metadata["name"], uuid.uuid4().hex)
        annotations = {**metadata["annotations"], LAUNCH_ANNOTATION: self._lease.mark}
        self.document = {**document, "metadata": {**metadata, "annotations": annotations}}
        self._cluster = cluster
        self._was_sent = False
        """True once there may be a job with the mark."""

    def send(self) -> str | None:
        """Create the job and return its uid, or None where a job of this name exists. Raises LaunchError."""
        self._was_sent = True  # before the call: if its answer is lost, `take_back` must look for the job
        return self._cluster.create_job(self.document)

    def adopt(self, existing: dict[str, Any]) -> Lease | None:
        """Put our mark and owner on a job that is there; None where the job has gone meanwhile. Raises LaunchError.

        The launch that created the job, and whoever cleans up after it, leave the job alone from then on. Where this
        account may not change jobs, the lease bears the mark that the job has.
        """
        uid, ours = existing["metadata"]["uid"], self.document["metadata"]
        patch = {
            "uid": uid,
            "annotations": {LAUNCH_ANNOTATION: self._lease.mark},
            "labels": {KFP_RUN_LABEL: ours["labels"].get(KFP_RUN_LABEL)},
            "ownerReferences": ours.get("ownerReferences"),
        }
        self._was_sent = True
        if self._cluster.take_over_job(self._lease.name, patch):
            return Lease(self._lease.name, self._lease.mark, uid)
        job = self._cluster.read_job(self._lease.name)
        if job is None or job["metadata"]["uid"] != uid or _is_over(self._cluster.kind, job):
            return None
        return Lease(self._lease.name, read_mark(job), uid)

    def take_back(self) -> None:
        """Delete the job that this launch has created or adopted, unless somebody has adopted it since.

        Raises LaunchError: then the job may still be there.
        """
        if self._was_sent and delete_held(self._cluster, self._lease):
            to_log(f"job {self._lease.name}: this launch has failed, and leaves nothing behind")


def _create_or_adopt(cluster: JobClient, creation: _Creation, is_stopped: Callable[[], bool]) -> Lease | None:
    document = creation.document
    name = document["metadata"]["name"]
    deadline, is_told = time.monotonic() + GOING_SECONDS, False
    while not is_stopped():
        existing = cluster.read_job(name)
        # Pods outlive their job by their grace; a new job beside them would be a second one at work on the run.
        if existing is None and not _pods_at_work(cluster, name):
            uid = creation.send()
            if uid is not None:
                _require_kept(cluster, document, uid)
                return Lease(name, read_mark(document), uid)
            existing = cluster.read_job(name)
        if existing is not None and not _is_over(cluster.kind, existing):
            _require_same(cluster, document, existing)
            lease = creation.adopt(existing)
            if lease is not None:
                to_log(f"job {name} is there already: following it")
                return lease
            continue
        if existing is not None and "deletionTimestamp" not in existing["metadata"]:
            cluster.delete_job(name, existing["metadata"]["uid"])
        if not is_told:
            is_told = True
            to_log(f"job {name}: waiting for an older job of this run and its pods to go")
        if time.monotonic() > deadline:
            what, fix = "the pods of an older job of this run do not go", "see which node they are on: kftrain status"
            raise LaunchError(what, where=f"job {name} in namespace {cluster.namespace}", fix=fix)
        release_pods(cluster, name)
        time.sleep(POLL_SECONDS)
    return None


def _pods_at_work(cluster: JobClient, name: str) -> bool:
    return any(not pod.ended for pod in parse_pods(cluster.list_pods(name), 0.0, cluster.kind))


def _require_kept(cluster: JobClient, document: dict[str, Any], uid: str) -> None:
    """Raise LaunchError if a job that was just created is gone, as one is whose owner does not exist."""
    name = document["metadata"]["name"]
    if "ownerReferences" in document["metadata"]:
        time.sleep(OWNER_SECONDS)
    job = cluster.read_job(name)
    if job is None or job["metadata"]["uid"] != uid:
        owner = document["metadata"].get("ownerReferences", [{}])[0].get("name", "")
        why = f"its owner, Workflow {owner}, is gone" if owner else "by somebody"
        what = f"the job was deleted right after it was created: {why}"
        where = f"job {name} in namespace {cluster.namespace}"
        raise LaunchError(what, where=where, fix="start the pipeline run again with resume_run")


def _is_over(kind: Kind, job: Mapping[str, Any]) -> bool:
    """Tell whether a job is being deleted or has ended, and so will do nothing more."""
    return "deletionTimestamp" in job["metadata"] or bool(kind.read_conditions(job) & ENDED)


def _require_same(cluster: JobClient, wanted: Mapping[str, Any], existing: Mapping[str, Any]) -> None:
    """Raise OtherJobError if the living job of this name has another specification."""
    digest = (existing["metadata"].get("annotations") or {}).get(DIGEST_ANNOTATION)
    if digest == wanted["metadata"]["annotations"][DIGEST_ANNOTATION]:
        return
    suspend = f"{'.'.join(cluster.kind.suspend_path)}:"  # queues and people change it: no difference of ours
    changes = [line for line in iterate_differences(wanted["spec"], existing["spec"]) if not line.startswith(suspend)]
    shown = "; ".join(changes[:MAX_SHOWN]) or "only in what identifies it"
    what = f"a job with another specification holds this run: {shown}"
    where = f"job {wanted['metadata']['name']} in namespace {cluster.namespace}"
    raise OtherJobError(what, where=where, fix="wait for it, or end it: kftrain cancel RUN")


def iterate_differences(wanted: Any, stored: Any, path: str = "spec") -> Iterator[str]:
    """Yield where `stored` differs from `wanted`, as `path: stored -> wanted`; keys that only it has do not count."""
    if isinstance(wanted, Mapping) and isinstance(stored, Mapping):
        for key, value in wanted.items():
            yield from iterate_differences(value, stored.get(key), f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(stored, list) and len(wanted) == len(stored):
        for index, value in enumerate(wanted):
            yield from iterate_differences(value, stored[index], f"{path}[{index}]")
    elif wanted != stored:
        yield f"{path}: {_shorten_value(stored)} -> {_shorten_value(wanted)}"


def _shorten_value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
