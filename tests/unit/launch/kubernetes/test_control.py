"""Jobs looked at and acted on from outside their launcher, by the commands of `kftrain`."""

import json
import subprocess
import sys
import threading

import pytest
from helpers.launching import JOB, PATIENCE_SECONDS, WORKERS, cluster_jobs, wait_until

from kftrain import cli
from kftrain.errors import LaunchError
from kftrain.launch.kubernetes import control, watcher
from kftrain.launch.kubernetes.job_client import JobClient
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.kubernetes.labels import SUSPENDED_ANNOTATION


def kftrain(*arguments, code=0):
    """What the command prints, in a process of its own: the launcher prints in this one."""
    command = [sys.executable, "-m", "kftrain", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def job(namespace, make_job, fast, monkeypatch):
    """Creates the job of run `r` without a launcher; settings as for `make_job`."""
    monkeypatch.setattr(control, "POLL_SECONDS", 0.02)

    def create(**settings):
        resolved, spec = make_job(**settings)
        namespace.create("pytorchjobs", KIND.build(spec, resolved))

    return create


def test_status_says_state_progress_and_reason(training, namespace):
    namespace.step(JOB, 7, 20)
    wait_until(lambda: "step 7/20" in kftrain("status"))
    (job,) = json.loads(kftrain("status", "runs/r", "--json"))
    assert (job["run"], job["task"], job["job"], job["state"]) == ("r", "train", JOB, "Training")
    assert job["workers"] == "2/2" and job["progress"].startswith("step 7/20") and job["reason"] == ""
    namespace.recreate(WORKERS[1], run=False)
    scheduled = [("PodScheduled", "True")]
    namespace.set_pod(
        WORKERS[1], "n", conditions=scheduled, waiting={"reason": "ErrImagePull", "message": "no such image"}
    )
    text = kftrain("status")
    assert f"{JOB}: Pulling, 1/2 workers" in text and "ErrImagePull: no such image" in text
    assert kftrain("status", "another").strip() == "no jobs"
    training.launcher.interrupted = True


def test_logs_print_what_there_is(training, namespace):
    namespace.write(WORKERS[1], "hello from worker 1")
    printed = wait_until(lambda: (text := kftrain("logs", "r")) and "hello" in text and text)
    assert "worker-1: hello from worker 1" in printed and "step 1/20" in printed
    training.launcher.interrupted = True


@pytest.mark.parametrize("follow", [False, True])
def test_logs_are_shown_whole(job, namespace, follow):
    """A launcher limits what it shows; who asks for the logs gets them, with `-f` until the job has ended."""
    job()
    namespace.run_pods(JOB)
    lines = [f"line {index}" for index in range(1000)]
    namespace.write(WORKERS[1], *lines)
    namespace.finish(JOB)
    found = []
    cluster_jobs().logs("r", "train", follow, found.append)
    assert found == [f"worker-1: {line}" for line in lines]
    assert namespace.jobs() == [JOB]


@pytest.fixture
def followed(job, namespace):
    """What `kftrain logs -f` has printed, and the thread that it runs in: it has begun."""
    job()
    namespace.run_pods(JOB)
    namespace.write(WORKERS[0], "first")
    found = []
    arguments = ("r", "train", True, found.append)
    thread = threading.Thread(target=cluster_jobs().logs, args=arguments, daemon=True)
    thread.start()
    wait_until(lambda: found == ["worker-0: first"])
    return found, thread


@pytest.mark.parametrize("code", [0, 1])
def test_following_the_logs_ends_with_the_job(followed, namespace, code):
    found, thread = followed
    namespace.write(WORKERS[0], "last")
    namespace.finish(JOB, code)
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive() and namespace.jobs() == [JOB]
    assert found == ["worker-0: first", "worker-0: last"]


def test_following_the_logs_ends_where_another_job_takes_the_name(followed, namespace, job):
    found, thread = followed
    with namespace.changed:
        namespace.delete("pytorchjobs", JOB)
        job()
        namespace.run_pods(JOB)
        namespace.write(WORKERS[0], "of another job")
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive() and found == ["worker-0: first"]


def test_the_pods_of_another_job_are_not_followed(job, namespace, monkeypatch):
    """The job is replaced between the look at it and the look at its pods; the other one goes on for long."""
    job()
    namespace.run_pods(JOB)
    found, list_pods = [], JobClient.list_pods

    def list_pods_of_another(cluster, name):
        namespace.delete("pytorchjobs", JOB)
        job()
        namespace.run_pods(JOB)
        namespace.write(WORKERS[0], "of another job")
        return list_pods(cluster, name)

    monkeypatch.setattr(JobClient, "list_pods", list_pods_of_another)
    thread = threading.Thread(target=cluster_jobs().logs, args=("r", "train", True, found.append), daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive() and found == []


def test_following_the_logs_ends_where_nobody_reads_them(job, namespace):
    job()
    namespace.run_pods(JOB)
    namespace.write(WORKERS[0], "first")

    def write(line):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        cluster_jobs().logs("r", "train", True, write)


@pytest.mark.parametrize("command", ["cancel", "suspend", "resume", "logs"])
@pytest.mark.parametrize("run", ["", "/"])
def test_an_empty_name_is_not_every_run(job, namespace, capsys, command, run):
    """`kftrain cancel "$RUN"` where the shell knows no RUN."""
    job()
    with pytest.raises(SystemExit) as caught:
        cli.main([command, run])
    assert caught.value.code == 10
    assert f"RUN: this names no run (got '{run}')" in capsys.readouterr().err
    assert namespace.jobs() == [JOB]


def test_the_functions_behind_the_commands_want_a_run_too(job, namespace):
    job()
    with pytest.raises(AssertionError):
        cluster_jobs().cancel("")
    assert namespace.jobs() == [JOB]


def test_an_empty_name_is_every_run_for_status(job, capsys):
    job()
    with pytest.raises(SystemExit) as caught:
        cli.main(["status", ""])
    assert caught.value.code == 0 and f"{JOB}: Scheduling" in capsys.readouterr().out


def test_cancel_deletes_the_job_and_waits_for_its_pods(training, namespace):
    assert kftrain("cancel", "r").strip() == f"deleted {JOB}"
    assert namespace.jobs() == [] and namespace.pods() == []
    with pytest.raises(LaunchError, match="somebody deleted the job"):
        training.finish()


def test_suspend_takes_the_pods_and_resume_brings_them_back(training, namespace):
    assert kftrain("suspend", "r").strip() == f"suspended {JOB}"
    training.wait_for("Queued: suspended: kftrain unsuspend lets it go on")
    assert (
        namespace.pods() == [] and SUSPENDED_ANNOTATION in namespace.get("pytorchjobs", JOB)["metadata"]["annotations"]
    )
    kftrain("resume", "r")
    assert namespace.get("pytorchjobs", JOB)["spec"]["runPolicy"]["suspend"] is False
    assert not namespace.get("pytorchjobs", JOB)["metadata"]["annotations"].get(SUSPENDED_ANNOTATION)
    training.launcher.interrupted = True


def test_gc_deletes_the_job_of_a_pipeline_run_that_has_ended_and_no_other(training, namespace, monkeypatch):
    monkeypatch.setattr(watcher, "ANNOTATE_SECONDS", float("inf"))  # a job that changes meanwhile is left for later
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
    one.wait_for("suspended: kftrain unsuspend lets it go on")
    kftrain("resume", "r")
    assert workload["spec"]["active"] is True
    one.launcher.interrupted = True


def changes(server):
    """Which kinds of objects were changed, in order."""
    return [path.split("/")[-2] for verb, path in server.requests if verb == "PATCH"]


def test_a_workload_is_never_inactive_without_a_note_that_a_person_did_it(job, namespace, server):
    """A launcher that looks in between would take it for Kueue's own doing, and delete the job."""
    job(queue="research")
    namespace.queue(JOB)
    cluster_jobs().suspend("r")
    assert changes(server) == ["pytorchjobs", "workloads"]
    server.requests.clear()
    cluster_jobs().unsuspend("r")
    assert changes(server) == ["workloads", "pytorchjobs"]
    (workload,) = namespace.objects["workloads"].values()
    assert workload["spec"]["active"] is True
    assert SUSPENDED_ANNOTATION not in namespace.get("pytorchjobs", JOB)["metadata"]["annotations"]


def test_a_job_without_a_queue_is_suspended_and_noted_at_once(job, server):
    job()
    cluster_jobs().suspend("r")
    cluster_jobs().unsuspend("r")
    assert changes(server) == ["pytorchjobs", "pytorchjobs"]


def test_the_former_name_of_unsuspend_is_understood_with_a_line(training, capsys):
    training.launcher.interrupted = True
    done = subprocess.run(
        [sys.executable, "-m", "kftrain", "resume", "no-such-run"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 13 and "kftrain resume is now called kftrain unsuspend" in done.stderr
    assert "  resume " not in kftrain("--help") and "  unsuspend " in kftrain("--help")
