"""Pods that fail and are replaced: what counts against the budget, and what is found out about the last one."""

import threading
import time

import pytest
from helpers.launching import JOB, WORKERS, wait_until

from kftrain.core import storage
from kftrain.core.outages import UNREACHABLE
from kftrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    LaunchError,
    RetryableError,
    UserCodeError,
)
from kftrain.launch import run_training
from kftrain.launch.kubernetes import pod_exits, watcher
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.kubernetes.observation import Pod
from kftrain.launch.kubernetes.pod_exits import PodBudget, PodExits, is_at_work
from kftrain.run import attempts
from kftrain.run.attempts import Claim
from kftrain.run.commit import find_last_step
from kftrain.run.paths import RunPaths


def commit(paths, step, attempt=1):
    """What a committed checkpoint looks like from outside."""
    storage.publish(storage.join(paths.checkpoints, f"step-{step:08d}-a{attempt}", "COMMITTED"), "digest\n")


def fail(namespace, name=WORKERS[0], code=139, **ending):
    """The operator replaces a pod within a tenth of a second, if the launcher has not given the job up."""
    with namespace.changed:
        if namespace.jobs():
            namespace.end_pod(name, code, **ending)
            namespace.recreate(name)


def test_fault_30_pods_that_end_again_and_again_are_given_up(training, namespace):
    """The operator counts nothing under ExitCode. Nothing was claimed here: each of them ended before that."""
    fail(namespace)
    training.settle(namespace)
    assert training.is_running, "one failure is within the budget"
    fail(namespace)
    with pytest.raises(LaunchError) as caught:
        training.finish()
    assert "2 attempts in a row without a new checkpoint, at last: r-train-worker-0 ended with 139" in caught.value.line
    assert storage.read_json(training.paths.failure)["exit_code"] == 13


def test_fault_30_a_new_checkpoint_resets_the_count(training, namespace):
    """Also for the pods that fail a moment after the first one of their attempt."""
    for step in (5, 10, 15):
        fail(namespace)
        training.settle(namespace)
        commit(training.paths, step)
        fail(namespace)
        training.settle(namespace)
        fail(namespace, WORKERS[1], RetryableError.exit_code)
        training.settle(namespace)
        assert training.is_running
    fail(namespace)
    training.settle(namespace)
    fail(namespace)
    with pytest.raises(LaunchError, match="2 attempts in a row"):
        training.finish()


def test_a_checkpoint_without_its_marker_is_no_progress(training, namespace):
    fail(namespace)
    training.settle(namespace)
    storage.publish(storage.join(training.paths.checkpoints, "step-00000005-a1", "manifest.json"), "{}")
    fail(namespace)
    with pytest.raises(LaunchError, match="2 attempts in a row"):
        training.finish()


def test_fault_30_claims_tell_of_failures_that_nobody_saw(launch, server, namespace):
    """Without a watch a pod that is replaced at once is never seen as failed; its successor's claim is."""
    server.fail("GET", "watch=true", 403, times=float("inf"))
    one = launch()
    attempts.claim_run(one.paths, 0, 4)
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    one.settle(namespace)
    with pytest.raises(LaunchError, match="2 attempts in a row without a new checkpoint"):
        for _ in range(6):
            attempts.claim_run(one.paths, 0, 4)
            fail(namespace)
            one.settle(namespace)
        one.finish()


def test_claims_of_earlier_launches_do_not_count(launch, namespace, make_job):
    paths = RunPaths(make_job()[1].run_uri)
    for _ in range(5):
        attempts.claim_run(paths, 0, 4)
    one = launch()
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    attempts.claim_run(paths, 0, 4)
    fail(namespace)
    one.settle(namespace)
    namespace.finish(JOB)
    assert one.finish() == 0


@pytest.mark.parametrize("how", ["evicted", "deleted", "node lost"])
def test_pods_that_are_taken_away_do_not_count_nor_do_their_peers(how, training, namespace):
    for _ in range(4):
        with namespace.changed:
            if how == "evicted":
                why = ("DisruptionTarget", "True", "EvictionByEvictionAPI")
                namespace.set_pod(WORKERS[1], conditions=[why], phase="Running", running={})
                fail(namespace, WORKERS[1], 137)
            elif how == "deleted":
                namespace.delete("pods", WORKERS[1])
                namespace.run_pods(JOB)
            else:
                why = ("DisruptionTarget", "True", "DeletionByTaintManager")
                namespace.set_pod(WORKERS[1], conditions=[why], phase="Running", running={})
                namespace.delete("pods", WORKERS[1], options={"gracePeriodSeconds": 0})
                namespace.run_pods(JOB)
        training.settle(namespace)
        fail(namespace, WORKERS[0], RetryableError.exit_code)
        training.settle(namespace)
    namespace.finish(JOB)
    assert training.finish() == 0


def test_fault_60_suspensions_do_not_count(training, namespace):
    """Also where pods were killed at the end of their grace."""
    for _ in range(3):
        namespace.holds_pods = True
        namespace.suspend(JOB)
        for name in WORKERS:
            namespace.end_pod(name, 137)
        namespace.release_pods()
        namespace.holds_pods = False
        wait_until(lambda: not namespace.pods())
        namespace.suspend(JOB, False)
        namespace.run_pods(JOB)
        training.settle(namespace)
    namespace.finish(JOB)
    assert training.finish() == 0


# -- a launcher that comes later --------------------------------------------------------------------------------------


@pytest.fixture
def adopt(launch, namespace, make_job):
    """Starts a launcher for a job that is at work already: `age_seconds` ago an attempt has claimed the run."""

    def start(age_seconds=0.0, **settings):
        resolved, training = make_job(**settings)
        namespace.create("pytorchjobs", KIND.build(training, resolved))
        namespace.run_pods(JOB)
        document = claim(time.time() - age_seconds, attempt=1)
        storage.create_json(RunPaths(training.run_uri).attempt(1), document.to_dict())
        return launch(**settings)

    return start


def claim(start_time, attempt=1, start_step=0):
    return Claim(attempt=attempt, start_step=start_step, world_size=4, host="h", process_id=1, start_time=start_time)


@pytest.mark.parametrize("log", ["silent", "forbidden"])
def test_a_job_that_had_claimed_when_it_was_adopted_is_not_given_up(log, adopt, server, namespace, clock):
    """Its first step may take long, or its log may be out of reach: the claim is older than this launcher."""
    if log == "forbidden":
        server.fail("GET", "/log", 403, times=float("inf"))
    one = adopt(start_timeout_seconds=60)
    one.wait_for("Rendezvous")
    clock.sleep(61.0)
    one.wait_for("Training")
    clock.sleep(61.0)
    one.settle(namespace)
    namespace.finish(JOB)
    assert one.finish() == 0


def test_the_claim_of_an_attempt_that_was_over_does_not_help_its_successor(adopt, clock):
    """The pods that are there have never met."""
    one = adopt(age_seconds=60.0, start_timeout_seconds=60)
    one.wait_for("Rendezvous")
    clock.sleep(61.0)
    with pytest.raises(LaunchError, match="Rendezvous for longer than"):
        one.finish()


@pytest.mark.parametrize("reads", ["attempts", "checkpoints"])
def test_storage_that_is_away_while_a_job_is_adopted_ends_nothing(reads, adopt, namespace, monkeypatch):
    attempted, list_names = [], storage.list_names

    def away_for_a_while(uri):
        if uri.endswith(reads) and len(attempted) < 3:
            attempted.append(uri)
            raise OSError("no connection")
        return list_names(uri)

    monkeypatch.setattr(storage, "list_names", away_for_a_while)
    one = adopt()
    one.wait_for("warning: the attempts could not be counted: OSError: no connection")
    namespace.step(JOB, 1, 20)
    one.wait_for("Training")
    wait_until(lambda: len(attempted) == 3)
    one.settle(namespace)
    namespace.finish(JOB)
    assert one.finish() == 0


# -- how it ends ------------------------------------------------------------------------------------------------------


def test_fault_28_a_job_that_succeeded_without_its_proof_is_a_failure(server, fast, make_job, namespace):
    """A rank that exits 0 early makes a job Succeeded; only COMPLETE.json makes it a success."""
    resolved, training = make_job()

    def succeed():
        wait_until(namespace.jobs)
        namespace.finish(JOB)

    thread = threading.Thread(target=succeed)
    thread.start()
    with pytest.raises(LaunchError, match="is missing; run the stage"):
        run_training(RunPaths(training.run_uri), resolved)
    thread.join()
    assert (namespace.created, namespace.jobs()) == ([JOB], [])


@pytest.mark.parametrize("kind", [ConfigError, DataError, CheckpointError, UserCodeError, DivergedError])
def test_fault_29_the_code_of_a_permanent_error_arrives_as_it_is(kind, training, namespace):
    """torchrun would make 1 of each of them."""
    storage.publish_json(training.paths.error, kind("what").to_dict())
    namespace.end_pod(WORKERS[0], kind.exit_code)
    namespace.condition(JOB, "Failed")
    assert training.finish() == kind.exit_code
    assert storage.read_json(training.paths.failure)["exit_code"] == kind.exit_code
    assert storage.read_json(training.paths.error)["kind"] == kind.__name__


# -- what is found out ------------------------------------------------------------------------------------------------


def test_memory_that_only_the_watch_has_seen_is_diagnosed(training, namespace):
    """The pod is replaced within the same moment, and its peers only say that they lost a connection."""
    storage.publish_json(training.paths.error, RetryableError("lost a peer").to_dict())
    namespace.write(WORKERS[1], "allocating everything")
    training.settle(namespace)
    for _ in range(2):
        fail(namespace, WORKERS[1], 137, reason="OOMKilled")
        training.settle(namespace)
    with pytest.raises(LaunchError, match="at last: r-train-worker-1 was killed: it used more memory than its limit"):
        training.finish()
    failure = storage.read_json(training.paths.failure)
    assert failure["failure_class"] == "out of memory on the host"
    assert (failure["pod"], failure["exit_code"]) == (WORKERS[1], 13)
    assert "launch.kubernetes.memory" in failure["fix"]
    assert storage.read_json(training.paths.error)["line"] == failure["line"]


def test_what_happened_long_ago_explains_nothing_any_more(launch, namespace, clock):
    """A worker ran out of memory, training went on; much later another one crashes."""
    one = launch("train", "launch.timeout_seconds=60", "launch.max_restarts_without_progress=5")
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    namespace.end_pod(WORKERS[1], 137, reason="OOMKilled")
    one.settle(namespace)
    namespace.recreate(WORKERS[1])
    clock.sleep(61.0 + watcher.NOTICE_SECONDS)
    namespace.end_pod(WORKERS[0], 139)
    namespace.condition(JOB, "Failed")
    assert one.finish() == 139
    assert storage.read_json(one.paths.failure)["pod"] == WORKERS[0]


def test_of_each_worker_the_last_ending_counts(training, namespace):
    """The first attempt ran out of memory, the second one meets something else."""
    fail(namespace, WORKERS[1], 137, reason="OOMKilled")
    training.settle(namespace)
    with namespace.changed:
        fail(namespace, WORKERS[0], 139)
        fail(namespace, WORKERS[1], RetryableError.exit_code)
    training.settle(namespace)
    with pytest.raises(LaunchError, match="at last: r-train-worker-0 ended with 139"):
        training.finish()


def test_the_permanent_error_is_the_cause_not_what_its_peers_met_first(training, namespace):
    storage.publish_json(training.paths.error, DataError("shard 7 is damaged").to_dict())
    with namespace.changed:
        namespace.end_pod(WORKERS[0], RetryableError.exit_code)
        namespace.end_pod(WORKERS[1], DataError.exit_code)
        namespace.condition(JOB, "Failed")
    assert training.finish() == DataError.exit_code
    assert storage.read_json(training.paths.failure)["line"] == "shard 7 is damaged"


def test_a_command_that_is_not_in_the_image_is_named_as_such(training, namespace):
    """Kubernetes ends it with 128, which the operator takes for retryable."""
    for _ in range(2):
        fail(namespace, code=128, reason="StartError", message='exec: "kftrain": not found')
        training.settle(namespace)
    with pytest.raises(LaunchError, match='exec: "kftrain": not found'):
        training.finish()
    assert storage.read_json(training.paths.failure)["failure_class"] == "image"


# -- the parts --------------------------------------------------------------------------------------------------------


def test_an_ending_keeps_what_is_known_of_it():
    pod_exits = PodExits(10.0)
    assert not pod_exits.note_end(Pod("p", "u", 0, running=True), 0.0)
    assert pod_exits.note_end(Pod("p", "u", 0, running=True, terminating=True), 1.0)
    assert not pod_exits.note_end(Pod("p", "u", 0, running=True, terminating=True), 1.0)
    assert pod_exits.note_end(Pod("p", "u", 0, exit_code=137, terminating=True), 1.0)
    assert not pod_exits.note_end(Pod("p", "u", 0, exit_code=137), 2.0)
    (pod,) = pod_exits.list_failed()
    assert (pod.exit_code, pod.disruption) == (137, "deleted")
    pod_exits.note_end(Pod("q", "v", 1, exit_code=0), 3.0)
    pod_exits.note_end(Pod("q", "w", 1, exit_code=1), 4.0)
    pod_exits.note_end(Pod("q", "x", 1, exit_code=2), 11.0)
    assert [pod.uid for pod in pod_exits.list_failed()] == ["u", "w", "x"]
    assert [pod.uid for pod in pod_exits.list_last()] == ["u", "x"]
    pod_exits.note_end(Pod("q", "y", 1, exit_code=3), 12.0)
    assert [pod.uid for pod in pod_exits.list_failed()] == ["w", "x", "y"], "the first one lies too far back"


def test_the_newest_committed_step_is_found(tmp_path, make_job):
    paths = RunPaths(str(tmp_path / "runs" / "x"))
    assert find_last_step(paths) == 0
    commit(paths, 5)
    commit(paths, 10, attempt=3)
    storage.publish(storage.join(paths.checkpoints, "step-00000015-a3", "manifest.json"), "{}")
    assert find_last_step(paths) == 10


def test_storage_that_is_down_loses_no_failure(tmp_path, monkeypatch):
    budget = PodBudget(0, RunPaths(str(tmp_path / "runs" / "x")))
    budget.begin([], 0.0)
    ended = [Pod("p", "u", 0, exit_code=139)]
    with monkeypatch.context() as patch:
        patch.setattr(storage, "list_names", lambda uri: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            budget.count_spent(ended, [])
    assert budget.count_spent(ended, []) == 1
    assert budget.count_spent(ended, []) == 0, "nothing new"


MET_OUTAGE = "kftrain exit code 138 (StorageAwayError): " + (
    f"s3://b/r: {UNREACHABLE} for 60 s: ConnectionRefusedError: refused; see that the store runs"
)


def ended(uid, index, code, message=""):
    return Pod(f"w-{index}", uid, index, exit_code=code, end_message=message)


def test_workers_that_could_not_reach_storage_do_not_count_nor_do_their_peers(tmp_path):
    """Four starts of two workers, one says why, the other has lost its peer; then one failure of their own."""
    budget = PodBudget(0, RunPaths(str(tmp_path / "runs" / "x")))
    budget.begin([], 0.0)
    seen = []
    for start in range(4):
        seen += [
            ended(f"a{start}", 0, 138, MET_OUTAGE),
            ended(f"b{start}", 1, 138, "lost contact with another process"),
        ]
        assert budget.count_spent(seen, []) == 0
    assert budget.count_spent([ended("c", 1, 139)], []) == 1


def test_workers_that_ended_while_storage_was_away_here_too_do_not_count(tmp_path, monkeypatch):
    """Whatever they had time to say; what no outage explains counts all the same."""
    budget = PodBudget(0, RunPaths(str(tmp_path / "runs" / "x")))
    budget.begin([], 0.0)
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(storage, "list_names", lambda uri: 1 / 0)
        for start in range(5):
            seen.append(ended(f"a{start}", 0, 138))
            with pytest.raises(ZeroDivisionError):
                budget.count_spent(seen, [])
    assert budget.count_spent(seen, []) == 0
    assert budget.count_spent([*seen, ended("later", 0, 138)], []) == 1


def test_attempts_that_claimed_and_were_ended_by_an_outage_do_not_count(tmp_path):
    paths = RunPaths(str(tmp_path / "runs" / "x"))
    budget, seen = PodBudget(1, paths), []
    budget.begin([], 0.0)
    for start in range(5):
        attempts.claim_run(paths, 0, 2)
        seen.append(ended(f"a{start}", 0, 138, MET_OUTAGE))
        assert budget.count_spent(seen, []) == 0


def test_when_storage_answers_does_not_matter(tmp_path):
    """An attempt claims, commits and ends while it does not: its progress counts, its failure does, older ones not."""
    paths, pods = RunPaths(str(tmp_path / "runs" / "x")), [Pod("p", "u", 0, age_seconds=10.0)]
    now = time.time()
    for number, (start_time, start_step) in enumerate([(now - 99, 5), (now - 98, 5), (now - 1, 5)], start=1):
        storage.create_json(paths.attempt(number), claim(start_time, number, start_step).to_dict())
    commit(paths, 5)
    late = PodBudget(0, paths)
    late.begin(pods, now)
    assert late.has_claim(), "the third one is at work"
    assert late.count_spent([Pod("p", "u", 0, exit_code=139)], pods) == 1, "not three"
    commit(paths, 10)
    later = PodBudget(0, paths)
    later.begin(pods, now)
    later.begin([], now)
    assert later.has_claim(), "it has begun before"
    assert later.count_spent([Pod("p", "u", 0, exit_code=139)], pods) == 0, "it has made progress"
    after = PodBudget(0, paths)
    after.begin([Pod("p", "v", 0, age_seconds=0.0)], now + pod_exits.CLOCKS_SECONDS)
    assert not after.has_claim(), "all three are over"


def test_an_attempt_is_at_work_if_it_has_begun_after_the_last_of_its_pods():
    pods = [Pod("p", "u", 0, age_seconds=100.0), Pod("q", "v", 1, age_seconds=40.0)]
    assert is_at_work(claim(1000.0), pods, 1030.0)
    assert is_at_work(claim(1000.0), pods, 1040.0 + pod_exits.CLOCKS_SECONDS)
    assert not is_at_work(claim(1000.0), pods, 1041.0 + pod_exits.CLOCKS_SECONDS), "one pod is new"
    assert not is_at_work(claim(1000.0), [], 1000.0), "nobody is there"
