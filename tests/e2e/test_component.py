"""Steps as the compiled pipeline starts them, in pods with the rights of a Kubeflow step."""

import pytest
from e2e.commands import kftrain, options
from e2e.kfp_step import delete_workflow, terminate_workflow
from e2e.namespace import wait_until

from kftrain.core import storage
from kftrain.run import attempts, documents
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.timeout(900, func_only=True)

CHANGES = {
    "launch.kubernetes.namespace": "''",
    "launch.nodes": 1,
    "launch.processes_per_node": 1,
    "train.steps": 60,
    "model.dim": 256,
}


@pytest.fixture
def run_uri(settings, tmp_path):
    return kftrain("shard", *options({**settings, **CHANGES}), folder=tmp_path)["run_uri"]


def jobs_of(namespace, run_uri):
    run_id = RunPaths(run_uri).run_id
    return [job for job in namespace.jobs().values() if job["metadata"]["labels"]["kftrain.io/run"] == run_id]


def test_the_train_step_creates_the_job_and_ends_well(kfp_steps, run_uri):
    pod = kfp_steps.start("train", {"run_uri": run_uri})
    kfp_steps.wait_for(pod, "Training")
    (job,) = jobs_of(kfp_steps.namespace, run_uri)
    assert job["metadata"]["ownerReferences"][0]["uid"] == kfp_steps.workflow["metadata"]["uid"]
    assert "step 60/60" in kfp_steps.finish(pod)
    assert documents.read(Completion, RunPaths(run_uri).complete).step == 60
    assert jobs_of(kfp_steps.namespace, run_uri) == []


def test_a_launcher_that_is_killed_is_succeeded_by_one_that_adopts_the_job(kfp_steps, run_uri):
    first = kfp_steps.start("train", {"run_uri": run_uri})
    kfp_steps.wait_for(first, "checkpoint at step 10 started")
    (job,) = jobs_of(kfp_steps.namespace, run_uri)
    kfp_steps.namespace.delete_pod(first, grace_seconds=0)
    second = kfp_steps.start("train", {"run_uri": run_uri})
    log = kfp_steps.finish(second)
    assert "is there already: following it" in log and "step 60/60" in log
    assert attempts.find_last_attempt(RunPaths(run_uri)) == 1, "one training, whoever followed it"
    assert jobs_of(kfp_steps.namespace, run_uri) == [] and job["metadata"]["name"] in log


def test_a_deleted_pipeline_run_takes_its_job_along(kfp_steps, run_uri):
    pod = kfp_steps.start("train", {"run_uri": run_uri})
    kfp_steps.wait_for(pod, "checkpoint at step 10 started")
    delete_workflow(kfp_steps.namespace, kfp_steps.name)
    wait_until(lambda: jobs_of(kfp_steps.namespace, run_uri) == [], 10, "the end of the job")
    label = f"kftrain.io/run={RunPaths(run_uri).run_id}"
    wait_until(lambda: not kfp_steps.namespace.pods(label), 60, "the end of the workers")


def test_terminate_deletes_the_job_before_argo_kills_its_launcher(kfp_steps, run_uri):
    pod = kfp_steps.start("train", {"run_uri": run_uri})
    kfp_steps.wait_for(pod, "checkpoint at step 10 started")
    terminate_workflow(kfp_steps.namespace, kfp_steps.name)
    wait_until(lambda: jobs_of(kfp_steps.namespace, run_uri) == [], 8, "the end of the job")
    log = kfp_steps.finish(pod, "Failed", seconds=30)
    assert "somebody terminated the run in the Kubeflow UI" in log


def test_the_exit_handler_deletes_the_job_of_a_step_that_was_killed(kfp_steps, run_uri):
    storage.publish_json(f"{run_uri}/pipelines/{kfp_steps.name}.json", {})  # as the pipeline run's first step leaves it
    pod = kfp_steps.start("train", {"run_uri": run_uri})
    kfp_steps.wait_for(pod, "checkpoint at step 10 started")
    kfp_steps.namespace.delete_pod(pod, grace_seconds=0)
    paths = RunPaths(run_uri)
    status = {"state": "RUNNING", "pipelineJobResourceName": kfp_steps.name, "pipelineTaskName": "exit-handler-1"}
    parameters = {
        "config": "",
        "storage_root": "",
        "resume_run": paths.uri,
        "job_id": kfp_steps.name,
        "status": status,
    }
    log = kfp_steps.finish(kfp_steps.start("finish", parameters))
    assert f"removed job {paths.run_id}-train" in log
    wait_until(lambda: jobs_of(kfp_steps.namespace, run_uri) == [], 10, "the end of the job")
