"""Why a job waits: said once per change, with what no time mends ended at once and the rest at its timeout.

The clock that limits are measured by stands still until a test turns it.
"""

import dataclasses

import pytest
from helpers.fakes.kube_namespace import time_stamp
from helpers.launching import JOB, WORKERS, wait_until

from kftrain.core import storage
from kftrain.core.outages import UNREACHABLE
from kftrain.errors import LaunchError, RetryableError
from kftrain.launch.kubernetes import states, watcher
from kftrain.launch.kubernetes.kinds.kind import Kind
from kftrain.run import attempts

PLACED = ("PodScheduled", "True")


def waiting(reason, message=""):
    return {"node": "node-1", "conditions": [PLACED], "waiting": {"reason": reason, "message": message}}


def unschedulable(message):
    return {"conditions": [("PodScheduled", "False", "Unschedulable", message)]}


REASONS = {
    "image": (waiting("ErrImagePull", "not found: x"), "Pulling: ErrImagePull: not found: x", "image"),
    "image again": (waiting("ImagePullBackOff", "Back-off"), "Pulling: ImagePullBackOff: Back-off", "image"),
    "gpu": (
        unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."),
        "Scheduling: Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        "scheduling",
    ),
    "claim": (
        unschedulable('persistentvolumeclaim "nope" not found'),
        'Scheduling: Unschedulable: persistentvolumeclaim "nope" not found',
        "scheduling",
    ),
    "secret": (
        waiting("CreateContainerConfigError", 'secret "nope" not found'),
        'Pulling: CreateContainerConfigError: secret "nope" not found',
        "configuration",
    ),
}
"""What is known of a pod -> what is said, and the class of the failure at the timeout."""


@pytest.mark.parametrize("case", REASONS)
def test_fault_61_a_reason_is_said_once_and_in_the_error_at_the_timeout(case, launch, namespace, clock):
    known, said, failure_class = REASONS[case]
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    for name in namespace.make_pods(JOB):
        namespace.set_pod(name, **known)
    one.wait_for(f"{JOB}: {said}\n")
    clock.sleep(61.0)
    with pytest.raises(LaunchError) as caught:
        one.finish()
    state, _, reason = said.partition(": ")
    assert f"{state} for longer than launch.kubernetes.start_timeout_seconds = 60 s" in caught.value.line
    assert f"0 of 2 workers run: {reason}" in caught.value.line
    assert one.output.count(f"{JOB}: {said}\n") == 1
    failure = storage.read_json(one.paths.failure)
    assert (failure["failure_class"], failure["exit_code"]) == (failure_class, 13)
    assert failure["fix"] in caught.value.line and storage.read_json(one.paths.error)["line"] == failure["line"]


@pytest.mark.parametrize("reason", ["InvalidImageName", "ErrImageNeverPull"])
def test_what_no_time_mends_ends_the_job_at_once(reason, launch, namespace):
    one = launch()
    wait_until(namespace.jobs)
    namespace.make_pods(JOB)
    namespace.set_pod(WORKERS[1], **waiting(reason, "bad"))
    with pytest.raises(LaunchError, match=f"{reason}: bad"):
        one.finish()
    assert storage.read_json(one.paths.failure)["failure_class"] == "image"


def test_reasons_follow_each_other_within_two_looks(launch, namespace, monkeypatch):
    said = {}
    monkeypatch.setattr(watcher, "to_log", lambda line: said.setdefault(line.split()[-1], namespace.num_looks))
    launch()
    wait_until(namespace.jobs)
    namespace.make_pods(JOB)
    for word in ("first", "second", "third"):
        with namespace.changed:
            namespace.set_pod(WORKERS[0], **unschedulable(word))
            looks = namespace.num_looks
        wait_until(lambda word=word: word in said)
        assert said[word] - looks <= 2


def test_fault_39_a_worker_that_never_joins_is_named(launch, namespace, clock):
    """One of two runs: the job does not train, whatever its condition says."""
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    namespace.make_pods(JOB)
    namespace.run_pod(WORKERS[0])
    namespace.condition(JOB, "Running")
    namespace.set_pod(WORKERS[1], **unschedulable("0/2 nodes are available"))
    one.wait_for("Unschedulable")
    clock.sleep(61.0)
    with pytest.raises(LaunchError, match="1 of 2 workers run: Unschedulable: 0/2 nodes are available"):
        one.finish()


def test_workers_that_never_meet_are_given_up(launch, namespace, clock):
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    one.wait_for("Rendezvous")
    clock.sleep(61.0)
    with pytest.raises(LaunchError, match=r"Rendezvous for longer than .* 2 of 2 workers run"):
        one.finish()
    assert storage.read_json(one.paths.failure)["failure_class"] == "deadline"


def test_a_start_that_takes_long_because_the_data_is_verified_is_not_given_up(launch, namespace, clock):
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    attempts.claim_run(one.paths, 0, 2)
    one.wait_for("Rendezvous")
    clock.sleep(61.0)
    one.wait_for("Training")
    clock.sleep(120.0)
    one.settle(namespace)
    namespace.finish(JOB)
    assert one.finish() == 0


@pytest.mark.parametrize("has_looked", [False, True])
def test_a_start_that_storage_holds_up_is_not_given_up(has_looked, launch, namespace, monkeypatch, clock):
    """Pods come and go while storage is away, here too; afterwards the start has all its time again.

    Storage goes away before the launcher has counted the attempts, or afterwards: then it asks only when it is late.
    """
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    list_names, refused = storage.list_names, []

    def away(uri):
        refused.append(uri)
        raise RetryableError(f"{UNREACHABLE}: ConnectionError: refused", where=uri)

    if has_looked:
        one.wait_for("Scheduling")
        one.settle(namespace)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "list_names", away)
        namespace.make_pods(JOB)
        for _ in range(3):
            num_refused = len(refused)
            clock.sleep(61.0)
            wait_until(lambda before=num_refused: len(refused) > before)
            one.settle(namespace)
            assert one.is_running
    namespace.run_pods(JOB)
    namespace.step(JOB, 1, 20)
    one.wait_for("Training")
    namespace.finish(JOB)
    assert one.finish() == 0
    assert storage.list_names is list_names


def test_a_volume_that_cannot_be_mounted_is_known_from_an_event_only(launch, namespace, clock):
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    for name in namespace.make_pods(JOB):
        namespace.set_pod(name, **waiting("ContainerCreating"))
    uid = namespace.get("pods", WORKERS[1])["metadata"]["uid"]
    namespace.warn("uid-of-another-pod", "FailedMount", "not ours")
    namespace.warn(uid, "FailedMount", 'MountVolume.SetUp failed: configmap "nope" not found')
    one.wait_for('Pulling: FailedMount: MountVolume.SetUp failed: configmap "nope" not found')
    clock.sleep(61.0)
    with pytest.raises(LaunchError, match="FailedMount"):
        one.finish()
    assert storage.read_json(one.paths.failure)["failure_class"] == "volume" and "not ours" not in one.output


@pytest.mark.parametrize(
    ("message", "failure_class"),
    [
        ('pods "x" is forbidden: error looking up service account train/nope', "configuration"),
        ('pods "x" is forbidden: exceeded quota: gpus', "quota"),
    ],
)
@pytest.mark.parametrize("num_made", [0, 1])
def test_pods_that_cannot_be_created_are_known_from_events_of_the_job(
    num_made, message, failure_class, launch, namespace, clock
):
    """The job itself has no status then, for ever; a quota may let some of its pods through."""
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    if num_made:
        namespace.run_pods(JOB)
        namespace.delete("pods", WORKERS[1])
    namespace.warn(namespace.get("pytorchjobs", JOB)["metadata"]["uid"], "FailedCreatePod", message)
    one.wait_for(f"Scheduling: FailedCreatePod: {message}")
    clock.sleep(61.0)
    with pytest.raises(LaunchError, match="FailedCreatePod"):
        one.finish()
    assert storage.read_json(one.paths.failure)["failure_class"] == failure_class


def test_an_operator_that_does_nothing_is_named(launch, namespace, monkeypatch, clock):
    monkeypatch.setattr(states, "SILENT_SECONDS", 0.0)
    one = launch(start_timeout_seconds=60)
    one.wait_for("Scheduling: the training operator has not looked at it for 0 s: is it running?")
    clock.sleep(61.0)
    with pytest.raises(LaunchError, match="the training operator has not looked at it"):
        one.finish()
    assert storage.read_json(one.paths.failure)["failure_class"] == "training operator"


def test_fault_62_an_operator_that_does_not_notice_the_end_is_named(training, namespace):
    """While it is away a job keeps its last status; it is not given up, since it may come back."""
    for name in WORKERS:
        namespace.end_pod(name, 0, seconds_ago=60)
    training.wait_for("all its pods have ended, and the training operator has not noticed")
    namespace.condition(JOB, "Succeeded")
    assert training.finish() == 0


def test_a_scheduler_that_is_not_there_is_named(launch, namespace, monkeypatch, clock):
    monkeypatch.setattr(states, "UNSEEN_SECONDS", 0.0)
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    namespace.make_pods(JOB)
    one.wait_for("no scheduler has looked at it: is there one called default-scheduler?")
    clock.sleep(61.0)
    with pytest.raises(LaunchError):
        one.finish()


# -- Kueue ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def queued(launch, namespace):
    """A launcher whose job waits in a queue; settings as for `launch`."""

    def start(**settings):
        one = launch(queue="team", **settings)
        wait_until(namespace.jobs)
        assert namespace.get("pytorchjobs", JOB)["spec"]["runPolicy"]["suspend"] is True
        return one

    return start


QUOTA = "couldn't assign flavors to pod set worker: insufficient unused quota for nvidia.com/gpu in flavor f, 2 more"
WAITS = [QUOTA, "Pending the preemption of 1 workload(s)", "LocalQueue no-such-queue doesn't exist"]
NEVER = [
    "insufficient quota for nvidia.com/gpu in flavor f, request > maximum capacity (6 > 4)",
    "resource ephemeral-storage unavailable in ClusterQueue",
]


@pytest.mark.parametrize("message", WAITS)
def test_fault_61_a_queue_is_waited_for_with_its_reason(message, queued, namespace, clock):
    one = queued(start_timeout_seconds=20, queue_timeout_seconds=60)
    namespace.queue(JOB, message)
    one.wait_for(f"Queued: Pending: {message}")
    clock.sleep(30.0)
    one.settle(namespace)
    assert one.is_running
    clock.sleep(31.0)
    with pytest.raises(LaunchError) as caught:
        one.finish()
    assert "Queued for longer than launch.kubernetes.queue_timeout_seconds = 60 s" in caught.value.line
    assert message in caught.value.line
    assert storage.read_json(one.paths.failure)["failure_class"] == "quota"


@pytest.mark.parametrize("message", NEVER)
def test_what_never_fits_is_ended_at_once(message, queued, namespace):
    one = queued()
    namespace.queue(JOB, message)
    with pytest.raises(LaunchError, match="it never fits: Pending: "):
        one.finish()
    assert storage.read_json(one.paths.failure)["failure_class"] == "quota"


def test_a_workload_that_kueue_has_deactivated_fails(queued, namespace):
    one = queued()
    namespace.queue(JOB, active=False, Evicted=("True", "DeactivatedDueToRequeuingLimitExceeded"))
    with pytest.raises(LaunchError, match="Kueue has deactivated it: DeactivatedDueToRequeuingLimitExceeded"):
        one.finish()


def test_what_one_look_alone_finds_hopeless_is_looked_at_again(training, namespace, monkeypatch):
    """`kftrain suspend` between the looks at the job and at its Workload; a message about the first flavors only."""
    assess, calls = states.assess, []

    def hopeless_every_other_time(seen):
        calls.append(seen)
        found = assess(seen)
        reason = states.Reason("it never fits", states.FailureClass.QUOTA, hopeless=True)
        return dataclasses.replace(found, reasons=(reason,)) if len(calls) % 2 else found

    monkeypatch.setattr(states, "assess", hopeless_every_other_time)
    wait_until(lambda: len(calls) > 6)
    namespace.finish(JOB)
    assert training.finish() == 0


def test_a_missing_workload_is_named_only_where_workloads_can_be_seen(queued, namespace, server, monkeypatch):
    monkeypatch.setattr(states, "UNSEEN_SECONDS", 0.0)
    server.fail("GET", "/workloads", 503, times=float("inf"))
    one = queued()
    one.wait_for("Queued")
    wait_until(lambda: server.num_failures > 3)
    assert "no Workload" not in one.output
    server._faults.clear()
    one.wait_for("Kueue has made no Workload of it")
    namespace.suspend(JOB, False)
    namespace.finish(JOB)
    assert one.finish() == 0


def test_a_missing_workload_is_not_named_where_workloads_are_forbidden(queued, namespace, server, monkeypatch):
    monkeypatch.setattr(states, "UNSEEN_SECONDS", 0.0)
    server.fail("GET", "/workloads", 403, times=float("inf"))
    one = queued()
    one.wait_for("may not list workloads.kueue.x-k8s.io")
    one.settle(namespace)
    assert "no Workload" not in one.output
    namespace.suspend(JOB, False)
    namespace.finish(JOB)
    assert one.finish() == 0


def test_fault_59_time_in_a_queue_is_no_time_of_training(queued, namespace, clock):
    """Queued longer than it may start or train, preempted, queued again: neither limit is reached."""
    one = queued(start_timeout_seconds=60, training_timeout_seconds=60)
    namespace.queue(JOB, QUOTA)
    one.wait_for("Queued")
    clock.sleep(61.0)
    one.settle(namespace)
    namespace.queue(JOB, Admitted=("True", "Admitted"))
    one.wait_for("Admitted")
    namespace.suspend(JOB, False)
    namespace.run_pods(JOB)
    namespace.step(JOB, 1, 20)
    one.wait_for("Training")
    namespace.queue(JOB, Evicted=("True", "Preempted"))
    namespace.suspend(JOB)
    one.wait_for("Queued: Preempted: Preempted it is")
    clock.sleep(61.0)
    one.settle(namespace)
    namespace.suspend(JOB, False)
    namespace.finish(JOB)
    assert one.finish() == 0


def test_fault_59_a_training_that_takes_too_long_is_ended(launch, namespace, clock):
    one = launch(training_timeout_seconds=60)
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    namespace.step(JOB, 1, 20)
    one.wait_for("Training")
    clock.sleep(61.0)
    with pytest.raises(LaunchError, match="Training for longer than launch"):
        one.finish()
    assert storage.read_json(one.paths.failure)["failure_class"] == "deadline"


def test_a_start_that_was_just_in_time_is_not_given_up(launch, server, namespace, clock):
    """What counts is what a look finds: an outage of the API server may have hidden it for a while."""
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    one.wait_for("Scheduling")
    with namespace.changed:  # nobody gets an answer meanwhile
        asked = len(server.requests)
        wait_until(lambda: any(path.endswith(f"/{JOB}") for _, path in server.requests[asked:]))  # the next look waits
        namespace.run_pods(JOB)
        namespace.step(JOB, 1, 20)
        clock.sleep(61.0)
        attempts.claim_run(one.paths, 0, 4)
    one.wait_for("Training")
    namespace.finish(JOB)
    assert one.finish() == 0


# -- nodes that die ---------------------------------------------------------------------------------------------------


def die(namespace, name, ready="Unknown"):
    """The node of a pod stops; the pod is marked for deletion and cannot end."""
    conditions = [{"type": "Ready", "status": ready}]
    namespace.objects["nodes"]["node-2"] = {"metadata": {"name": "node-2"}, "status": {"conditions": conditions}}
    namespace.set_pod(name, conditions=[("Ready", "False")], phase="Running", running={})


def test_a_node_that_does_not_answer_is_named_before_its_pod_is_taken(training, namespace):
    """For minutes the pod's phase, its container and the job all say Running."""
    die(namespace, WORKERS[1])
    training.wait_for(f"Training: {WORKERS[1]} runs on node node-2, which does not answer")
    namespace.finish(JOB)
    assert training.finish() == 0


def test_a_pod_stuck_on_a_dead_node_is_force_deleted(training, namespace):
    die(namespace, WORKERS[1])
    namespace.holds_pods = True
    namespace.delete("pods", WORKERS[1])
    training.wait_for(f"Scheduling: {WORKERS[1]} cannot end because node node-2 does not answer")
    assert namespace.forced == []
    namespace.get("pods", WORKERS[1])["metadata"]["deletionTimestamp"] = time_stamp(-61)
    wait_until(lambda: namespace.forced)
    assert namespace.forced == [WORKERS[1]]
    training.wait_for(f"{WORKERS[1]} was taken off node node-2, which is dead")
    namespace.holds_pods = False
    namespace.run_pods(JOB)
    namespace.finish(JOB)
    assert training.finish() == 0


def test_a_pod_of_a_job_has_failed_before_it_is_taken_off_its_dead_node(training, namespace, monkeypatch):
    """Else the Job keeps it for ever: its failure policy waits for a phase that no kubelet will write."""
    monkeypatch.setattr(Kind, "replaces_failed_pods", True)
    phases = []
    delete = namespace.delete
    monkeypatch.setattr(
        namespace,
        "delete",
        lambda kind, name, **more: (phases.append(namespace.get(kind, name)), delete(kind, name, **more)),
    )
    die(namespace, WORKERS[1])
    namespace.holds_pods = True
    namespace.delete("pods", WORKERS[1])
    namespace.get("pods", WORKERS[1])["metadata"]["deletionTimestamp"] = time_stamp(-61)
    wait_until(lambda: namespace.forced)
    assert phases[-1]["status"]["phase"] == "Failed"
    namespace.holds_pods = False
    namespace.run_pods(JOB)
    namespace.finish(JOB)
    assert training.finish() == 0


@pytest.mark.parametrize("forbidden", ["get nodes", "delete pods"])
def test_where_that_is_forbidden_the_pod_is_only_named(forbidden, training, server, namespace):
    verb, _, what = forbidden.partition(" ")
    server.fail(verb.upper(), f"/{what}/", 403, times=float("inf"))
    die(namespace, WORKERS[1])
    namespace.holds_pods = True
    namespace.delete("pods", WORKERS[1])
    namespace.get("pods", WORKERS[1])["metadata"]["deletionTimestamp"] = time_stamp(-61)
    training.wait_for("or when somebody force-deletes the pod")
    training.wait_for(f"may not {forbidden}")
    training.settle(namespace)
    assert namespace.forced == [] and training.output.count("may not") == 1
    namespace.holds_pods = False
    namespace.release_pods()
    namespace.finish(JOB)
    assert training.finish() == 0


def test_a_pod_on_a_node_that_answers_is_never_force_deleted(training, namespace):
    die(namespace, WORKERS[1], ready="True")
    namespace.holds_pods = True
    namespace.delete("pods", WORKERS[1])
    namespace.get("pods", WORKERS[1])["metadata"]["deletionTimestamp"] = time_stamp(-61)
    training.wait_for("cannot end because node node-2 does not answer")
    training.settle(namespace)
    assert namespace.forced == []
    namespace.holds_pods = False
    namespace.release_pods()
    namespace.finish(JOB)
    assert training.finish() == 0
