"""What the launcher saw at one moment, as plain values: pods, the job's conditions, events, Kueue's Workload.

Parsing is all that happens here; what it means is decided in `states.py`. All of it is pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kftrain.launch.kubernetes.annotations import SEEN_ANNOTATION, SUSPENDED_ANNOTATION
from kftrain.launch.kubernetes.kinds.kind import Kind
from kftrain.launch.kubernetes.labels import QUEUE_LABEL, TASK_LABEL
from kftrain.launch.spec import WORKER
from kftrain.progress import STEP


@dataclass(frozen=True)
class Pod:
    """What matters of a pod of a job."""

    name: str
    uid: str
    index: int
    """Within its role."""
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
    role: str = WORKER

    @property
    def place(self) -> str:
        """Which of the job's pods it is: `worker-0`. Its successor has the same place."""
        return place_of(self.role, self.index)

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
    """What matters of a job, whatever its kind."""

    uid: str
    age_seconds: float
    conditions: frozenset[str]
    """Those that are true, as `Kind.conditions` calls them."""
    suspended: bool
    has_queue: bool
    has_status: bool
    terminating: bool = False
    suspended_by_user: bool = False
    """By `kftrain suspend`."""
    task: str = ""
    """`train` or `evaluate`."""
    num_pods: int = 1
    """Of all its roles."""
    operator: str = "operator"
    """Who makes its pods."""
    creation_failures: frozenset[str] = frozenset()
    """Reasons of events that say why that one could not."""


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


def parse_pod(item: Mapping[str, Any], now: float, kind: Kind) -> Pod:
    """A pod from the API server's JSON; `now` in seconds since the epoch."""
    metadata, spec, status = item["metadata"], item["spec"], item.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    state: Mapping[str, Any] = next(
        (s.get("state", {}) for s in status.get("containerStatuses") or [] if s["name"] == kind.container), {}
    )
    waiting, ended = state.get("waiting", {}), state.get("terminated", {})
    placed = conditions.get("PodScheduled", {})
    deleted = metadata.get("deletionTimestamp")
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        index=kind.index_of(item) or 0,
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
        role=kind.role_of(item),
    )


def parse_pods(items: Iterable[Mapping[str, Any]], now: float, kind: Kind) -> list[Pod]:
    """The job's own pods among those that have its label: somebody else's may have it, too."""
    return [parse_pod(item, now, kind) for item in items if kind.index_of(item) is not None]


def newest(pods: Iterable[Pod]) -> list[Pod]:
    """Of each place the pod that was created last: some kinds keep the failed ones beside their successors."""
    by_age = sorted(pods, key=lambda pod: (-pod.age_seconds, not pod.ended))
    return list({pod.place: pod for pod in by_age}.values())


def place_of(role: str, index: int) -> str:
    """See `Pod.place`."""
    return f"{role}-{index}"


def parse_job(item: Mapping[str, Any], now: float, kind: Kind) -> Job:
    """A job from the API server's JSON."""
    metadata, status = item["metadata"], item.get("status") or {}
    labels = metadata.get("labels") or {}
    return Job(
        uid=metadata["uid"],
        age_seconds=now - seconds(metadata["creationTimestamp"]),
        conditions=kind.conditions(item),
        suspended=kind.is_suspended(item),
        has_queue=QUEUE_LABEL in labels,
        has_status=bool(status.get("conditions")),
        terminating="deletionTimestamp" in metadata,
        suspended_by_user=SUSPENDED_ANNOTATION in (metadata.get("annotations") or {}),
        task=labels.get(TASK_LABEL, ""),
        num_pods=sum(kind.replicas(item).values()),
        operator=kind.operator,
        creation_failures=kind.creation_failures,
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
