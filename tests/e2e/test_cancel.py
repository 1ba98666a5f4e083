"""`kftrain cancel` in every state a job can be in: the launcher says so and ends, and nothing of the job is left."""

import pytest
from e2e.commands import kftrain, options, running
from e2e.namespace import wait_until
from kubernetes import client

pytestmark = pytest.mark.timeout(900, func_only=True)

ONE = {"launch.nodes": 1, "launch.processes_per_node": 1}
LONG = {**ONE, "model.dim": 192, "train.steps": 500}
COMMITTED = "checkpoint at step 10 started"

full = pytest.mark.full

STATES = [
    pytest.param({**ONE, "launch.kubernetes.queue": "nowhere"}, "Queued: ", id="Queued", marks=full),
    pytest.param({**ONE, "launch.kubernetes.cpu": 999}, "Scheduling: Unschedulable", id="Scheduling", marks=full),
    pytest.param({**ONE, "launch.kubernetes.trainer_image": "localhost/none:1"}, ": Pulling", id="Pulling"),
    pytest.param({**ONE, "launch.nodes": 2}, ": Rendezvous", id="Rendezvous", marks=full),
    pytest.param(LONG, COMMITTED, id="Training"),
    pytest.param(LONG, COMMITTED, id="Committing"),
    pytest.param(LONG, COMMITTED, id="Suspended", marks=full),
]
"""Settings, and the line of the launcher's log that says that the job is there."""


@pytest.fixture
def queues(kubeconfig):
    """Whether Kueue is there to hold a job back."""
    names = {group.name for group in client.ApisApi().get_api_versions().groups}
    return "kueue.x-k8s.io" in names


@pytest.mark.parametrize(("changes", "line"), STATES)
def test_a_job_that_is_cancelled_leaves_nothing(changes, line, settings, namespace, queues, tmp_path, request):
    state = request.node.callspec.id
    if state == "Queued" and not queues:
        pytest.skip("Kueue is not installed")
    run_uri = kftrain("shard", *options({**settings, **changes}), folder=tmp_path)["run_uri"]
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for(line)
        if state == "Committing":
            namespace.delete_pod(next(iter(namespace.workers())))
        if state == "Suspended":
            kftrain("suspend", run_uri, "-n", namespace.name, folder=tmp_path)
            command.wait_for("Queued: suspended")
        kftrain("cancel", run_uri, "-n", namespace.name, folder=tmp_path)
        phases = {pod.status.phase for pod in namespace.workers().values()}
        assert phases <= {"Succeeded", "Failed"}, "cancel returned before the last container had ended"
        command.finish(code=13)
    assert "somebody deleted the job" in command.output
    assert namespace.jobs() == {} and wait_until(lambda: not namespace.workers(), 30, "the end of the pods")


@pytest.mark.full
def test_what_has_ended_has_nothing_to_cancel(settings, namespace, tmp_path):
    run_uri = kftrain("shard", *options({**settings, **ONE, "train.steps": 20}), folder=tmp_path)["run_uri"]
    kftrain("train", run_uri, folder=tmp_path)
    with running("cancel", run_uri, "-n", namespace.name, folder=tmp_path) as command:
        command.finish(code=13)
    assert "this run has no job" in command.output
