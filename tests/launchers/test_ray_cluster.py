"""What the suite does not ask of a launcher: processes of a job on a real Ray are killed, and leave nobody behind."""

import psutil
import pytest
from e2e.namespace import wait_until
from launchers.sites.ray import find_agents, open_site
from launchers.test_launchers import SLOW, assert_every_step_was_taken, assert_nothing_is_left, training

pytestmark = pytest.mark.timeout(600, func_only=True)


@pytest.fixture(scope="module")
def ray_site(request, tmp_path_factory):
    with open_site(request, tmp_path_factory.mktemp("ray")) as opened, pytest.MonkeyPatch.context() as patch:
        for name, value in opened.environment.items():
            patch.setenv(name, value)
        yield opened


def find_driver(run_uri):
    (driver,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(run_uri in part for part in process.info["cmdline"] or ())
        and "kftrain.launch.ray_driver" in process.info["cmdline"]
    ]
    return driver


def find_agent(run_uri):
    return find_agents(run_uri)[1]


def find_actor(run_uri):
    """Ray's own process, below which a node's worker is."""
    return find_agents(run_uri)[1].parent().parent()


@pytest.mark.parametrize("find", [find_driver, find_agent, find_actor])
def test_what_is_killed_takes_its_workers_along_and_is_another_attempt(find, ray_site, tmp_path):
    with training(ray_site, tmp_path, SLOW) as (run_uri, command):
        before = ray_site.list_alive(run_uri)
        find(run_uri).kill()
        workers = {name for name in before if "ray_driver" not in name}
        wait_until(lambda: not workers & set(ray_site.list_alive(run_uri)), 60, "the end of the workers")
        command.finish()
    assert "going on after step" in command.output
    assert_every_step_was_taken(run_uri, 2)
    assert_nothing_is_left(ray_site, run_uri)
