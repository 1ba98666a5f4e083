"""What the launcher saw at one moment, as plain values: pods, the job's conditions, events, Kueue's Workload.

Parsing is all that happens here; what it means is decided in `states.py`. All of it is pure.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kftrain.launch.kubernetes.annotations import SEEN_ANNOTATION, SUSPENDED_ANNOTATION
from kftrain.launch.kubernetes.client import CONTAINER
from kftrain.launch.kubernetes.kinds.pytorchjob import QUEUE_LABEL, TASK_LABEL
from kftrain.progress import STEP

INDEX_LABEL = "training.kubeflow.org/replica-index"


@dataclass(frozen=True)
class Pod:
    """What matters of a worker pod."""

    name: str
    uid: str
    index: int
    node: str = ""
    scheduler: str = ""
    age_seconds: float = 0.0
    unscheduled: str = ""
    """Why no node takes it, in the scheduler's words; empty: a node has it, or no scheduler has looked at it yet."""
    scheduled: bool = False
    waiting_reason: str = ""
    """Of the container, such as `ErrImagePull`; empty: it runs or has ended."""
    waiting_message: str = ""
    running: bool = False
    exit_code: int | None = None
    """Of the container, once it has ended."""
    end_reason: str = ""
    """Such as `OOMKilled`."""
    end_message: str = ""
    """Its termination message, or the last lines of its log."""
    ended: bool = False
    """Whether it has ended, with a container or without one ever: the kubelet evicts pods that have not started."""
    ended_seconds: float = -1.0
    """How long ago its container ended; -1: it has not."""
    terminating: bool = False
    overdue_seconds: float = 0.0
    """How long it has been there after the end of its grace."""
    disruption: str = ""
    """Who took it away: `PreemptionByScheduler`, `EvictionByEvictionAPI`, `DeletionByTaintManager` …"""
    ready: bool = True

    @property
    def has_log(self) -> bool:
        """Whether its container has run."""
        return self.running or self.exit_code is not None

    @property
    def failed(self) -> bool:
        """Whether its container ended with something else than 0."""
        return self.exit_code not in (None, 0)


@dataclass(frozen=True)
class Job:
    """What matters of the PyTorchJob."""

    uid: str
    age_seconds: float
    conditions: frozenset[str]
    """Types of the conditions that are true."""
    suspended: bool
    has_queue: bool
    has_status: bool
    terminating: bool = False
    suspended_by_user: bool = False
    """By `kftrain suspend`."""
    task: str = ""
    """`train` or `evaluate`."""
    num_workers: int = 1


@dataclass(frozen=True)
class Workload:
    """Kueue's view of the job."""

    name: str
    admitted: bool
    active: bool
    reason: str
    """Of the condition that says why it waits or was evicted."""
    message: str


@dataclass(frozen=True)
class Event:
    """A warning."""

    uid: str
    """Of the object that it is about."""
    reason: str
    message: str


@dataclass(frozen=True)
class Observation:
    """Everything at one moment. `job` is None where it is gone."""

    job: Job | None
    pods: Sequence[Pod] = ()
    events: Sequence[Event] = ()
    workload: Workload | None = None
    sees_workloads: bool = True
    """Whether a missing Workload says something: they may be read, and Kueue's API answers."""
    lost_nodes: frozenset[str] = frozenset()
    """Nodes of these pods that are known not to be ready."""
    step: int = 0
    """The last step that the present attempt's log has shown; 0: none."""
    claimed: bool = False
    """Whether the present attempt is known to have claimed the run, though its log shows no step."""
    target_step: int = 0
    verifying: bool = False
    """Whether the workers say that they verify the data, and have said nothing since."""


def parse_pod(item: Mapping[str, Any], now: float) -> Pod:
    """A pod from the API server's JSON; `now` in seconds since the epoch."""
    metadata, spec, status = item["metadata"], item["spec"], item.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    state: Mapping[str, Any] = next(
        (s.get("state", {}) for s in status.get("containerStatuses") or [] if s["name"] == CONTAINER), {}
    )
    waiting, ended = state.get("waiting", {}), state.get("terminated", {})
    placed = conditions.get("PodScheduled", {})
    deleted = metadata.get("deletionTimestamp")
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        index=int((metadata.get("labels") or {}).get(INDEX_LABEL, "0")),
        node=spec.get("nodeName", ""),
        scheduler=spec.get("schedulerName", ""),
        age_seconds=now - seconds(metadata["creationTimestamp"]),
        unscheduled=_sentence(placed) if placed.get("status") == "False" else "",
        scheduled=bool(placed),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        running="running" in state,
        exit_code=ended.get("exitCode"),
        end_reason=ended.get("reason", ""),
        end_message=ended.get("message", ""),
        ended="exitCode" in ended or status.get("phase") in ("Succeeded", "Failed"),
        ended_seconds=now - seconds(ended["finishedAt"]) if ended.get("finishedAt") else -1.0,
        terminating=deleted is not None,
        overdue_seconds=max(0.0, now - seconds(deleted)) if deleted else 0.0,
        disruption=conditions.get("DisruptionTarget", {}).get("reason", ""),
        ready=conditions.get("Ready", {}).get("status") != "False",
    )


def parse_workers(items: Iterable[Mapping[str, Any]], now: float) -> list[Pod]:
    """The workers among the pods that have the job's label."""
    return [parse_pod(item, now) for item in items if is_worker(item)]


def is_worker(item: Mapping[str, Any]) -> bool:
    """Whether a pod has the label that the operator numbers workers with; somebody else's pod may have the job's."""
    label = (item["metadata"].get("labels") or {}).get(INDEX_LABEL, "0")
    return re.fullmatch("[0-9]{1,6}", label) is not None


def parse_job(item: Mapping[str, Any], now: float) -> Job:
    """A PyTorchJob from the API server's JSON."""
    metadata, status = item["metadata"], item.get("status") or {}
    conditions, labels = status.get("conditions") or [], metadata.get("labels") or {}
    return Job(
        uid=metadata["uid"],
        age_seconds=now - seconds(metadata["creationTimestamp"]),
        conditions=frozenset(c["type"] for c in conditions if c["status"] == "True"),
        suspended=bool(item["spec"].get("runPolicy", {}).get("suspend")),
        has_queue=QUEUE_LABEL in labels,
        has_status=bool(conditions),
        terminating="deletionTimestamp" in metadata,
        suspended_by_user=SUSPENDED_ANNOTATION in (metadata.get("annotations") or {}),
        task=labels.get(TASK_LABEL, ""),
        num_workers=item["spec"].get("pytorchReplicaSpecs", {}).get("Worker", {}).get("replicas", 1),
    )


def parse_workload(item: Mapping[str, Any]) -> Workload:
    """A Kueue Workload; its reason is that of an eviction, else of the missing quota."""
    conditions = {c["type"]: c for c in item.get("status", {}).get("conditions") or []}
    quota, evicted = conditions.get("QuotaReserved", {}), conditions.get("Evicted", {})
    inactive = item["spec"].get("active") is False
    shown = evicted if inactive or (evicted.get("status") == "True" and not quota.get("message")) else quota
    return Workload(
        name=item["metadata"]["name"],
        admitted=conditions.get("Admitted", {}).get("status") == "True",
        active=not inactive,
        reason=shown.get("reason", ""),
        message=shown.get("message", ""),
    )


def parse_event(item: Mapping[str, Any]) -> Event:
    """A warning event."""
    return Event(
        item["involvedObject"].get("uid", ""), item.get("reason", ""), " ".join(item.get("message", "").split())
    )


def node_is_lost(item: Mapping[str, Any]) -> bool:
    """Whether a node's kubelet has stopped answering."""
    conditions = {c["type"]: c["status"] for c in item.get("status", {}).get("conditions") or []}
    return conditions.get("Ready") != "True"


def parse_progress(line: str) -> tuple[int, int]:
    """Step and target step of a line about a step; zeros where it is none."""
    found = STEP.search(line)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def last_seen(job: Mapping[str, Any]) -> float:
    """When its launcher last looked at a job, or else when it was created, in seconds since the epoch."""
    metadata = job["metadata"]
    stamp = (metadata.get("annotations") or {}).get(SEEN_ANNOTATION)
    with contextlib.suppress(ValueError, TypeError):  # anybody can annotate
        if stamp:
            return seconds(stamp)
    return seconds(metadata["creationTimestamp"])


def seconds(stamp: str) -> float:
    """An RFC 3339 time in seconds since the epoch. Raises ValueError for any other text."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def _sentence(condition: Mapping[str, Any]) -> str:
    return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
