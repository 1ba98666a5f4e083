"""The meaning of an observation: a job's state, why it waits, and whether waiting makes sense. All of it is pure.

    Queued -> Admitted -> Scheduling -> Pulling -> Rendezvous -> Training -> Committing
    Succeeded | Failed | Gone

Instead of Training a job of another task says what it does, as an evaluation does: it takes no steps and commits
nothing, so it is Evaluating once its workers run. A job that is preempted goes
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
from kftrain.run.job_tasks import TRAINING, JobTask, find_job_task

SILENT_SECONDS = 30.0
"""Seconds without any status after which a job's operator is away or cannot create its pods."""

UNSEEN_SECONDS = 10.0
"""Seconds after which a pod that no scheduler has looked at names a scheduler that is not there."""

OVERDUE_SECONDS = 60.0
"""Seconds after the end of its grace from which a pod that is still there is on a node that does not answer."""

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
"""Reasons of a waiting container that no waiting mends."""

VOLUME_EVENTS = frozenset(("FailedMount", "FailedAttachVolume"))

NOT_COVERED = re.compile(r"unavailable in ClusterQueue")
"""Kueue's words for a resource that the queue does not have at all."""

TOO_SMALL = re.compile(r"in flavor ([^\s,;]+), [^,;]*> maximum capacity")
"""Kueue's words for a flavor that is smaller than the request; 0.14.2 and later name the parts of the request, too."""

BUSY = re.compile(r"(?:in flavor ([^\s,;]+), [^,;]*)?more needed")
"""Kueue's words for a flavor that others use now."""

MAY_PASS = re.compile(r"preemption|borrowing limit|skipping flavor|topology \"")
"""Kueue's words for a refusal that may pass, or that comes of a look at only some flavors."""


class State(str, Enum):
    """The state of a job; the value is the word that users read."""

    QUEUED = "Queued"
    ADMITTED = "Admitted"
    SCHEDULING = "Scheduling"
    PULLING = "Pulling"
    RENDEZVOUS = "Rendezvous"
    WORKING = "Working"
    """At its task; users read the task's own word for it."""
    COMMITTING = "Committing"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    GONE = "Gone"


@dataclass(frozen=True)
class Reason:
    """A reason why a job waits, with the class of its failure if the launcher gives up for it."""

    text: str
    failure_class: FailureClass
    hopeless: bool = False
    """True if no waiting mends it, so that the launcher gives the job up."""


@dataclass(frozen=True)
class Assessment:
    """The meaning of one observation: the state of the job and the reasons why it waits."""

    state: State
    reasons: tuple[Reason, ...] = ()
    task: JobTask = TRAINING

    @property
    def hopeless(self) -> Reason | None:
        """The first reason that ends the job; None where waiting makes sense."""
        return next((reason for reason in self.reasons if reason.hopeless), None)

    @property
    def word(self) -> str:
        """The state in the word that users read."""
        return self.task.state if self.state is State.WORKING else self.state.value

    @property
    def text(self) -> str:
        """The state and its reasons on one line."""
        return ": ".join([self.word, "; ".join(reason.text for reason in self.reasons)]).rstrip(": ")


def assess(seen: Observation) -> Assessment:
    """Judge an observation: the state of the job, and the reasons why it is not further."""
    job = seen.job
    if job is None or job.terminating:
        return Assessment(State.GONE)
    if FAILED in job.conditions:
        return Assessment(State.FAILED)
    if SUCCEEDED in job.conditions:
        return Assessment(State.SUCCEEDED)
    if job.suspended or SUSPENDED in job.conditions:
        return _assess_suspended(job, seen)
    reasons = (*_list_creation_reasons(job, seen), *_list_pod_reasons(seen), *_list_ending_reasons(job, seen))
    return Assessment(_find_pods_state(job, seen), reasons, find_job_task(job.task))


def _assess_suspended(job: Job, seen: Observation) -> Assessment:
    if any(pod.terminating and pod.running and not _is_stuck(pod, seen.lost_nodes) for pod in seen.pods):
        return Assessment(State.COMMITTING)
    if job.suspended_by_user or not job.has_queue:
        return Assessment(State.QUEUED, (Reason("suspended: kftrain unsuspend lets it go on", FailureClass.QUOTA),))
    if seen.workload is not None and seen.workload.admitted:
        return Assessment(State.ADMITTED)
    if seen.workload is None and seen.sees_workloads and job.age_seconds > UNSEEN_SECONDS:
        text = "Kueue has made no Workload of it: is Kueue there, and the job's priority class?"
        return Assessment(State.QUEUED, (Reason(text, FailureClass.QUOTA),))
    return Assessment(State.QUEUED, _list_workload_reasons(seen.workload))


def _list_workload_reasons(workload: Workload | None) -> tuple[Reason, ...]:
    if workload is None:
        return ()
    text = f"{workload.reason}: {workload.message}".strip(": ")
    if not workload.active:
        return (Reason(f"Kueue has deactivated it: {text}".rstrip(": "), FailureClass.QUOTA, hopeless=True),)
    never = never_fits(workload.message)
    return (Reason(f"it never fits: {text}" if never else text, FailureClass.QUOTA, hopeless=never),) if text else ()


def never_fits(message: str) -> bool:
    """Tell whether Kueue says that no amount of waiting admits a request.

    One message tells why each flavor refuses the request, resource by resource. The request never fits only if each
    flavor is too small in some resource, whatever else is busy there.
    """
    too_small, busy = set(TOO_SMALL.findall(message)), set(BUSY.findall(message))
    no_flavor = bool(too_small) and busy <= too_small and not MAY_PASS.search(message)
    return no_flavor or bool(NOT_COVERED.search(message))


def _find_pods_state(job: Job, seen: Observation) -> State:
    """Return the state of the worker that is furthest behind; a pod that cannot end holds up its successor."""
    pods = [pod for pod in seen.pods if not pod.ended]
    stuck = [pod for pod in pods if pod.terminating and _is_stuck(pod, seen.lost_nodes)]
    if any(pod.terminating and pod not in stuck for pod in pods) or 0 < seen.target_step <= seen.step:
        return State.COMMITTING
    if len(seen.pods) < job.num_pods or stuck or any(not pod.node for pod in pods):
        return State.SCHEDULING
    if any(not pod.running for pod in pods):
        return State.PULLING
    is_at_work = seen.step or seen.claimed or not find_job_task(job.task).commits
    return State.WORKING if is_at_work else State.RENDEZVOUS


def _list_creation_reasons(job: Job, seen: Observation) -> list[Reason]:
    """Say why the operator has not created all pods; empty where all are there. A job without pods gets no status."""
    if len(seen.pods) >= job.num_pods:
        return []
    failures = [event for event in seen.events if event.reason in job.creation_failures and _is_about_job(event, job)]
    if failures:
        kind = FailureClass.QUOTA if "exceeded quota" in failures[-1].message else FailureClass.CONFIG
        return [Reason(f"{failures[-1].reason}: {failures[-1].message}", kind)]
    if not job.has_status and job.age_seconds > SILENT_SECONDS:
        text = f"the {job.operator} has not looked at it for {SILENT_SECONDS:.0f} s: is it running?"
        return [Reason(text, FailureClass.OPERATOR)]
    return []


def _is_about_job(event: Event, job: Job) -> bool:
    return event.uid == job.uid or (event.name in job.part_names and event.time >= job.created_at)


def _list_ending_reasons(job: Job, seen: Observation) -> list[Reason]:
    """Say why a job does not end though all its pods have: only the operator sets its conditions."""
    if len(seen.pods) < job.num_pods or any(pod.ended_seconds < SILENT_SECONDS for pod in seen.pods):
        return []
    text = f"all its pods have ended, and the {job.operator} has not noticed: is it running?"
    return [Reason(text, FailureClass.OPERATOR)]


def _list_pod_reasons(seen: Observation) -> list[Reason]:
    """List the reasons why pods wait, the same reason of several pods once."""
    reasons: dict[str, Reason] = {}
    for pod in seen.pods:
        reason = find_pod_reason(pod, seen.events, seen.lost_nodes)
        if reason is not None:
            reasons.setdefault(reason.text, reason)
    return list(reasons.values())


def find_pod_reason(pod: Pod, events: Sequence[Event], lost_nodes: frozenset[str]) -> Reason | None:
    """Return the reason why a pod waits or does not go; None where nothing is wrong."""
    if pod.ended:
        return None
    if pod.terminating:
        return _find_overdue_reason(pod, lost_nodes)
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
    if pod.node in lost_nodes or (pod.running and not pod.ready and not pod.has_probe):
        return Reason(f"{pod.name} runs on node {pod.node}, which does not answer", FailureClass.NODE)
    return None


def _is_stuck(pod: Pod, lost_nodes: frozenset[str]) -> bool:
    """Tell whether a pod that is being deleted cannot end, because its node does not answer."""
    return pod.overdue_seconds > OVERDUE_SECONDS or pod.node in lost_nodes


def _find_overdue_reason(pod: Pod, lost_nodes: frozenset[str]) -> Reason | None:
    if not _is_stuck(pod, lost_nodes):
        return None
    text = f"{pod.name} cannot end because node {pod.node} does not answer: it is replaced when the node is back,"
    return Reason(f"{text} or when somebody force-deletes the pod", FailureClass.NODE)


def list_stuck_pods(seen: Observation) -> list[Pod]:
    """List the pods that may be force-deleted: their grace is long over, and their node is known to be dead."""
    return [pod for pod in seen.pods if pod.overdue_seconds > OVERDUE_SECONDS and pod.node in seen.lost_nodes]
