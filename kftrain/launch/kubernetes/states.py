"""What an observation means: the state of a job, why it waits, and whether waiting makes sense. All of it is pure.

    Queued -> Admitted -> Scheduling -> Pulling -> Rendezvous -> Training -> Committing
    Succeeded | Failed | Gone

An evaluation takes no steps and commits nothing: once its workers run it is Evaluating. A job that is preempted goes
back to Queued, one that loses a worker to Scheduling or Pulling. The order of trust is that of what was seen on
clusters: pods know most, the job's conditions may contradict each other (Running stands beside Suspended, Restarting is
visible for 70 ms or never), events come late, and only Kueue's Workload knows why a job is not admitted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kftrain.errors import FailureClass
from kftrain.launch.kubernetes.kinds.kind import FAILED, SUCCEEDED, SUSPENDED
from kftrain.launch.kubernetes.observation import Event, Job, Observation, Pod, Workload

SILENT_SECONDS = 30.0
"""A job without any status after this long has an operator that is away or cannot create its pods."""

UNSEEN_SECONDS = 10.0
"""A pod that no scheduler has looked at by then names a scheduler that is not there."""

OVERDUE_SECONDS = 60.0
"""A pod that is there so long after its grace is on a node that does not answer."""

IMAGE_REASONS = frozenset(
    (
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
    )
)
STARTING = frozenset(("", "ContainerCreating", "PodInitializing"))
HOPELESS = frozenset(("InvalidImageName", "ErrImageNeverPull"))
"""Reasons of a container that no time mends."""

VOLUME_EVENTS = frozenset(("FailedMount", "FailedAttachVolume"))
EVALUATE = "evaluate"

NOT_COVERED = re.compile(r"unavailable in ClusterQueue")
"""Kueue's words for a resource that the queue does not have at all."""

TOO_SMALL = re.compile(r"in flavor ([^\s,;]+), [^,;]*> maximum capacity")
"""For a flavor with less than is asked for, from 0.14.2 on with the parts of the request before the sign."""

BUSY = re.compile(r"(?:in flavor ([^\s,;]+), [^,;]*)?more needed")
"""For a flavor that others use now."""

MAY_PASS = re.compile(r"preemption|borrowing limit|skipping flavor|topology \"")
"""For what changes by itself, or for a look at some of the flavors only."""


class State(str, Enum):
    """Where a job is. The value is what users read."""

    QUEUED = "Queued"
    ADMITTED = "Admitted"
    SCHEDULING = "Scheduling"
    PULLING = "Pulling"
    RENDEZVOUS = "Rendezvous"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    COMMITTING = "Committing"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    GONE = "Gone"


@dataclass(frozen=True)
class Reason:
    """Why a job waits."""

    text: str
    failure_class: FailureClass
    hopeless: bool = False
    """Whether no time mends it: the job is ended now."""


@dataclass(frozen=True)
class Assessment:
    """The meaning of one observation."""

    state: State
    reasons: tuple[Reason, ...] = ()

    @property
    def hopeless(self) -> Reason | None:
        """The first reason that ends the job."""
        return next((reason for reason in self.reasons if reason.hopeless), None)

    @property
    def text(self) -> str:
        """The state and its reasons on one line."""
        return ": ".join([self.state.value, "; ".join(reason.text for reason in self.reasons)]).rstrip(": ")


def assess(seen: Observation) -> Assessment:
    """Where the job is, and why it is not further."""
    job = seen.job
    if job is None or job.terminating:
        return Assessment(State.GONE)
    if FAILED in job.conditions:
        return Assessment(State.FAILED)
    if SUCCEEDED in job.conditions:
        return Assessment(State.SUCCEEDED)
    if job.suspended or SUSPENDED in job.conditions:
        return _suspended(job, seen)
    reasons = (*_creation_reasons(job, seen), *_pod_reasons(seen), *_ending_reasons(job, seen))
    return Assessment(_pods_state(job, seen), reasons)


def _suspended(job: Job, seen: Observation) -> Assessment:
    if any(pod.terminating and pod.running and not _is_stuck(pod, seen.lost_nodes) for pod in seen.pods):
        return Assessment(State.COMMITTING)
    if job.suspended_by_user or not job.has_queue:
        return Assessment(State.QUEUED, (Reason("suspended: kftrain unsuspend lets it go on", FailureClass.QUOTA),))
    if seen.workload is not None and seen.workload.admitted:
        return Assessment(State.ADMITTED)
    if seen.workload is None and seen.sees_workloads and job.age_seconds > UNSEEN_SECONDS:
        text = "Kueue has made no Workload of it: is Kueue there, and the job's priority class?"
        return Assessment(State.QUEUED, (Reason(text, FailureClass.QUOTA),))
    return Assessment(State.QUEUED, _workload_reasons(seen.workload))


def _workload_reasons(workload: Workload | None) -> tuple[Reason, ...]:
    if workload is None:
        return ()
    text = f"{workload.reason}: {workload.message}".strip(": ")
    if not workload.active:
        return (Reason(f"Kueue has deactivated it: {text}".rstrip(": "), FailureClass.QUOTA, hopeless=True),)
    never = never_fits(workload.message)
    return (Reason(f"it never fits: {text}" if never else text, FailureClass.QUOTA, hopeless=never),) if text else ()


def never_fits(message: str) -> bool:
    """Whether Kueue says that no amount of waiting admits a request.

    One message tells why each flavor does not take it, and of a flavor it tells every resource. The request fits none
    only where each flavor is too small in some resource, whatever else is busy there.
    """
    too_small, busy = set(TOO_SMALL.findall(message)), set(BUSY.findall(message))
    no_flavor = bool(too_small) and busy <= too_small and not MAY_PASS.search(message)
    return no_flavor or bool(NOT_COVERED.search(message))


def _pods_state(job: Job, seen: Observation) -> State:
    """The state of the worker that is furthest behind. A pod that cannot end keeps the place of its successor."""
    pods = [pod for pod in seen.pods if not pod.ended]
    stuck = [pod for pod in pods if pod.terminating and _is_stuck(pod, seen.lost_nodes)]
    if any(pod.terminating and pod not in stuck for pod in pods) or 0 < seen.target_step <= seen.step:
        return State.COMMITTING
    if len(seen.pods) < job.num_pods or stuck or any(not pod.node for pod in pods):
        return State.SCHEDULING
    if any(not pod.running for pod in pods):
        return State.PULLING
    if job.task == EVALUATE:
        return State.EVALUATING
    return State.TRAINING if seen.step or seen.claimed else State.RENDEZVOUS


def _creation_reasons(job: Job, seen: Observation) -> list[Reason]:
    """Why the operator has not created all pods; a job without any has no status, for ever."""
    if len(seen.pods) >= job.num_pods:
        return []
    failed = [event for event in seen.events if event.uid == job.uid and event.reason in job.creation_failures]
    if failed:
        kind = FailureClass.QUOTA if "exceeded quota" in failed[-1].message else FailureClass.CONFIG
        return [Reason(f"{failed[-1].reason}: {failed[-1].message}", kind)]
    if not job.has_status and job.age_seconds > SILENT_SECONDS:
        text = f"the {job.operator} has not looked at it for {SILENT_SECONDS:.0f} s: is it running?"
        return [Reason(text, FailureClass.OPERATOR)]
    return []


def _ending_reasons(job: Job, seen: Observation) -> list[Reason]:
    """Why a job does not end though all its pods have: its conditions are the operator's to set."""
    if len(seen.pods) < job.num_pods or any(pod.ended_seconds < SILENT_SECONDS for pod in seen.pods):
        return []
    text = f"all its pods have ended, and the {job.operator} has not noticed: is it running?"
    return [Reason(text, FailureClass.OPERATOR)]


def _pod_reasons(seen: Observation) -> list[Reason]:
    """Why pods wait, the same reason of several pods once."""
    found: dict[str, Reason] = {}
    for pod in seen.pods:
        reason = pod_reason(pod, seen.events, seen.lost_nodes)
        if reason is not None:
            found.setdefault(reason.text, reason)
    return list(found.values())


def pod_reason(pod: Pod, events: Sequence[Event], lost_nodes: frozenset[str]) -> Reason | None:
    """Why one pod waits or does not go; None where nothing is wrong."""
    if pod.ended:
        return None
    if pod.terminating:
        return _overdue_reason(pod, lost_nodes)
    if pod.unscheduled:
        return Reason(pod.unscheduled, FailureClass.SCHEDULING)
    if not pod.scheduled and pod.age_seconds > UNSEEN_SECONDS:
        return Reason(f"no scheduler has looked at it: is there one called {pod.scheduler}?", FailureClass.SCHEDULING)
    if pod.waiting_reason not in STARTING:
        text = f"{pod.waiting_reason}: {pod.waiting_message}".strip(": ")
        kind = FailureClass.IMAGE if pod.waiting_reason in IMAGE_REASONS else FailureClass.CONFIG
        return Reason(text, kind, hopeless=pod.waiting_reason in HOPELESS)
    if not pod.has_log:
        mounts = [event for event in events if event.uid == pod.uid and event.reason in VOLUME_EVENTS]
        return Reason(f"{mounts[-1].reason}: {mounts[-1].message}", FailureClass.VOLUME) if mounts else None
    if pod.node in lost_nodes or (pod.running and not pod.ready):
        return Reason(f"{pod.name} runs on node {pod.node}, which does not answer", FailureClass.NODE)
    return None


def _is_stuck(pod: Pod, lost_nodes: frozenset[str]) -> bool:
    """Whether a pod that is being deleted cannot end."""
    return pod.overdue_seconds > OVERDUE_SECONDS or pod.node in lost_nodes


def _overdue_reason(pod: Pod, lost_nodes: frozenset[str]) -> Reason | None:
    if not _is_stuck(pod, lost_nodes):
        return None
    text = f"{pod.name} cannot end because node {pod.node} does not answer: it is replaced when the node is back,"
    return Reason(f"{text} or when somebody force-deletes the pod", FailureClass.NODE)


def stuck_pods(seen: Observation) -> list[Pod]:
    """Pods that may be taken off the API server: their grace is long over, and their node is known to be dead."""
    return [pod for pod in seen.pods if pod.overdue_seconds > OVERDUE_SECONDS and pod.node in seen.lost_nodes]
