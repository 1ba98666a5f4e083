"""The launcher's view of one moment as plain values: pods, the job's conditions, events, Kueue's Workload.

Parsing is all that happens here; what it means is decided in `states.py`. All of it is pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kftrain.core.progress import STEP
from kftrain.errors import RetryableError
from kftrain.launch.kubernetes.kinds.kind import Kind
from kftrain.launch.kubernetes.labels import QUEUE_LABEL, SEEN_ANNOTATION, SUSPENDED_ANNOTATION, TASK_LABEL
from kftrain.launch.spec import WORKER


@dataclass(frozen=True)
class Pod:
    """The facts about one pod of a job that states and diagnoses are made from."""

    name: str
    uid: str
    index: int
    """Number of the pod within its role, from 0."""
    node: str = ""
    scheduler: str = ""
    age_seconds: float = 0.0
    unscheduled: str = ""
    """The scheduler's words for why no node takes the pod; empty if one does, or no scheduler has looked at it yet."""
    scheduled: bool = False
    waiting_reason: str = ""
    """Reason why the container waits, such as `ErrImagePull`; empty once it runs or has ended."""
    waiting_message: str = ""
    running: bool = False
    exit_code: int | None = None
    """Exit code of the container, once it has ended."""
    end_reason: str = ""
    """Kubernetes' reason for the end of the container, such as `OOMKilled`."""
    end_message: str = ""
    """Termination message of the container, or the last lines of its log."""
    ended: bool = False
    """True once the pod has ended, even if no container ever ran: the kubelet evicts pods that have not started."""
    ended_seconds: float = -1.0
    """Seconds since the container ended; -1 if it has not."""
    terminating: bool = False
    overdue_seconds: float = 0.0
    """Seconds that a deleted pod is still there after the end of its grace; else 0."""
    disruption: str = ""
    """Kubernetes' word for who took the pod away, such as `EvictionByEvictionAPI`, `DeletionByTaintManager`; or ''."""
    ready: bool = True
    role: str = WORKER
    has_probe: bool = False
    """True if the container is asked whether it is ready, so that a pod that is not says nothing about its node."""

    @property
    def place(self) -> str:
        """Role and index, `worker-0`: the name of the pod within its job, which its successor shares."""
        return format_place(self.role, self.index)

    @property
    def has_log(self) -> bool:
        """True once the container has started."""
        return self.running or self.exit_code is not None

    @property
    def failed(self) -> bool:
        """True if the container ended with an exit code other than 0."""
        return self.exit_code not in (None, 0)


@dataclass(frozen=True)
class Job:
    """The facts about one job that states are made from, the same for every kind."""

    uid: str
    age_seconds: float
    conditions: frozenset[str]
    """Conditions that are true, in the words of `Kind.read_conditions`."""
    suspended: bool
    has_queue: bool
    has_status: bool
    terminating: bool = False
    suspended_by_user: bool = False
    """True if the suspension is that of `kftrain suspend`."""
    task: str = ""
    """Name of the job's task; empty without the label."""
    num_pods: int = 1
    """Number of pods of all roles together."""
    operator: str = "operator"
    """Name of the operator that makes the pods, for messages."""
    creation_failures: frozenset[str] = frozenset()
    """Reasons of the events by which that operator says that it could not."""
    part_names: frozenset[str] = frozenset()
    """Names of the objects between job and pods, whose events count as the job's: see `Kind.list_part_names`."""
    created_at: float = 0.0
    """Time of the creation, in seconds since the epoch: an older event is about an earlier job of the name."""
    failure: tuple[int, str] | None = None
    """Exit code and operator's words of a job that failed, where its pods do not tell: see `Kind.read_failure`."""


@dataclass(frozen=True)
class Workload:
    """Kueue's view of the job: whether it is admitted, and if not, why."""

    name: str
    admitted: bool
    active: bool
    reason: str
    """Reason of the condition that says why the job waits or was evicted."""
    message: str


@dataclass(frozen=True)
class Event:
    """A warning event of Kubernetes about a job or a pod."""

    uid: str
    """Uid of the object that the event is about."""
    reason: str
    message: str
    name: str = ""
    """Name of that object."""
    time: float = 0.0
    """Time at which it was seen last, in seconds since the epoch; 0 if it does not say."""


@dataclass(frozen=True)
class Observation:
    """The job, its pods and all that explains them at one moment; `job` is None where the job is gone."""

    job: Job | None
    pods: Sequence[Pod] = ()
    events: Sequence[Event] = ()
    workload: Workload | None = None
    sees_workloads: bool = True
    """True if this account may read Workloads and Kueue's API answers, so that a missing one means something."""
    lost_nodes: frozenset[str] = frozenset()
    """Nodes of these pods that are known not to be ready."""
    step: int = 0
    """The last step that the present attempt's log has shown; 0: none."""
    claimed: bool = False
    """True if the present attempt is known to have claimed the run, though its log shows no step."""
    target_step: int = 0


def parse_pod(item: Mapping[str, Any], now: float, kind: Kind) -> Pod:
    """Parse a pod from the API server's JSON; `now` in seconds since the epoch."""
    metadata, spec, status = item["metadata"], item["spec"], item.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    state: Mapping[str, Any] = next(
        (s.get("state", {}) for s in status.get("containerStatuses") or [] if s["name"] == kind.container), {}
    )
    waiting, ended = state.get("waiting", {}), state.get("terminated", {})
    placed = conditions.get("PodScheduled", {})
    deleted, code = metadata.get("deletionTimestamp"), ended.get("exitCode")
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        index=kind.read_index(item) or 0,
        node=spec.get("nodeName", ""),
        scheduler=spec.get("schedulerName", ""),
        age_seconds=now - parse_seconds(metadata["creationTimestamp"]),
        unscheduled=_format_condition(placed) if placed.get("status") == "False" else "",
        scheduled=bool(placed),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        running="running" in state,
        exit_code=code if kind.has_worker_codes or not code else RetryableError.exit_code,
        end_reason=ended.get("reason", ""),
        end_message=ended.get("message", ""),
        ended="exitCode" in ended or status.get("phase") in ("Succeeded", "Failed"),
        ended_seconds=now - parse_seconds(ended["finishedAt"]) if ended.get("finishedAt") else -1.0,
        terminating=deleted is not None,
        overdue_seconds=max(0.0, now - parse_seconds(deleted)) if deleted else 0.0,
        disruption=conditions.get("DisruptionTarget", {}).get("reason", ""),
        ready=conditions.get("Ready", {}).get("status") != "False",
        role=kind.read_role(item),
        has_probe=any(c.get("readinessProbe") for c in spec.get("containers") or [] if c["name"] == kind.container),
    )


def parse_pods(items: Iterable[Mapping[str, Any]], now: float, kind: Kind) -> list[Pod]:
    """Parse the pods of a job; pods of somebody else that bear the job's label are left out."""
    return [parse_pod(item, now, kind) for item in items if kind.read_index(item) is not None]


def keep_newest(pods: Iterable[Pod]) -> list[Pod]:
    """Return the newest pod of each place: some kinds of job keep failed pods beside their successors."""
    by_age = sorted(pods, key=lambda pod: (-pod.age_seconds, not pod.ended))
    return list({pod.place: pod for pod in by_age}.values())


def format_place(role: str, index: int) -> str:
    """Return the name of a place within a job, `worker-0`: see `Pod.place`."""
    return f"{role}-{index}"


def parse_job(item: Mapping[str, Any], now: float, kind: Kind) -> Job:
    """Parse a job from the API server's JSON; `now` in seconds since the epoch."""
    metadata, status = item["metadata"], item.get("status") or {}
    labels = metadata.get("labels") or {}
    return Job(
        uid=metadata["uid"],
        age_seconds=now - parse_seconds(metadata["creationTimestamp"]),
        conditions=kind.read_conditions(item),
        suspended=kind.is_suspended(item),
        has_queue=QUEUE_LABEL in labels,
        has_status=bool(status),
        terminating="deletionTimestamp" in metadata,
        suspended_by_user=SUSPENDED_ANNOTATION in (metadata.get("annotations") or {}),
        task=labels.get(TASK_LABEL, ""),
        num_pods=sum(kind.count_replicas(item).values()),
        operator=kind.operator,
        creation_failures=kind.creation_failures,
        part_names=frozenset(kind.list_part_names(item)),
        created_at=parse_seconds(metadata["creationTimestamp"]),
        failure=kind.read_failure(item),
    )


def parse_workload(item: Mapping[str, Any]) -> Workload:
    """Parse a Kueue Workload; its reason is that of an eviction, else of the missing quota."""
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
    """Parse a warning event from the API server's JSON; its message becomes one line."""
    about, seen = item["involvedObject"], item.get("lastTimestamp") or item.get("eventTime")
    return Event(
        uid=about.get("uid", ""),
        reason=item.get("reason", ""),
        message=" ".join(item.get("message", "").split()),
        name=about.get("name", ""),
        time=parse_seconds(seen) if seen else 0.0,
    )


def is_node_lost(item: Mapping[str, Any]) -> bool:
    """Tell whether a node is not ready: its kubelet has stopped answering."""
    conditions = {c["type"]: c["status"] for c in item.get("status", {}).get("conditions") or []}
    return conditions.get("Ready") != "True"


def parse_progress(line: str) -> tuple[int, int]:
    """Return the step and the target step of a line about a step; zeros for any other line."""
    match = STEP.search(line)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def find_last_look(job: Mapping[str, Any]) -> float:
    """Return when a launcher last looked at a job, or else when the job was created, in seconds since the epoch."""
    metadata = job["metadata"]
    stamp = (metadata.get("annotations") or {}).get(SEEN_ANNOTATION)
    with contextlib.suppress(ValueError, TypeError):  # anybody can annotate
        if stamp:
            return parse_seconds(stamp)
    return parse_seconds(metadata["creationTimestamp"])


def parse_seconds(stamp: str) -> float:
    """Convert an RFC 3339 time to seconds since the epoch. Raises ValueError for any other text."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def _format_condition(condition: Mapping[str, Any]) -> str:
    return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
