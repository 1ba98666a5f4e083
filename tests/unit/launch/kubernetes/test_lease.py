"""A launch that fails on its way to its job: what it has created does not stay, what is somebody else's does."""

import pytest
from helpers.fakes.api_server import LOST
from helpers.launching import JOB, WORKERS, job_client, wait_until

from kftrain.core import storage
from kftrain.errors import FencedError, LaunchError
from kftrain.launch.kubernetes import control, labels, lease, retry
from kftrain.launch.kubernetes.job_client import JobClient
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.kubernetes.states import State
from kftrain.launch.kubernetes.watcher import Watcher

POST, READ = ("POST", "/pytorchjobs"), ("GET", f"/pytorchjobs/{JOB}")


def requests_to_delete(server):
    return [path for verb, path in server.requests if verb == "DELETE"]


@pytest.fixture
def lost(server, fast, monkeypatch):
    """The answer to the creation is lost; afterwards the API server takes no jobs."""
    monkeypatch.setattr(retry, "OUTAGE_SECONDS", 0.3)
    server.fail(*POST, LOST)
    server.fail(*POST, 503, times=float("inf"))


def test_a_job_whose_creation_nobody_heard_of_is_deleted(lost, launch, namespace):
    with pytest.raises(LaunchError, match="the API server did not answer") as caught:
        launch().finish()
    assert (namespace.created, namespace.jobs()) == ([JOB], [])
    assert "may be there" not in caught.value.line


def test_it_is_deleted_on_ctrl_c_too(lost, launch, namespace, monkeypatch):
    monkeypatch.setattr(retry, "OUTAGE_SECONDS", 600.0)
    one = launch()
    wait_until(namespace.jobs)
    one.launcher.interrupted = True
    assert one.finish() == 143
    assert (namespace.created, namespace.jobs()) == ([JOB], [])


def test_a_job_that_cannot_be_read_after_its_creation_is_deleted(launch, server, namespace, monkeypatch):
    create = JobClient.create_job

    def create_and_fall_silent(self, document):
        uid = create(self, document)
        server.fail(*READ, 503)
        return uid

    monkeypatch.setattr(retry, "OUTAGE_SECONDS", 0.0)
    monkeypatch.setattr(JobClient, "create_job", create_and_fall_silent)
    with pytest.raises(LaunchError, match="did not answer"):
        launch().finish()
    assert (namespace.created, namespace.jobs()) == ([JOB], [])


def test_a_job_that_may_be_left_is_named_with_what_removes_it(lost, launch, server, namespace, monkeypatch):
    answer = namespace.answer

    def answer_and_fall_silent(verb, path, *rest):
        if verb == "POST":
            server.fail(*READ, 503, times=float("inf"))
        return answer(verb, path, *rest)

    monkeypatch.setattr(namespace, "answer", answer_and_fall_silent)
    one = launch()
    with pytest.raises(LaunchError, match=f"job {JOB} may be there all the same: kftrain cancel r deletes it"):
        one.finish()
    namespace.delete("pytorchjobs", JOB)


def test_the_same_job_of_another_launcher_is_left_alone(launch, server, namespace, make_job, monkeypatch):
    """It comes between the look and the creation, whose answer never comes: only a mark tells whose it is."""
    resolved, training = make_job()
    answer = namespace.answer

    def be_late(verb, path, query=None, body=None):
        if verb == "POST":
            namespace.create("pytorchjobs", KIND.build(training, resolved))
            monkeypatch.setattr(namespace, "answer", answer)
        return answer(verb, path, query, body)

    monkeypatch.setattr(namespace, "answer", be_late)
    monkeypatch.setattr(retry, "OUTAGE_SECONDS", 0.3)
    server.fail(*POST, LOST)
    server.fail(*POST, 503, times=float("inf"))
    with pytest.raises(LaunchError, match="did not answer"):
        launch().finish()
    assert namespace.jobs() == [JOB] and requests_to_delete(server) == []
    namespace.delete("pytorchjobs", JOB)


def test_a_job_that_another_launcher_has_adopted_meanwhile_is_left_alone(
    server, fast, namespace, make_job, monkeypatch
):
    """The first launcher lost its connection right after the creation, and comes back when it is too late."""
    resolved, training = make_job()
    document = KIND.build(training, resolved)
    cluster, read = job_client(), lease._require_kept

    def cut_off(*arguments):
        lease.create_or_adopt(cluster, document)
        raise LaunchError("cut off")

    monkeypatch.setattr(lease, "_require_kept", cut_off)
    with pytest.raises(LaunchError, match="cut off"):
        lease.create_or_adopt(cluster, document)
    monkeypatch.setattr(lease, "_require_kept", read)
    assert namespace.jobs() == [JOB] and requests_to_delete(server) == []
    namespace.delete("pytorchjobs", JOB)


def test_a_launcher_whose_job_another_one_has_adopted_leaves_it_and_says_so(launch, server, namespace):
    """It was cut off, and the pipeline's retry has taken over: two would fight over one job."""
    first = launch()
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    first.wait_for("Rendezvous")
    second = launch()
    second.wait_for("following it")
    with pytest.raises(FencedError, match="another launcher holds this run by now"):
        first.finish()
    assert namespace.jobs() == [JOB] and requests_to_delete(server) == []
    assert not storage.exists(first.paths.failure) and not storage.exists(first.paths.error)
    namespace.finish(JOB)
    assert second.finish() == 0


def test_a_launcher_that_is_stopped_leaves_a_job_that_another_one_has_adopted(launch, server, namespace, monkeypatch):
    """Kubeflow starts the retry before the pod of the first try has ended."""
    first = launch()
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    first.wait_for("Rendezvous")
    monkeypatch.setattr(Watcher, "look", lambda self: State.RENDEZVOUS)
    second = launch()
    second.wait_for("following it")
    first.launcher.interrupted = True
    with pytest.raises(FencedError):  # "stopped" would be said of a run that goes on
        first.finish()
    assert namespace.jobs() == [JOB] and requests_to_delete(server) == []
    second.launcher.interrupted = True
    assert second.finish() == 143 and namespace.jobs() == []


def test_a_job_that_is_adopted_between_look_and_deletion_is_left(server, fast, namespace, make_job, monkeypatch):
    resolved, training = make_job()
    document = KIND.build(training, resolved)
    cluster, other = job_client(), job_client()
    held, delete = lease.create_or_adopt(cluster, document), cluster.delete_job

    def be_slow(*arguments):
        monkeypatch.setattr(cluster, "delete_job", delete)
        lease.create_or_adopt(other, document)
        delete(*arguments)

    monkeypatch.setattr(cluster, "delete_job", be_slow)
    assert not lease.delete_held(cluster, held)
    assert namespace.jobs() == [JOB]
    namespace.delete("pytorchjobs", JOB)


def test_a_job_that_changes_between_look_and_deletion_is_deleted_all_the_same(
    server, fast, namespace, make_job, monkeypatch
):
    resolved, training = make_job()
    cluster = job_client()
    held, delete = lease.create_or_adopt(cluster, KIND.build(training, resolved)), cluster.delete_job

    def be_slow(*arguments):
        monkeypatch.setattr(cluster, "delete_job", delete)
        namespace.condition(JOB, "Running")
        delete(*arguments)

    monkeypatch.setattr(cluster, "delete_job", be_slow)
    assert lease.delete_held(cluster, held)
    assert namespace.jobs() == []


def test_an_adoption_whose_answer_is_lost_leaves_no_job_to_nobody(launch, server, namespace, make_job, monkeypatch):
    """The launcher before sees another mark, and leaves the job to who has given up."""
    resolved, training = make_job()
    held = lease.create_or_adopt(job_client(), KIND.build(training, resolved))
    monkeypatch.setattr(retry, "OUTAGE_SECONDS", 0.3)
    server.fail("PATCH", "/pytorchjobs/", LOST)
    server.fail("PATCH", "/pytorchjobs/", 503, times=float("inf"))
    with pytest.raises(LaunchError, match="did not answer"):
        launch().finish()
    assert namespace.jobs() == [] and namespace.created == [JOB]
    assert held.name == JOB


def test_a_job_that_goes_while_it_is_adopted_is_created_anew(launch, namespace, make_job, monkeypatch):
    resolved, training = make_job()
    lease.create_or_adopt(job_client(), KIND.build(training, resolved))
    answer = namespace.answer

    def go_first(verb, path, query=None, body=None):
        if verb == "PATCH":
            monkeypatch.setattr(namespace, "answer", answer)
            namespace.delete("pytorchjobs", JOB)
        return answer(verb, path, query, body)

    monkeypatch.setattr(namespace, "answer", go_first)
    one = launch()
    wait_until(lambda: namespace.created == [JOB, JOB])
    namespace.run_pods(JOB)
    namespace.finish(JOB)
    assert one.finish() == 0


def test_a_worker_that_is_fenced_says_nothing_of_the_run(launch, namespace):
    one = launch()
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    namespace.end_pod(WORKERS[0], 17)
    namespace.condition(JOB, "Failed")
    with pytest.raises(FencedError, match="a newer attempt holds this run"):
        one.finish()
    assert not storage.exists(one.paths.failure) and not storage.exists(one.paths.error)


def test_a_launcher_that_may_not_mark_a_job_holds_it_by_the_mark_it_has(launch, server, namespace, make_job):
    resolved, training = make_job()
    server.fail("PATCH", "/pytorchjobs/", 403, times=float("inf"))
    lease.create_or_adopt(job_client(), KIND.build(training, resolved))
    one = launch()
    one.wait_for("following it")
    namespace.run_pods(JOB)
    one.wait_for("Rendezvous")
    namespace.finish(JOB)
    assert one.finish() == 0 and namespace.jobs() == []


def test_an_adopted_job_belongs_to_who_has_adopted_it(fast, namespace, make_job):
    """The exit handler of the pipeline run that has created it, its Workflow and gc have no say any more."""
    resolved, training = make_job()
    flows = [namespace.create("workflows", {"metadata": {"name": name}})["metadata"] for name in ("a", "b")]
    owners = [
        {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": f["name"], "uid": f["uid"]} for f in flows
    ]
    cluster = job_client()
    lease.create_or_adopt(cluster, KIND.build(training, resolved, "run-a", owners[0]))
    lease.create_or_adopt(cluster, KIND.build(training, resolved, "run-b", owners[1]))
    job = namespace.get("pytorchjobs", JOB)
    assert job["metadata"]["ownerReferences"] == [owners[1]]
    assert not control.belongs(KIND, job, owners[0]["uid"], "run-a", resolved.digest())
    assert control.belongs(KIND, job, owners[1]["uid"], "run-b", "")
    lease.create_or_adopt(cluster, KIND.build(training, resolved))
    metadata = namespace.get("pytorchjobs", JOB)["metadata"]
    assert not metadata.get("ownerReferences") and labels.KFP_RUN_LABEL not in metadata["labels"]
    namespace.delete("pytorchjobs", JOB)


def test_where_nothing_was_sent_nothing_is_looked_for(launch, server, namespace, monkeypatch):
    monkeypatch.setattr(retry, "OUTAGE_SECONDS", 0.1)
    server.fail("GET", r"/pods\?labelSelector=[^&]*$", 503, times=float("inf"))
    with pytest.raises(LaunchError, match="did not answer"):
        launch().finish()
    assert sum(path.endswith(f"/{JOB}") for _, path in server.requests) == 1
