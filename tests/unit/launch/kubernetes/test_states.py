"""What an observation means, and how one is read from the API server's answers."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.launch.kubernetes import observation, states
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.kubernetes.observation import Event, Job, Observation, Pod, Workload
from kftrain.launch.kubernetes.states import State, assess
from kftrain.run.advice import FailureClass

CONDITIONS = ("Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed")
TOO_SMALL = "insufficient quota for cpu in flavor small, request > maximum capacity (16 > 8)"
REASONS = ["", "ContainerCreating", "ErrImagePull", "InvalidImageName", "CrashLoopBackOff", "CreateContainerError"]

seconds = st.sampled_from([0.0, 5.0, 61.0, 1e6])
uids = st.sampled_from(["u1", "u2", "job"])
nodes = st.sampled_from(["", "node-1", "node-2"])
codes = st.sampled_from([None, 0, 1, 137, 143])
pods = st.builds(
    Pod,
    name=st.sampled_from(["w-0", "w-1"]),
    uid=uids,
    index=st.integers(0, 1),
    node=nodes,
    scheduler=st.sampled_from(["", "default-scheduler"]),
    age_seconds=seconds,
    unscheduled=st.sampled_from(["", "Unschedulable: no"]),
    scheduled=st.booleans(),
    waiting_reason=st.sampled_from(REASONS),
    waiting_message=st.sampled_from(["", "why"]),
    running=st.booleans(),
    exit_code=codes,
    ended=st.booleans(),
    ended_seconds=st.sampled_from([-1.0, 0.0, 60.0]),
    terminating=st.booleans(),
    overdue_seconds=seconds,
    disruption=st.sampled_from(["", "PreemptionByScheduler"]),
    ready=st.booleans(),
)
jobs = st.builds(
    Job,
    uid=st.just("job"),
    age_seconds=seconds,
    conditions=st.frozensets(st.sampled_from(CONDITIONS)),
    suspended=st.booleans(),
    has_queue=st.booleans(),
    has_status=st.booleans(),
    terminating=st.booleans(),
    suspended_by_user=st.booleans(),
    task=st.sampled_from(["train", "evaluate", ""]),
    num_pods=st.integers(1, 3),
    creation_failures=st.just(frozenset({"FailedCreatePod"})),
)
workloads = st.builds(
    Workload,
    name=st.just("w"),
    admitted=st.booleans(),
    active=st.booleans(),
    reason=st.sampled_from(["", "Pending", "Preempted"]),
    message=st.sampled_from(["", "wait", TOO_SMALL]),
)
events = st.builds(
    Event, uid=uids, reason=st.sampled_from(["FailedMount", "FailedCreatePod", "BackOff"]), message=st.text(max_size=9)
)
observations = st.builds(
    Observation,
    job=st.none() | jobs,
    pods=st.lists(pods, max_size=3),
    events=st.lists(events, max_size=3),
    workload=st.none() | workloads,
    sees_workloads=st.booleans(),
    lost_nodes=st.frozensets(nodes),
    step=st.integers(0, 3),
    target_step=st.integers(0, 3),
    claimed=st.booleans(),
)


@settings(derandomize=True, max_examples=1000, deadline=None)
@given(observations)
def test_every_observation_means_something(seen):
    """It never raises, says it on one line, and is a function of what was seen."""
    assessment = assess(seen)
    assert assessment == assess(seen)
    assert assessment.text.startswith(assessment.word)
    assert all(reason.text.strip() for reason in assessment.reasons)
    assert assessment.hopeless in (None, *assessment.reasons)


@settings(derandomize=True, max_examples=1000, deadline=None)
@given(observations)
def test_only_the_jobs_own_conditions_end_it(seen):
    """In this order: gone, Failed, Succeeded, suspended, then the pods. Nothing else is an end."""
    state = assess(seen).state
    job = seen.job
    if job is None or job.terminating:
        assert state is State.GONE
    elif "Failed" in job.conditions:
        assert state is State.FAILED
    elif "Succeeded" in job.conditions:
        assert state is State.SUCCEEDED
    elif job.suspended or "Suspended" in job.conditions:
        assert state in (State.QUEUED, State.ADMITTED, State.COMMITTING)
    else:
        assert state not in (State.GONE, State.FAILED, State.SUCCEEDED, State.QUEUED, State.ADMITTED)


@settings(derandomize=True, max_examples=1000, deadline=None)
@given(observations)
def test_a_job_that_trains_has_all_its_workers(seen):
    assessment = assess(seen)
    if assessment.state in (State.WORKING, State.RENDEZVOUS):
        assert len(seen.pods) >= seen.job.num_pods
        assert all(pod.ended or (pod.running and pod.node) for pod in seen.pods)
        assert (assessment.word == "Evaluating") == (seen.job.task == "evaluate")


@settings(derandomize=True, max_examples=1000, deadline=None)
@given(observations)
def test_a_pod_is_taken_away_only_from_a_node_that_is_known_to_be_dead(seen):
    for pod in states.list_stuck_pods(seen):
        assert pod.node in seen.lost_nodes and pod.overdue_seconds > 60


JOB = Job("job", 100.0, frozenset({"Created"}), suspended=False, has_queue=False, has_status=True, task="train")
RUNNING = Pod("w-0", "u", 0, node="n", scheduled=True, running=True)


def look(**known):
    return assess(Observation(**{"job": JOB, "pods": [RUNNING], **known}))


@pytest.mark.parametrize(
    ("known", "state"),
    [
        ({"pods": []}, State.SCHEDULING),
        ({"pods": [Pod("w-0", "u", 0)]}, State.SCHEDULING),
        ({"pods": [dataclasses.replace(RUNNING, running=False)]}, State.PULLING),
        ({}, State.RENDEZVOUS),
        ({"step": 3, "target_step": 10}, State.WORKING),
        ({"claimed": True}, State.WORKING),
        ({"claimed": True, "pods": []}, State.SCHEDULING),
        ({"step": 10, "target_step": 10}, State.COMMITTING),
        ({"step": 3, "pods": [dataclasses.replace(RUNNING, terminating=True)]}, State.COMMITTING),
        ({"step": 3, "pods": [dataclasses.replace(RUNNING, terminating=True, overdue_seconds=61)]}, State.SCHEDULING),
        ({"job": dataclasses.replace(JOB, num_pods=2), "step": 3}, State.SCHEDULING),
        ({"job": dataclasses.replace(JOB, task="evaluate")}, State.WORKING),
    ],
)
def test_the_state_is_that_of_the_worker_that_is_furthest_behind(known, state):
    assert look(**known).state is state


@pytest.mark.parametrize(
    ("task", "text"), [("train", "Training"), ("evaluate", "Evaluating"), ("", "Training"), ("later", "Training")]
)
def test_a_job_that_is_at_work_says_at_what(task, text):
    assert look(job=dataclasses.replace(JOB, task=task), step=3, target_step=10).text == text


def test_the_same_reason_of_many_pods_is_said_once():
    waiting = Pod("w", "u", 0, node="n", scheduled=True, waiting_reason="ErrImagePull", waiting_message="x")
    other = dataclasses.replace(waiting, waiting_message="y")
    assessment = look(pods=[waiting, waiting, other])
    assert assessment.text == "Pulling: ErrImagePull: x; ErrImagePull: y"


def test_a_suspended_job_whose_pods_cannot_end_waits():
    """It commits nothing any more: its node is dead."""
    stuck = dataclasses.replace(RUNNING, terminating=True, overdue_seconds=61)
    suspended = dataclasses.replace(JOB, suspended=True)
    assert look(job=suspended, pods=[stuck]).state is State.QUEUED
    assert look(job=suspended, pods=[dataclasses.replace(stuck, overdue_seconds=0)]).state is State.COMMITTING


def test_a_workload_without_words_has_no_empty_reason():
    queued = dataclasses.replace(JOB, suspended=True, has_queue=True)
    assert look(job=queued, workload=Workload("w", False, True, "", "")).reasons == ()
    (reason,) = look(job=queued, workload=Workload("w", False, False, "", "")).reasons
    assert reason.hopeless and reason.text == "Kueue has deactivated it"
    assert reason.failure_class is FailureClass.QUOTA


# -- what Kueue says: the words of its flavor assigner, from 0.10 to 0.14 ----------------------------------------------

BUSY = "insufficient unused quota for cpu in flavor big, 4 more needed"
PARTS = "previously considered podsets requests (0) + current podset request (10) > maximum capacity (8)"
NEW_TOO_SMALL = f"insufficient quota for cpu in flavor ml.g5.8xlarge, {PARTS}"


def worker(*reasons):
    return "couldn't assign flavors to pod set worker: " + ", ".join(reasons)


@pytest.mark.parametrize(
    "message",
    [
        worker(TOO_SMALL),
        worker(NEW_TOO_SMALL),
        worker(TOO_SMALL, NEW_TOO_SMALL),
        worker(NEW_TOO_SMALL, "insufficient unused quota for memory in flavor ml.g5.8xlarge, 4Gi more needed"),
        worker('Flavor "a" supports only TopologyAwareScheduling', NEW_TOO_SMALL),
        worker("resource nvidia.com/gpu unavailable in ClusterQueue"),
    ],
)
def test_a_request_that_no_flavor_can_ever_take_never_fits(message):
    queued = dataclasses.replace(JOB, suspended=True, has_queue=True)
    (reason,) = look(job=queued, workload=Workload("w", False, True, "Pending", message)).reasons
    assert reason.hopeless and reason.text == f"it never fits: Pending: {message}"


@pytest.mark.parametrize(
    "message",
    [
        worker(BUSY),
        worker(TOO_SMALL, BUSY),
        worker(NEW_TOO_SMALL, BUSY),
        worker(BUSY, NEW_TOO_SMALL),
        worker(TOO_SMALL, "borrowing limit for cpu in flavor big exceeded"),
        worker(TOO_SMALL, 'topology "block" allows to fit only 8 out of 16 pod(s)'),
        worker(TOO_SMALL, "skipping flavor big as it is not found in the nomination mapping for resource cpu"),
        worker(TOO_SMALL) + ". Pending the preemption of 2 workload(s)",
        f"{worker(BUSY)}; couldn't assign flavors to pod set other: {TOO_SMALL}",
        "LocalQueue nowhere doesn't exist",
    ],
)
def test_a_request_that_may_fit_later_waits(message):
    """One flavor that is only in use is enough."""
    queued = dataclasses.replace(JOB, suspended=True, has_queue=True)
    (reason,) = look(job=queued, workload=Workload("w", False, True, "Pending", message)).reasons
    assert not reason.hopeless and reason.text == f"Pending: {message}"


# -- reading ----------------------------------------------------------------------------------------------------------

CREATED = "2026-11-21T10:00:00Z"
NOW = observation.parse_seconds(CREATED)


def pod_json(status=None, **metadata):
    labels = {KIND.index_label: "1"}
    base = {"name": "w-1", "uid": "u", "creationTimestamp": CREATED, "labels": labels}
    return {"metadata": {**base, **metadata}, "spec": {"nodeName": "n"}, "status": status or {}}


def container(**state):
    return {"containerStatuses": [{"name": "istio", "state": {"running": {}}}, {"name": "pytorch", "state": state}]}


def test_a_pod_is_read_with_its_container():
    assert observation.parse_pod(pod_json(), NOW + 3, KIND) == Pod("w-1", "u", 1, node="n", age_seconds=3.0)
    running = observation.parse_pod(pod_json(container(running={"startedAt": CREATED})), NOW, KIND)
    assert running.running and running.has_log and not running.ended
    ended = {"exitCode": 137, "reason": "OOMKilled", "message": "m", "finishedAt": CREATED}
    pod = observation.parse_pod(pod_json(container(terminated=ended)), NOW + 5, KIND)
    assert (pod.exit_code, pod.end_reason, pod.end_message, pod.ended_seconds) == (137, "OOMKilled", "m", 5.0)
    assert pod.failed and pod.ended and pod.has_log
    assert observation.parse_pod(pod_json(container()), NOW, KIND).waiting_reason == ""


def test_a_pod_that_was_evicted_before_it_started_has_ended():
    pod = observation.parse_pod(pod_json({"phase": "Failed", "reason": "Evicted"}), NOW, KIND)
    assert pod.ended and pod.exit_code is None and not pod.has_log


def test_the_time_after_a_pods_grace_is_measured():
    item = pod_json(deletionTimestamp="2026-11-21T10:01:00Z")
    now = observation.parse_pod(item, NOW, KIND)
    assert now.overdue_seconds == 0.0 and now.terminating
    assert observation.parse_pod(item, NOW + 100, KIND).overdue_seconds == 40.0


def test_a_workload_says_why_it_waits():
    def read(active=True, **conditions):
        shown = [{"type": kind, "status": s, "reason": r, "message": m} for kind, (s, r, m) in conditions.items()]
        item = {"metadata": {"name": "w"}, "spec": {"active": active}, "status": {"conditions": shown}}
        parsed = observation.parse_workload(item)
        return parsed.admitted, parsed.active, parsed.reason, parsed.message

    waits = ("False", "Pending", "no quota")
    evicted = ("True", "Preempted", "for another one")
    assert read(QuotaReserved=waits) == (False, True, "Pending", "no quota")
    assert read(QuotaReserved=waits, Evicted=evicted) == (False, True, "Pending", "no quota")
    assert read(Evicted=evicted) == (False, True, "Preempted", "for another one")
    assert read(QuotaReserved=waits, Evicted=evicted, active=False) == (False, False, "Preempted", "for another one")
    assert read(Admitted=("True", "Admitted", "")) == (True, True, "", "")
    assert read() == (False, True, "", "")
