"""A cluster launcher and the API server that it finds."""

import pytest
from helpers.fakes.api_server import ApiServer
from helpers.fakes.clock import Clock
from helpers.launching import FAST, JOB, Launch, threads, wait_until

from kftrain import config
from kftrain.launch import spec
from kftrain.launch.kubernetes import client, watcher
from kftrain.run.job_tasks import JOB_TASKS
from kftrain.run.paths import RunPaths

TEXT = """
tracking: {uri: "http://mlflow:5000"}
launch: {backend: pytorchjob, nodes: 2, max_restarts_without_progress: 1}
"""
VOLUMES = "launch.kubernetes.volumes=[{name: data, persistentVolumeClaim: {claimName: runs}}]"


@pytest.fixture
def fast(monkeypatch):
    """Waits are milliseconds."""
    for module, values in FAST.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def clock(fast, monkeypatch):
    """What a launcher measures the limits of its job by."""
    turned = Clock()
    monkeypatch.setattr(watcher, "time", turned)
    return turned


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The API server that the launcher finds through KUBECONFIG."""
    monkeypatch.setattr(client, "SERVICE_ACCOUNT", tmp_path / "none")
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    with ApiServer() as api_server:
        monkeypatch.setenv("KUBECONFIG", api_server.write_kubeconfig(tmp_path / "kubeconfig"))
        yield api_server
        api_server.namespace.clear()
        api_server.end_streams()
        wait_until(lambda: not threads())  # they would go on within the next test


@pytest.fixture
def namespace(server):
    """What is in the cluster, and who acts there."""
    return server.namespace


@pytest.fixture
def make_job(tmp_path):
    """(configuration, specification) of a job of run `r`, with settings of `launch.kubernetes` and others."""

    def make(task="train", *overrides, **settings):
        settings = [f"launch.kubernetes.{name}={value}" for name, value in settings.items()]
        resolved = config.parse(TEXT, [f"run.storage_root={tmp_path}", VOLUMES, *settings, *overrides])
        paths = RunPaths.of(str(tmp_path), "r")
        return resolved, spec.make_job(JOB_TASKS[task], paths, resolved)

    return make


@pytest.fixture
def launch(server, clock, make_job, capsys):
    """Starts a launcher. At the end of the test no job and no pod is left of any that has ended."""
    started = []

    def start(*arguments, **settings):
        started.append(Launch(*make_job(*arguments, **settings), capsys))
        return started[-1]

    yield start
    for one in started:
        one.launcher.interrupted = True
    for one in started:
        one.join()
    if started:
        assert (server.namespace.jobs(), server.namespace.pods()) == ([], [])


@pytest.fixture
def training(launch, namespace):
    """A launcher whose job is Training, with two workers."""
    one = launch()
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    namespace.step(JOB, 1, 20)
    one.wait_for("Training")
    return one
