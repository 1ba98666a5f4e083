"""Jobs looked at and acted on from outside their launcher, by the commands of `kftrain`."""

import json
import subprocess
import sys

import pytest
from helpers.launching import JOB, WORKERS, wait_until

from kftrain.errors import LaunchError
from kftrain.launch.annotations import SUSPENDED_ANNOTATION


def kftrain(*arguments, code=0):
    """What the command prints, in a process of its own: the launcher prints in this one."""
    command = [sys.executable, "-m", "kftrain", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_status_says_state_progress_and_reason(training, namespace):
    namespace.step(JOB, 7, 20)
    wait_until(lambda: "step 7/20" in kftrain("status"))
    (job,) = json.loads(kftrain("status", "runs/r", "--json"))
    assert (job["run"], job["task"], job["job"], job["state"]) == ("r", "train", JOB, "Training")
    assert job["workers"] == "2/2" and job["progress"].startswith("step 7/20") and job["reason"] == ""
    namespace.recreate(WORKERS[1], run=False)
    namespace.set_pod(WORKERS[1], node="n", waiting={"reason": "ErrImagePull", "message": "no such image"})
    text = kftrain("status")
    assert f"{JOB}: Pulling, 1/2 workers" in text and "ErrImagePull: no such image" in text
    assert kftrain("status", "another").strip() == "no jobs"
    training.launcher.interrupted = True


def test_logs_print_what_there_is(training, namespace):
    namespace.write(WORKERS[1], "hello from worker 1")
    printed = wait_until(lambda: (text := kftrain("logs", "r")) and "hello" in text and text)
    assert "worker-1: hello from worker 1" in printed and "step 1/20" in printed
    training.launcher.interrupted = True


def test_cancel_deletes_the_job_and_waits_for_its_pods(training, namespace):
    assert kftrain("cancel", "r").strip() == f"deleted {JOB}"
    assert namespace.jobs() == [] and namespace.pods() == []
    with pytest.raises(LaunchError, match="somebody deleted the job"):
        training.finish()


def test_suspend_takes_the_pods_and_resume_brings_them_back(training, namespace):
    assert kftrain("suspend", "r").strip() == f"suspended {JOB}"
    training.wait_for("Queued: suspended: kftrain resume lets it go on")
    assert (
        namespace.pods() == [] and SUSPENDED_ANNOTATION in namespace.get("pytorchjobs", JOB)["metadata"]["annotations"]
    )
    kftrain("resume", "r")
    assert namespace.get("pytorchjobs", JOB)["spec"]["runPolicy"]["suspend"] is False
    assert not namespace.get("pytorchjobs", JOB)["metadata"]["annotations"].get(SUSPENDED_ANNOTATION)
    training.launcher.interrupted = True


def test_gc_deletes_the_job_of_a_pipeline_run_that_has_ended_and_no_other(training, namespace):
    assert kftrain("gc").strip() == "nothing to delete"
    namespace.create("workflows", {"metadata": {"name": "w"}, "status": {"phase": "Failed"}})
    owner = {"ownerReferences": [{"kind": "Workflow", "name": "w", "uid": "u"}]}
    namespace.patch("pytorchjobs", JOB, {"metadata": owner})
    assert kftrain("gc", "--dry-run").strip() == f"would delete {JOB}: its pipeline run has ended: Failed"
    assert len(namespace.jobs()) == 1
    assert kftrain("gc").strip() == f"deleted {JOB}: its pipeline run has ended: Failed"
    assert namespace.jobs() == []
    training.launcher.interrupted = True


def test_a_run_without_a_job_is_an_error_that_names_those_with_one(training):
    assert "this run has no job (got 'x'); runs with jobs: r" in kftrain("cancel", "x", code=13)
    training.launcher.interrupted = True


def test_a_queued_job_is_suspended_through_its_workload(launch, namespace):
    one = launch(queue="research")
    wait_until(namespace.jobs)
    assert "its Workload cannot be found" in kftrain("suspend", "r", code=13)
    assert SUSPENDED_ANNOTATION not in namespace.get("pytorchjobs", JOB)["metadata"]["annotations"]
    namespace.queue(JOB)
    kftrain("suspend", "r")
    (workload,) = namespace.objects["workloads"].values()
    assert workload["spec"]["active"] is False, "by its Workload, since Kueue undoes anything else"
    one.wait_for("suspended: kftrain resume lets it go on")
    kftrain("resume", "r")
    assert workload["spec"]["active"] is True
    one.launcher.interrupted = True
