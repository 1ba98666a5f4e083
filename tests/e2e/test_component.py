"""Steps as the compiled pipeline starts them, in pods with the rights of a Kubeflow step."""

import contextlib
import secrets

import pytest
from e2e.commands import kftrain, options
from e2e.kfp_step import create_workflow, delete_workflow, step_pod
from e2e.namespace import wait_until

from kftrain import attempts, contracts
from kftrain.contracts import Completion, RunPaths

pytestmark = pytest.mark.timeout(900)

CHANGES = {
    "launch.kubernetes.namespace": "''",
    "launch.nodes": 1,
    "launch.processes_per_node": 1,
    "train.steps": 60,
    "model.dim": 256,
}


class Steps:
    """Steps of one pipeline run: pods that one Workflow owns."""

    def __init__(self, namespace, compiled):
        self.name = f"e2e-{secrets.token_hex(3)}"
        self.namespace, self._compiled, self._count = namespace, compiled, 0
        self.workflow = create_workflow(namespace, self.name)

    def start(self, step, parameters):
        """Starts a step; returns its pod's name."""
        self._count += 1
        pod = f"{self.name}-{step}-{self._count}"
        body = step_pod(self._compiled, step, parameters, self.workflow, pod)
        self.namespace.core.create_namespaced_pod(self.namespace.name, body)
        return pod

    def wait_for(self, pod, part, seconds=240):
        wait_until(lambda: part in self.namespace.log(pod), seconds, f"{part!r} in the log of {pod}")

    def finish(self, pod, phase="Succeeded", seconds=600):
        """Waits for the step's end; returns its log."""
        ended = wait_until(lambda: self._ended(pod), seconds, f"the end of {pod}")
        log = self.namespace.log(pod)
        assert ended == phase, log
        return log

    def _ended(self, pod):
        phase = self.namespace.pods()[pod].status.phase
        return phase if phase in ("Succeeded", "Failed") else None


@pytest.fixture
def steps(kfp_namespace, compiled):
    running = Steps(kfp_namespace, compiled)
    yield running
    with contextlib.suppress(Exception):
        delete_workflow(kfp_namespace, running.name)


@pytest.fixture
def run_uri(settings, tmp_path):
    return kftrain("shard", *options({**settings, **CHANGES}), folder=tmp_path)["run_uri"]


def jobs_of(namespace, run_uri):
    run_id = RunPaths(run_uri).run_id
    return [job for job in namespace.jobs().values() if job["metadata"]["labels"]["kftrain.io/run"] == run_id]


def test_the_train_step_creates_the_job_and_ends_well(steps, run_uri):
    pod = steps.start("train", {"run_uri": run_uri})
    steps.wait_for(pod, "Training")
    (job,) = jobs_of(steps.namespace, run_uri)
    assert job["metadata"]["ownerReferences"][0]["uid"] == steps.workflow["metadata"]["uid"]
    assert "step 60/60" in steps.finish(pod)
    assert contracts.read(Completion, RunPaths(run_uri).complete).step == 60
    assert jobs_of(steps.namespace, run_uri) == []


def test_a_launcher_that_is_killed_is_succeeded_by_one_that_adopts_the_job(steps, run_uri):
    first = steps.start("train", {"run_uri": run_uri})
    steps.wait_for(first, "checkpoint at step 10 started")
    (job,) = jobs_of(steps.namespace, run_uri)
    steps.namespace.delete_pod(first, grace_seconds=0)
    second = steps.start("train", {"run_uri": run_uri})
    log = steps.finish(second)
    assert "is there already: following it" in log and "step 60/60" in log
    assert attempts.last_attempt(RunPaths(run_uri)) == 1, "one training, whoever followed it"
    assert jobs_of(steps.namespace, run_uri) == [] and job["metadata"]["name"] in log


def test_a_deleted_pipeline_run_takes_its_job_along(steps, run_uri):
    pod = steps.start("train", {"run_uri": run_uri})
    steps.wait_for(pod, "checkpoint at step 10 started")
    delete_workflow(steps.namespace, steps.name)
    wait_until(lambda: jobs_of(steps.namespace, run_uri) == [], 10, "the end of the job")
    label = f"kftrain.io/run={RunPaths(run_uri).run_id}"
    wait_until(lambda: not steps.namespace.pods(label), 60, "the end of the workers")


def test_the_exit_handler_deletes_the_job_of_a_step_that_was_killed(steps, run_uri):
    pod = steps.start("train", {"run_uri": run_uri})
    steps.wait_for(pod, "checkpoint at step 10 started")
    steps.namespace.delete_pod(pod, grace_seconds=0)
    paths = RunPaths(run_uri)
    status = {"state": "RUNNING", "pipelineJobResourceName": steps.name, "pipelineTaskName": "exit-handler-1"}
    parameters = {
        "config": "",
        "storage_root": paths.storage_root,
        "resume_run": paths.run_id,
        "job_id": steps.name,
        "status": status,
    }
    log = steps.finish(steps.start("finish", parameters))
    assert f"removed job {paths.run_id}-train" in log
    wait_until(lambda: jobs_of(steps.namespace, run_uri) == [], 10, "the end of the job")
