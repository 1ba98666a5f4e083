"""Servers that somebody asks for while a job is at work: what is refused, what is started, and whom the job needs."""

import time

import pytest
from helpers import clicks

from kftrain import config as configuration
from kftrain.errors import FencedError, LaunchError
from kftrain.launch.servers import ServersOfJob, change_servers
from kftrain.launch.spec import make_job
from kftrain.run.job_tasks import TRAINING
from kftrain.run.membership import (
    Membership,
    WantedServers,
    agree_on_servers,
    ask_for_servers,
    read_membership,
    read_wanted_servers,
)
from kftrain.run.paths import RunPaths


class Jobs:
    def __init__(self, *tasks):
        self._tasks = tasks

    def describe(self, run):
        return [type("Job", (), {"task": task})() for task in self._tasks]


def read_config(*overrides):
    return configuration.parse(clicks.TEXT, overrides)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(str(tmp_path / "runs" / "r"))


REFUSED = {
    ("server.num_servers=0", "server.tables=[]"): "this run has no tables on servers",
    ("launch.backend=jobset",): r"launch\.backend: servers join and leave on one machine alone \(got 'jobset'\)",
    (
        "server.num_servers=2",
        "server.copies=2",
    ): r"server\.copies: servers with copies neither join nor leave \(got 2\)",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_change_its_servers_is_refused(paths, overrides):
    config = read_config(*overrides)
    with pytest.raises(LaunchError, match=REFUSED[overrides]):
        change_servers(Jobs("train"), paths, config, 3)
    assert read_wanted_servers(paths, config.digest()) is None


def test_a_run_that_does_not_train_now_is_refused(paths):
    with pytest.raises(LaunchError, match="does not train on this machine now"):
        change_servers(Jobs("evaluate"), paths, read_config(), 3)


def test_what_is_asked_for_is_of_jobs_of_one_configuration(paths):
    config = read_config()
    change_servers(Jobs("train"), paths, config, 3)
    first = read_wanted_servers(paths, config.digest())
    assert first == WantedServers(first.request, 3)
    ask_for_servers(paths, config.digest(), 3)
    assert read_wanted_servers(paths, config.digest()).request != first.request
    assert read_wanted_servers(paths, read_config("server.num_servers=4").digest()) is None


def test_the_last_ring_counts_and_is_created_once(paths):
    assert read_membership(paths, "d", 2) == (0, 2)
    for epoch in (1, 2, 10):
        agree_on_servers(paths, "d", Membership(epoch, epoch + 2))
    assert read_membership(paths, "d", 2) == (10, 12) and read_membership(paths, "another", 2) == (10, 2)
    with pytest.raises(FencedError):
        agree_on_servers(paths, "d", Membership(10, 12))


class Nodes:
    def __init__(self):
        self.asked = []

    def add(self, name, replicas):
        self.asked.append((name, replicas))


def test_a_job_has_the_servers_of_its_ring_and_starts_those_that_are_asked_for(paths):
    spec = make_job(TRAINING, paths, read_config())
    servers = ServersOfJob(spec)
    (role,) = servers.resize(spec.others)
    assert role.replicas == 1 and servers.is_needed(role, 0) and not servers.is_needed(role, 1)
    nodes = Nodes()
    with servers.adding(nodes):
        ask_for_servers(paths, spec.config_digest, 2)
        deadline = time.monotonic() + 20
        while not nodes.asked and time.monotonic() < deadline:
            time.sleep(0.02)
    assert nodes.asked == [("server", 2)]
    agree_on_servers(paths, spec.config_digest, Membership(1, 2))
    assert servers.is_needed(role, 1)
    assert [role.replicas for role in ServersOfJob(spec).resize(spec.others)] == [2]
