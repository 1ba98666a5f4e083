"""What the suite does not ask of a launcher: the driver of a job on a real Ray is killed."""

import psutil
import pytest
from e2e.namespace import wait_until
from launchers.sites.ray import open_site
from launchers.test_launchers import SLOW, assert_every_step_was_taken, assert_nothing_is_left, training

pytestmark = pytest.mark.timeout(600, func_only=True)


@pytest.fixture(scope="module")
def ray_site(request, tmp_path_factory):
    with open_site(request, tmp_path_factory.mktemp("ray")) as opened, pytest.MonkeyPatch.context() as patch:
        for name, value in opened.environment.items():
            patch.setenv(name, value)
        yield opened


def find_drivers(run_uri):
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(run_uri in part for part in process.info["cmdline"] or ())
        and "kftrain.launch.ray_driver" in process.info["cmdline"]
    ]


def test_a_killed_driver_takes_its_workers_along_and_is_another_attempt(ray_site, tmp_path):
    with training(ray_site, tmp_path, SLOW) as (run_uri, command):
        before = ray_site.list_alive(run_uri)
        (driver,) = find_drivers(run_uri)
        driver.kill()
        wait_until(lambda: not set(before) & set(ray_site.list_alive(run_uri)), 60, "the end of the workers")
        command.finish()
    assert_every_step_was_taken(run_uri, 2)
    assert_nothing_is_left(ray_site, run_uri)
