"""Who a job belongs to: the Workflow of the pipeline run, which takes it along."""

import pytest
from helpers import pipeline_step
from helpers.launching import JOB, wait_until

from kftrain.errors import LaunchError
from kftrain.launch.kubernetes import ownership
from kftrain.launch.kubernetes.client import Cluster
from kftrain.launch.kubernetes.labels import KFP_RUN_LABEL
from kftrain.launch.spec import LAUNCHER_TIMEOUT_ENV


@pytest.fixture
def step_pod(namespace, monkeypatch):
    """This process is a step of a pipeline run, in the same namespace."""
    yield pipeline_step.become(namespace, monkeypatch, "kfp-1")
    namespace.objects["pods"].pop("step", None)


def test_fault_58_a_job_belongs_to_the_workflow_of_its_step_and_goes_with_it(step_pod, launch, namespace):
    one = launch()
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    job = namespace.get("pytorchjobs", JOB)
    (owner,) = job["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "name": "flow",
        "uid": step_pod["metadata"]["ownerReferences"][0]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }
    assert job["metadata"]["labels"][KFP_RUN_LABEL] == "kfp-1"
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert {"name": LAUNCHER_TIMEOUT_ENV, "value": "1800"} in container["env"]
    one.wait_for("Rendezvous")
    namespace.delete("workflows", "flow")
    assert (namespace.jobs(), namespace.pods()) == ([], [])
    with pytest.raises(LaunchError, match="somebody deleted the job"):
        one.finish()


@pytest.mark.parametrize(("own_namespace", "watched"), [("notebooks", True), ("", False)])
def test_a_job_without_an_owner_watches_a_launcher_in_a_pod(own_namespace, watched, launch, namespace, monkeypatch):
    """A step in another namespace, or a notebook: nothing else takes the job away. A laptop may sleep."""
    connect = Cluster.__init__

    def elsewhere(self, *arguments):
        connect(self, *arguments)
        self.own_namespace = own_namespace

    monkeypatch.setattr(Cluster, "__init__", elsewhere)
    one = launch()
    wait_until(namespace.jobs)
    job = namespace.get("pytorchjobs", JOB)
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert "ownerReferences" not in job["metadata"]
    assert ({"name": LAUNCHER_TIMEOUT_ENV, "value": "1800"} in container["env"]) is watched
    namespace.finish(JOB)
    assert one.finish() == 0


def test_an_owner_that_is_gone_is_named(step_pod, launch, namespace):
    del namespace.objects["workflows"]["flow"]
    one = launch()
    with pytest.raises(LaunchError, match="right after it was created: its owner, Workflow flow, is gone"):
        one.finish()
    assert namespace.created == [JOB]
    del namespace.objects["pods"]["step"]


def test_only_a_step_in_the_namespace_of_the_job_has_an_owner(step_pod, server, namespace, monkeypatch):
    """An owner in another namespace does not exist there: the job would be deleted at once."""
    owner, run_id = ownership.find_owner(Cluster())
    assert (owner["name"], run_id) == ("flow", "kfp-1")
    assert ownership.find_owner(Cluster("other")) == (None, "kfp-1"), "the exit handler knows the job by this"
    step_pod["metadata"]["ownerReferences"][0]["kind"] = "Job"
    assert ownership.find_owner(Cluster()) == (None, "kfp-1")
    monkeypatch.setenv(ownership.POD_NAME_ENV, "gone")
    assert ownership.find_owner(Cluster()) == (None, "")
    monkeypatch.delenv(ownership.POD_NAME_ENV)
    assert ownership.find_owner(Cluster()) == (None, "")
