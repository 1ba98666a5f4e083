"""Terminate on a run whose exit handler will not run again: the launcher deletes the job before it is killed."""

import pytest
from helpers import pipeline_step
from helpers.fakes.kube_namespace import NAME
from helpers.launching import JOB, wait_until

from kftrain.config import parse
from kftrain.core import storage
from kftrain.errors import Preempted
from kftrain.launch.kubernetes import workflow as workflow_module


@pytest.fixture
def own_workflow(namespace, monkeypatch):
    """This process is a step of a Workflow; its name."""
    pipeline_step.become(namespace, monkeypatch, "0b1c-2d3e")
    yield pipeline_step.WORKFLOW
    namespace.objects["pods"].pop("step", None)


def test_a_job_is_deleted_as_soon_as_its_pipeline_run_is_terminated(own_workflow, training, namespace):
    """No signal reaches the launcher: Argo's comes ten seconds later, and leaves no time."""
    namespace.holds_pods = True  # they commit, which takes longer than there is time
    namespace.patch("workflows", own_workflow, {"spec": {"activeDeadlineSeconds": 0}})
    with pytest.raises(Preempted, match="somebody terminated the run"):
        training.finish()
    assert namespace.jobs() == [] and namespace.objects["pods"], "it has not waited for the pods"
    assert storage.read_json(training.paths.failure)["failure_class"] == "terminated"
    namespace.release_pods()
    namespace.objects["pods"].pop("step")


def test_a_pipeline_run_that_goes_on_keeps_its_job(own_workflow, training, server, namespace):
    looks = [request for request in server.requests if request[1].endswith("/workflows/flow")]
    wait_until(lambda: len([r for r in server.requests if r[1].endswith("/workflows/flow")]) > len(looks) + 3)
    namespace.patch("workflows", own_workflow, {"spec": {"activeDeadlineSeconds": 2592000}})
    namespace.finish(JOB)
    assert training.finish() == 0
    namespace.objects["pods"].pop("step")


def test_a_workflow_that_may_not_be_read_ends_nothing(own_workflow, launch, server, namespace):
    server.fail("GET", "/workflows/", 403, times=float("inf"))
    one = launch()
    wait_until(namespace.jobs)
    namespace.finish(JOB)
    assert one.finish() == 0
    namespace.objects["pods"].pop("step")


def test_mlflow_is_told_which_pipeline_run_it_is_and_where_people_see_it(own_workflow):
    config = parse("tracking: {kubeflow_url: 'https://kubeflow.example/pipeline/'}")
    tags = workflow_module.build_pipeline_tags(config)
    assert tags["kftrain.kubeflow_run_id"] == "0b1c-2d3e" and tags["kftrain.kubeflow_workflow"] == "flow"
    assert tags["kftrain.kubeflow_url"] == "https://kubeflow.example/pipeline/#/runs/details/0b1c-2d3e"
    assert tags["kftrain.kubeflow_place"].endswith(f"/{NAME}")
    assert workflow_module.build_pipeline_tags(parse(""))["kftrain.kubeflow_url"] == ""


def test_outside_a_pipeline_the_tags_are_empty_and_nobody_is_asked(server):
    assert set(workflow_module.build_pipeline_tags(parse("")).values()) == {""} and server.requests == []
