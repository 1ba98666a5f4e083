"""The life of a job: created or adopted, followed, ended; afterwards it is gone, and so are its pods."""

import os
import signal
import threading
import time

import pytest
from helpers.documents import completion_of, publish_export
from helpers.fakes.kube_namespace import NAME
from helpers.launching import JOB, WORKERS, cluster_jobs, job_client, wait_until

from kftrain.core import outages, storage
from kftrain.errors import ConfigError, FencedError, LaunchError
from kftrain.launch.base import build_launcher
from kftrain.launch.kubernetes import client, launcher, lease, logs, retry
from kftrain.launch.kubernetes.client import Cluster
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.kubernetes.labels import PROGRESS_ANNOTATION, STATE_ANNOTATION
from kftrain.run import attempts


def create(namespace, make_job, **metadata):
    """The job as an earlier launcher has left it; returns its uid."""
    resolved, training = make_job()
    document = KIND.build(training, resolved)
    document["metadata"] |= metadata
    return namespace.create("pytorchjobs", document)["metadata"]["uid"]


def test_a_job_is_created_followed_to_its_success_and_deleted(launch, namespace):
    one = launch()
    wait_until(namespace.jobs)
    one.wait_for("Scheduling")
    names = namespace.make_pods(JOB)
    for name in names:
        namespace.set_pod(name, "node-1", "Pending", [("PodScheduled", "True")], waiting={"reason": "PodInitializing"})
    one.wait_for("Pulling")
    namespace.run_pods(JOB)
    one.wait_for("Rendezvous")
    namespace.write(names[1], "hello from the second")
    namespace.step(JOB, 1, 20)
    one.wait_for("Training")
    namespace.step(JOB, 20, 20)
    one.wait_for("Committing")
    namespace.finish(JOB)
    assert one.finish() == 0
    assert namespace.created == [JOB]
    assert "worker-1: hello from the second" in one.output
    assert not storage.exists(one.paths.failure)


def test_state_and_progress_stand_on_the_job(training, namespace):
    def annotations():
        return namespace.get("pytorchjobs", JOB)["metadata"]["annotations"]

    wait_until(lambda: annotations().get(STATE_ANNOTATION) == "Training")
    assert annotations()[PROGRESS_ANNOTATION].startswith("step 1/20 ")
    namespace.finish(JOB)
    assert training.finish() == 0


def test_an_evaluation_is_at_work_once_its_workers_run(launch, namespace, clock):
    """It takes no steps: its start must not be waited for until the start timeout."""
    one = launch("evaluate", start_timeout_seconds=60)
    wait_until(namespace.jobs)
    namespace.run_pods("r-evaluate")
    one.wait_for("Evaluating")
    clock.sleep(61.0)
    one.settle(namespace)
    namespace.finish("r-evaluate")
    assert one.finish() == 0


def test_a_training_whose_log_shows_no_steps_is_not_given_up(launch, namespace, clock):
    """Logs may be out of reach, and the first recorded step may come late: the claim tells that an attempt works."""
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    one.wait_for("Rendezvous")
    attempts.claim_run(one.paths, 0, 4)
    clock.sleep(61.0)
    one.wait_for("Training")
    clock.sleep(61.0)
    one.settle(namespace)
    namespace.finish(JOB)
    assert one.finish() == 0


# -- what is there already --------------------------------------------------------------------------------------------


def test_fault_57_the_very_same_job_is_adopted_with_its_logs(launch, namespace, make_job):
    uid = create(namespace, make_job)
    namespace.run_pods(JOB)
    namespace.write(WORKERS[0], "said before the second launcher came")
    one = launch()
    one.wait_for("following it")
    one.wait_for("worker-0: said before the second launcher came")
    assert namespace.get("pytorchjobs", JOB)["metadata"]["uid"] == uid
    namespace.finish(JOB)
    assert one.finish() == 0
    assert namespace.created == [JOB]


def test_another_job_of_the_run_is_refused_with_the_difference_and_stays(launch, namespace, make_job):
    create(namespace, make_job)
    one = launch("train", "launch.kubernetes.memory=8Gi", "launch.kubernetes.cpu=4")
    with pytest.raises(FencedError) as caught:
        one.finish()
    where = "spec.pytorchReplicaSpecs.Worker.template.spec.containers[0].resources.limits"
    assert "a job with another specification holds this run" in caught.value.line
    assert f"{where}.memory: 4Gi -> 8Gi" in caught.value.line and f"{where}.cpu: 2 -> 4" in caught.value.line
    assert namespace.jobs() == [JOB]
    namespace.delete("pytorchjobs", JOB)


def test_a_job_that_is_being_deleted_is_waited_for(launch, namespace, make_job):
    create(namespace, make_job, deletionTimestamp="2026-11-21T10:00:00Z")
    one = launch()
    one.wait_for("waiting for an older job of this run and its pods to go")
    assert len(namespace.created) == 1
    namespace.delete("pytorchjobs", JOB)
    wait_until(lambda: len(namespace.created) == 2)
    namespace.finish(JOB)
    assert one.finish() == 0


@pytest.mark.parametrize("condition", ["Failed", "Succeeded"])
def test_a_job_that_has_ended_is_replaced_once_its_pods_are_gone(condition, launch, namespace, make_job):
    create(namespace, make_job)
    namespace.run_pods(JOB)
    namespace.condition(JOB, condition)
    namespace.holds_pods = True
    one = launch()
    one.wait_for("waiting for an older job")
    wait_until(lambda: not namespace.jobs())
    time.sleep(0.2)
    assert len(namespace.created) == 1 and namespace.pods() == WORKERS
    namespace.holds_pods = False
    namespace.release_pods()
    wait_until(lambda: len(namespace.created) == 2)
    namespace.finish(JOB)
    assert one.finish() == 0


def test_pods_that_ended_without_a_container_do_not_hold_up_a_new_job(launch, namespace, make_job):
    """The kubelet evicts pods that have not started: they have a phase and no exit code."""
    create(namespace, make_job)
    namespace.make_pods(JOB)
    for name in WORKERS:
        namespace.set_pod(name, "node-1", "Failed")
        namespace.get("pods", name)["metadata"]["ownerReferences"] = []
    namespace.delete("pytorchjobs", JOB)
    one = launch()
    wait_until(lambda: len(namespace.created) == 2)
    for name in WORKERS:
        namespace.delete("pods", name)
    namespace.finish(JOB)
    assert one.finish() == 0


def test_pods_that_never_go_are_an_error(launch, namespace, make_job, monkeypatch):
    create(namespace, make_job)
    namespace.run_pods(JOB)
    namespace.holds_pods = True
    namespace.delete("pytorchjobs", JOB)
    monkeypatch.setattr(lease, "GOING_SECONDS", 0.3)
    with pytest.raises(LaunchError, match="the pods of an older job of this run do not go"):
        launch().finish()
    namespace.release_pods()


# -- how it ends ------------------------------------------------------------------------------------------------------


def test_a_failed_job_gives_the_code_of_the_runs_error(training, namespace):
    storage.publish_json(training.paths.error, {**ConfigError("wrong").to_dict(), "rank": 3})
    namespace.finish(JOB, code=10)
    assert training.finish() == 10
    failure = storage.read_json(training.paths.failure)
    assert (failure["failure_class"], failure["line"], failure["rank"]) == ("configuration", "wrong", 3)
    assert storage.read_json(training.paths.error)["kind"] == "ConfigError"


def test_a_failed_job_without_an_error_gives_the_code_of_its_pod(training, namespace):
    namespace.write(WORKERS[1], "the last words")
    namespace.end_pod(WORKERS[1], 1, message="Traceback: no module named torch")
    namespace.condition(JOB, "Failed")
    assert training.finish() == 1
    failure = storage.read_json(training.paths.failure)
    assert failure["failure_class"] == "bug" and failure["pod"] == WORKERS[1] and failure["node"] == "node-2"
    assert "no module named torch" in failure["line"] and failure["last_lines"] == ["the last words"]
    error = storage.read_json(training.paths.error)
    assert (error["kind"], error["exit_code"], error["line"]) == ("", 1, failure["line"])


def test_a_job_that_somebody_deleted_is_an_error(training, namespace):
    namespace.delete("pytorchjobs", JOB)
    with pytest.raises(LaunchError, match="somebody deleted the job"):
        training.finish()
    assert storage.read_json(training.paths.failure)["failure_class"] == "deleted"
    assert storage.read_json(training.paths.error)["exit_code"] == 13


@pytest.mark.parametrize("storage_answers", [True, False])
def test_a_job_that_had_succeeded_when_it_was_taken_away_is_a_success(
    storage_answers, training, namespace, make_job, monkeypatch
):
    """A laptop sleeps while its job succeeds and is removed; what proves the success stays."""
    one, completion = training, completion_of(training.paths, make_job()[0], "d")
    storage.publish_json(one.paths.shards, {"schema_version": 1, "manifest_uri": "m", "dataset_digest": "d"})
    publish_export(completion.export_uri)
    storage.publish_json(one.paths.complete, completion.to_dict())
    if not storage_answers:
        monkeypatch.setattr(storage, "read_bytes", unanswered)
    with namespace.changed:
        namespace.finish(JOB)
        namespace.delete("pytorchjobs", JOB)
    if storage_answers:
        assert one.finish() == 0
        assert "it is gone, and everything that it was to produce is there" in one.output
        assert not storage.exists(one.paths.failure)
    else:
        with pytest.raises(LaunchError, match="somebody deleted the job"):
            one.finish()
        assert (
            "warning: what proves the job's success could not be read: storage cannot be reached: ConnectionError"
            in one.output
        )


def unanswered(uri):
    raise ConnectionError(f"{uri} does not answer")


def test_a_job_that_somebody_replaced_is_not_taken_for_ours(training, namespace, make_job):
    with namespace.changed:
        namespace.delete("pytorchjobs", JOB)
        create(namespace, make_job)
        namespace.condition(JOB, "Succeeded")
    with pytest.raises(FencedError, match="another launcher holds this run"):
        training.finish()
    assert namespace.jobs() == [JOB], "the other one stays"
    assert not storage.exists(training.paths.failure) and not storage.exists(training.paths.error)
    namespace.delete("pytorchjobs", JOB)


def test_the_launcher_returns_when_the_pods_are_gone(training, server, namespace, monkeypatch):
    """Until then their logs are shown, over connections that break, too."""
    monkeypatch.setattr(logs, "JOIN_SECONDS", 0.1)
    namespace.holds_pods = True
    namespace.condition(JOB, "Failed")
    wait_until(lambda: not namespace.jobs())
    server.cut_streams()
    namespace.write(WORKERS[0], "checkpoint committed on the way out")
    training.wait_for("checkpoint committed on the way out")
    time.sleep(0.4)
    assert training.is_running
    namespace.release_pods()
    assert training.finish() == 1


def test_sigterm_deletes_the_job(server, fast, make_job, namespace):
    """In the main thread, by a real signal."""
    resolved, training = make_job()
    before = signal.getsignal(signal.SIGTERM)

    def terminate():
        wait_until(namespace.jobs)
        namespace.run_pods(JOB)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    launcher = build_launcher(resolved)
    assert launcher.run(training) == 143
    thread.join()
    assert launcher.interrupted and signal.getsignal(signal.SIGTERM) is before
    assert (namespace.jobs(), namespace.pods()) == ([], [])


class Poisoned:
    """A lock's user that a signal has interrupted: whoever calls it from the handler waits for ever."""

    def __getattr__(self, name):
        raise AssertionError(f"a signal handler called {name}")


def test_the_signal_handler_takes_no_lock(server, make_job):
    launcher = build_launcher(make_job()[0])
    launcher._wake = launcher.clusters = Poisoned()
    launcher._on_signal(signal.SIGTERM, None)
    assert launcher.interrupted


def test_a_stop_is_heard_while_an_older_job_is_waited_for(launch, namespace, make_job):
    create(namespace, make_job, deletionTimestamp="2026-11-21T10:00:00Z")
    one = launch()
    one.wait_for("waiting for an older job")
    one.launcher.interrupted = True
    assert one.finish() == 143
    assert len(namespace.created) == 1
    namespace.delete("pytorchjobs", JOB)


@pytest.mark.parametrize("problem", ["away", "503", "silent"])
def test_a_stop_is_heard_while_the_api_server_does_not_answer(problem, fast, launch, server, namespace, monkeypatch):
    """It must not wait for the end of the outage: whoever stopped it kills it half a minute later."""
    monkeypatch.setattr(retry, "OUTAGE_SECONDS", 600.0)
    monkeypatch.setattr(retry, "CALL_TIMEOUT_SECONDS", (1.0, 1.0))
    monkeypatch.setattr(outages, "MAX_DELAY_SECONDS", 600.0)
    one = launch()
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    one.wait_for("Rendezvous")
    if problem == "503":
        for verb in ("GET", "DELETE"):
            server.fail(verb, "", 503, times=float("inf"), Retry_After="600")
    server.is_away, server.is_silent = problem == "away", problem == "silent"
    time.sleep(0.2)
    one.launcher.interrupted = True
    assert one.finish() == 143  # which waits for less than 600 s
    assert "the job may still be there" in one.output
    server.is_away = server.is_silent = False
    server._faults.clear()
    namespace.delete("pytorchjobs", JOB)


def test_in_a_hurry_nothing_is_asked_that_only_explains(server, fast):
    """Each answer might take as long as a call may: together longer than there is time."""
    one = job_client()
    one.retry_policy.hurried = lambda: True
    one.annotate_job(JOB, {})
    assert (one.list_warnings(), one.read_node("n"), one.find_workload("u")) == ([], None, None)
    assert not one.force_delete_pod("p", "u") and server.requests == []
    assert one.read_job(JOB) is None and len(server.requests) == 1


def test_a_launcher_whose_work_fails_for_another_reason_deletes_the_job_too(launch, namespace, monkeypatch):
    def broken(*arguments):
        raise OSError("storage is gone")

    monkeypatch.setattr(launcher, "Watcher", broken)
    with pytest.raises(OSError, match="storage is gone"):
        launch().finish()
    assert namespace.created == [JOB]


# -- suspension -------------------------------------------------------------------------------------------------------


def test_fault_60_a_person_suspends_and_resumes_it(training, server, namespace):
    """Waiting as long as it takes: that is no start that takes too long, and no failure of its pods."""
    namespace.holds_pods = True
    cluster_jobs().suspend("r")
    training.wait_for("Committing")
    namespace.release_pods()
    namespace.holds_pods = False
    training.wait_for("Queued: suspended: kftrain unsuspend lets it go on")
    cluster_jobs().unsuspend("r")
    namespace.condition(JOB, "Suspended", "False")
    namespace.run_pods(JOB)
    namespace.step(JOB, 2, 20)
    wait_until(lambda: training.output.count("r-train: Training") == 2)
    namespace.finish(JOB)
    assert training.finish() == 0


def test_fault_62_conditions_that_contradict_each_other_end_nothing(training, namespace):
    """Restarting beside Running, Running beside Suspended: only Failed and Succeeded end a job."""
    for condition in ("Restarting", "Running", "Created"):
        namespace.condition(JOB, condition)
    namespace.suspend(JOB)
    training.wait_for("Queued")
    assert training.is_running
    namespace.suspend(JOB, False)
    namespace.finish(JOB)
    assert training.finish() == 0


def test_kubeconfig_may_be_set_after_the_client_was_imported(server, monkeypatch, tmp_path):
    import kubernetes  # noqa: F401 - the point is that it has read the variable by now

    assert Cluster().namespace == NAME
    assert Cluster("other").namespace == "other"
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(LaunchError, match="no cluster"):
        client.Cluster()
