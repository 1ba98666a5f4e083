"""The cluster launcher against a scripted cluster: what it creates, follows, gives up and deletes."""

import pytest

from kftrain import attempts, config, storage
from kftrain.contracts import RunPaths
from kftrain.errors import ConfigError, LaunchError
from kftrain.launch import cluster as cluster_module
from kftrain.launch import pytorchjob, spec
from kftrain.launch.cluster import ClusterLauncher
from kftrain.launch.kubernetes_api import Pod, _sortable

TEXT = "tracking: {uri: 'http://m'}\nlaunch: {backend: pytorchjob, nodes: 2, max_restarts_without_progress: 1}"


def pod(index, phase="Running", reason="", started=True, exit_code=None):
    return Pod(f"p-{index}", f"uid-{index}", index, phase, reason, started, exit_code)


def conditions(*names):
    return {"conditions": [{"type": name, "status": "True"} for name in names]}


class ScriptedCluster:
    """Plays one state per reading of the job: (status, pods, effect)."""

    namespace = "train"

    def __init__(self, states, existing=None):
        self.states, self.jobs = list(states), {} if existing is None else {existing["metadata"]["name"]: existing}
        self.created, self.deleted, self.logs = [], [], []
        self.now = ({}, [])

    def create_job(self, document):
        name = document["metadata"]["name"]
        if name in self.jobs:
            return False
        self.created.append(name)
        self.jobs[name] = document
        return True

    def read_job(self, name):
        if name not in self.jobs:
            return None
        if "deletionTimestamp" in self.jobs[name]["metadata"]:
            del self.jobs[name]
            return None
        if self.created or "gone" not in self.jobs[name]:
            status, pods, *effect = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            self.now = (status, pods)
            for run in effect:
                run()
        return {**self.jobs[name], "status": self.now[0]}

    def list_pods(self, name):
        return self.now[1] if name in self.jobs else []

    def delete_job(self, name):
        self.deleted.append(name)
        self.jobs.pop(name, None)

    def follow_log(self, pod_name, uid):
        yield f"log of {pod_name}"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(cluster_module, "POLL_SECONDS", 0.0)


@pytest.fixture
def job(tmp_path):
    volumes = "launch.kubernetes.volumes=[{name: data, persistentVolumeClaim: {claimName: runs}}]"
    resolved = config.parse(TEXT, [f"run.storage_root={tmp_path}", volumes])
    return resolved, spec.train_job(RunPaths.of(str(tmp_path), "r"), resolved, "")


def run(job, states, existing=None, **launcher_state):
    resolved, training = job
    cluster = ScriptedCluster(states, existing)
    launcher = ClusterLauncher(resolved, cluster)
    for name, value in launcher_state.items():
        setattr(launcher, name, value)
    return cluster, lambda: launcher.run(training)


def test_a_job_is_created_followed_to_its_success_and_deleted(job, capsys):
    states = [
        ({}, [pod(0, "Pending", "Unschedulable: 0/2 nodes", False)]),
        ({}, [pod(0)]),
        (conditions("Succeeded"), []),
    ]
    cluster, training = run(job, states)
    assert training() == 0
    assert cluster.created == cluster.deleted == ["r-train"]
    output = capsys.readouterr().out
    assert "p-0 waits: Unschedulable: 0/2 nodes" in output
    assert "log of p-0" in output


def test_a_reason_is_said_once_per_change(job, capsys):
    waiting = ({}, [pod(0, "Pending", "ImagePullBackOff: x", False)])
    _, training = run(job, [waiting, waiting, waiting, (conditions("Succeeded"), [])])
    training()
    assert capsys.readouterr().out.count("ImagePullBackOff") == 1


def test_a_failed_job_gives_the_code_of_the_runs_error(job):
    _, training_spec = job
    paths = RunPaths(training_spec.run_uri)
    fails = (conditions("Failed"), [pod(0, "Failed", exit_code=10)])
    _, training = run(job, [fails])
    storage.publish_json(paths.error, ConfigError("wrong").to_dict())
    assert training() == 10
    storage.remove(paths.error)
    _, training = run(job, [(conditions("Failed"), [pod(0, "Failed", exit_code=137)])])
    assert training() == 137


def test_the_very_same_job_is_followed_and_another_one_refused(job):
    resolved, training_spec = job
    existing = pytorchjob.build(training_spec, resolved)
    cluster, training = run(job, [(conditions("Succeeded"), [])], existing)
    assert training() == 0 and cluster.created == []
    other = {"metadata": {"name": "r-train", "annotations": {pytorchjob.DIGEST_ANNOTATION: "other"}}}
    cluster, training = run(job, [({}, [])], other)
    with pytest.raises(LaunchError, match="with another specification"):
        training()


def test_a_job_that_is_being_deleted_is_waited_for(job):
    going = {"metadata": {"name": "r-train", "deletionTimestamp": "now"}}
    cluster, training = run(job, [(conditions("Succeeded"), [])], going)
    assert training() == 0
    assert cluster.created == ["r-train"]


def test_a_request_to_stop_deletes_the_job(job):
    cluster, training = run(job, [({}, [])], interrupted=True)
    assert training() == 143
    assert cluster.deleted == ["r-train"]


def test_pods_that_never_start_are_given_up_with_the_reason(job):
    resolved, training_spec = job
    resolved = config.parse(resolved.to_yaml(), ["launch.kubernetes.start_timeout_seconds=0.001"])
    cluster, training = run((resolved, training_spec), [({}, [pod(0, "Pending", "ErrImagePull: no", False)])])
    with pytest.raises(LaunchError, match="no pod started within 0 s: ErrImagePull: no"):
        training()
    assert cluster.deleted == ["r-train"]


def test_the_operators_restarts_count_against_the_budget(job):
    _, training_spec = job
    paths = RunPaths(training_spec.run_uri)
    attempts.claim(paths, 0, 2)  # of an earlier launch: does not count

    def restarted():
        attempts.claim(paths, 0, 2)

    cluster, training = run(job, [({}, [pod(0)], restarted)])
    with pytest.raises(LaunchError, match="3 attempts in a row without a new checkpoint"):
        training()
    assert cluster.deleted == ["r-train"]


def test_a_job_that_somebody_deleted_is_an_error(job):
    cluster, training = run(job, [({}, [])])
    cluster.read_job = lambda name: None
    with pytest.raises(LaunchError, match="somebody deleted the job"):
        training()


def test_times_of_log_lines_sort_as_text():
    stamps = ["2026-01-01T00:00:00.9Z", "2026-01-01T00:00:00.95Z", "2026-01-01T00:00:01Z"]
    assert sorted(stamps, key=_sortable) == stamps
