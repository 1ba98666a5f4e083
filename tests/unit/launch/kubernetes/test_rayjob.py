"""The RayJob as data: a Ray cluster whose pods are those of every other kind of job, and what its status means."""

import dataclasses
import json
import shlex
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from helpers.fakes.kube_namespace import time_stamp

from kftrain import config
from kftrain.errors import Preempted, RetryableError
from kftrain.launch import spec
from kftrain.launch.kubernetes import control, lease, pod, states
from kftrain.launch.kubernetes.diagnosis import diagnose
from kftrain.launch.kubernetes.kinds import pytorchjob
from kftrain.launch.kubernetes.kinds.rayjob import KIND, RAY_VERSION, STOP_WORKER
from kftrain.launch.kubernetes.observation import Event, Observation, parse_job, parse_pods
from kftrain.launch.kubernetes.states import State, assess
from kftrain.run.job_tasks import TRAINING
from kftrain.run.paths import RunPaths

ROOT = Path(__file__).parents[4]

TEXT = """
run: {storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
launch:
  backend: rayjob
  nodes: 3
  environment: {NCCL_DEBUG: "a b'c"}
  kubernetes: {trainer_image: "registry/trainer@sha256:0123", gpus_per_node: 4, queue: team, priority_class: high}
"""
CREATED = "2026-11-21T10:00:00Z"
NOW = 1795255200.0 + 60
JOB = "lm-0123456789ab-train"


def resolve(*overrides):
    resolved = config.parse(TEXT, list(overrides))
    paths = RunPaths.of(resolved.run.storage_root, "lm-0123456789ab")
    return spec.make_job(TRAINING, paths, resolved, "mlflow-run"), resolved


def build(*overrides):
    return KIND.build(*resolve(*overrides), "kfp-run-id")


def groups(job):
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def see(**status):
    metadata = {"name": JOB, "uid": "u", "creationTimestamp": CREATED, "labels": {"kftrain.io/task": "train"}}
    return {"metadata": metadata, "spec": build('launch.kubernetes.queue=""')["spec"], "status": status}


def test_it_is_one_attempt_and_takes_its_pods_away():
    job = build()["spec"]
    assert job["backoffLimit"] == 0, "the launcher counts"
    assert job["shutdownAfterJobFinishes"] is True and job["ttlSecondsAfterFinished"] > 0, "the log can still be read"
    assert job["submissionMode"] == "HTTPMode", "else a pod of its own submits, which no setting describes"


def test_the_pods_are_those_of_every_kind_without_command_and_rank():
    training, resolved = resolve()
    expected = pod.build_template(KIND, training, training.workers, resolved.launch.kubernetes)
    (wanted,) = expected["spec"].pop("containers")
    for group in groups(build()):
        labels, pods = group["template"]["metadata"]["labels"], group["template"]["spec"]
        assert labels.pop(KIND.job_name_label) == JOB and labels == expected["metadata"]["labels"]
        (container,) = pods.pop("containers")
        assert pods.pop("restartPolicy") == "Never" and pods == expected["spec"]
        names = [variable["name"] for variable in container.pop("env")]
        assert "KFTRAIN_NODE_RANK" not in names and "NCCL_DEBUG" in names and "command" not in container
        assert container.pop("lifecycle")["preStop"]["exec"]["command"][-1] == STOP_WORKER
        assert container == {key: value for key, value in wanted.items() if key not in ("command", "env")}
        assert group["rayStartParams"]["num-gpus"] == "4" and group["rayStartParams"]["num-cpus"] == "1"


@pytest.mark.parametrize(("nodes", "replicas"), [(1, []), (3, [2])])
def test_the_head_is_a_node_of_the_job(nodes, replicas):
    job = build(f"launch.nodes={nodes}")
    assert [group["replicas"] for group in groups(job)[1:]] == replicas
    assert KIND.count_replicas(job) == {"worker": nodes}


def test_the_driver_asks_for_a_whole_pod_and_its_lines_become_the_log_of_the_first_pod():
    job = build()["spec"]
    redirection, _, command = job["entrypoint"].partition("; ")
    assert redirection == "exec >/proc/1/fd/1 2>&1"
    words = shlex.split(command)
    document = json.loads(words.pop())
    assert words == ["exec", "python3", "-m", "kftrain.launch.ray_driver"]
    assert document["nodes"] == 3 and document["bundle"] == {"CPU": 1, "GPU": 4}
    assert document["command"][:4] == ["python3", "-m", "kftrain", "worker"]
    assert document["environment"] == {}, "the pods have it"


def test_nobody_else_submits_to_its_cluster_and_its_ray_is_that_of_the_image():
    assert build()["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert f"\nray=={RAY_VERSION} " in (ROOT / "images" / "trainer" / "ray.lock").read_text()


def test_a_job_of_somebody_else_tells_no_configuration():
    assert KIND.read_config_digest({"spec": {}}) == "", "somebody else's"


@pytest.mark.parametrize(
    ("deployment", "ray", "state"),
    [
        ("Running", "RUNNING", State.SCHEDULING),
        ("Complete", "SUCCEEDED", State.SUCCEEDED),
        ("Complete", "STOPPED", State.FAILED),
        ("Failed", "FAILED", State.FAILED),
        ("ValidationFailed", "", State.FAILED),
        ("Suspending", "RUNNING", State.SCHEDULING),
        ("Suspended", "", State.QUEUED),
    ],
)
def test_two_fields_say_how_it_stands(deployment, ray, state):
    job = parse_job(see(jobDeploymentStatus=deployment, jobStatus=ray), NOW, KIND)
    assert assess(Observation(job=job)).state is state and job.num_pods == 3


MESSAGE = "Job entrypoint command failed with exit code {}, last available logs (truncated to 20,000 chars):\n"


@pytest.mark.parametrize(
    ("ray", "message", "code"),
    [
        ("FAILED", MESSAGE.format(16), 16),
        ("FAILED", MESSAGE.format(137), 137),
        ("FAILED", "The job supervisor actor could not be scheduled", RetryableError.exit_code),
        ("STOPPED", "Job was intentionally stopped.", Preempted.exit_code),
    ],
)
def test_it_ends_with_the_code_of_its_driver(ray, message, code):
    job = parse_job(see(jobDeploymentStatus="Failed", jobStatus=ray, message=message), NOW, KIND)
    assert job.failure[0] == code
    summary = diagnose("train", None, [], {}, job.failure)
    assert summary.exit_code == code and message.split(",")[0].strip() in summary.line
    assert parse_job(see(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED"), NOW, KIND).failure is None


def make_pod(name, node_type, **state):
    labels = {KIND.job_name_label: JOB, "ray.io/node-type": node_type}
    status = {"containerStatuses": [{"name": "worker", "state": state}]}
    metadata = {"name": name, "uid": name, "labels": labels, "creationTimestamp": CREATED}
    return {"metadata": metadata, "spec": {"nodeName": "n"}, "status": status}


def test_the_first_pod_is_the_head_and_others_have_numbers_of_their_own():
    pods = parse_pods(
        [make_pod("c-head-x", "head"), *(make_pod(f"c-node-{n}", "worker") for n in range(50))], NOW, KIND
    )
    assert pods[0].place == "worker-0" and len({pod.place for pod in pods}) == 51
    assert not parse_pods([make_pod("redis", "redis-cleanup")], NOW, KIND)


@pytest.mark.parametrize(("code", "expected"), [(1, RetryableError.exit_code), (0, 0)])
def test_the_exit_code_of_a_ray_node_is_none_of_a_worker(code, expected):
    (one,) = parse_pods([make_pod("c-node-a", "worker", terminated={"exitCode": code})], NOW, KIND)
    assert one.exit_code == expected and one.failed is bool(code)


def test_why_there_are_no_pods_is_an_event_of_its_cluster():
    job = parse_job(see(rayClusterName=f"{JOB}-abcde", jobDeploymentStatus="Initializing"), NOW, KIND)
    event = Event("c", "FailedToCreateHeadPod", "violates PodSecurity", name=f"{JOB}-abcde", time=NOW)
    assert "violates PodSecurity" in assess(Observation(job=job, events=[event])).text
    other = dataclasses.replace(event, name="other")
    assert "PodSecurity" not in assess(Observation(job=job, events=[other])).text


def test_the_hook_of_a_pod_waits_for_its_worker_and_for_nothing_else(tmp_path):
    """It returns at once where no worker has begun, and when the one that is there has ended."""
    script = STOP_WORKER.replace("/tmp/", f"{tmp_path}/")
    subprocess.run(["bash", "-c", script], check=True, timeout=10, stderr=subprocess.DEVNULL)
    assert (tmp_path / "kftrain-stop").exists()
    with subprocess.Popen(["sleep", "60"]) as worker:
        (tmp_path / "kftrain-worker").write_text(str(worker.pid))
        with subprocess.Popen(["bash", "-c", script], stderr=subprocess.DEVNULL) as hook:
            with pytest.raises(subprocess.TimeoutExpired):
                hook.wait(1)
            worker.terminate()
            worker.wait(10)
            assert hook.wait(10) == 0


class Attempts:
    """The API server's answers about a job, one after the other."""

    def __init__(self, *answers):
        self.kind = KIND
        self._answers = list(answers)

    def read_job(self, name):
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def test_the_log_goes_on_with_the_next_attempt(monkeypatch):
    monkeypatch.setattr(control, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(control, "NEXT_SECONDS", 0.05)
    failed = see(jobDeploymentStatus="Failed", jobStatus="FAILED")
    latest = {**failed, "metadata": {**failed["metadata"], "uid": "v"}}
    complete = see(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    assert control._find_successor(Attempts(failed, None, None, latest), failed) is latest
    assert control._find_successor(Attempts(failed, None), failed) is None, "nobody starts another one"
    assert control._find_successor(Attempts(complete), complete) is None
    monkeypatch.setattr(control, "NEXT_SECONDS", 60.0)
    assert control._find_successor(Attempts(None), complete) is None, "it was seen to succeed, and then deleted"


def test_the_log_of_a_job_that_succeeds_ends_with_it(monkeypatch):
    """Its launcher deletes it at once: what the last look has seen is all that says that no other attempt follows."""
    monkeypatch.setattr(control, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(control, "Logs", lambda *args, **options: MagicMock(is_broken=False))
    running, complete = (see(jobDeploymentStatus=word, jobStatus="SUCCEEDED") for word in ("Running", "Complete"))
    answers = Attempts(running, complete, None)
    answers.list_pods = lambda name: []
    latest = control._print_logs(answers, running, True, print)
    assert latest is complete
    start = time.monotonic()
    assert control._find_successor(answers, latest) is None and time.monotonic() - start < 1


@pytest.mark.parametrize(
    ("state", "overdue_seconds", "is_ready", "released"),
    [
        ({"waiting": {"reason": "PodInitializing"}}, 0, True, True),
        ({"running": {}}, 0, False, False),
        ({"running": {}}, 90, True, False),
        ({"running": {}}, 90, False, True),
    ],
    ids=["not-begun", "in-its-grace", "slow-node", "dead-node"],
)
def test_what_a_deleted_attempt_leaves_is_taken_away(state, overdue_seconds, is_ready, released):
    """Nobody else would: the attempt's own job is gone, and the next one waits for its pods."""
    going, living = make_pod("c-node-a", "worker", **state), make_pod("c-node-b", "worker", **state)
    going["metadata"]["deletionTimestamp"] = time_stamp(-overdue_seconds)
    node = {"status": {"conditions": [{"type": "Ready", "status": "True" if is_ready else "Unknown"}]}}
    deleted = []
    cluster = SimpleNamespace(
        kind=KIND,
        list_pods=lambda name: [going, living],
        read_node=lambda name: node,
        force_delete_pod=lambda name, uid: deleted.append(name),
    )
    lease.release_pods(cluster, JOB)
    assert deleted == ["c-node-a"] * released
    deleted.clear()
    cluster.kind = pytorchjob.KIND
    lease.release_pods(cluster, JOB)
    assert not deleted, "its watcher does, while the job is there"


@pytest.mark.parametrize(("lost", "words"), [(frozenset(), ""), (frozenset("n"), "does not answer")])
def test_a_pod_whose_ray_is_not_ready_says_nothing_about_its_node(lost, words):
    one = make_pod("c-head-x", "head", running={})
    one["spec"]["containers"] = [{"name": "worker", "readinessProbe": {"httpGet": {}}}]
    conditions = {"PodScheduled": "True", "Ready": "False"}
    one["status"]["conditions"] = [{"type": name, "status": status} for name, status in conditions.items()]
    (pod_,) = parse_pods([one], NOW, KIND)
    reason = states.find_pod_reason(pod_, [], lost)
    assert (words in reason.text) if words else reason is None
