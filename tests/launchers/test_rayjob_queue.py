"""A RayJob in a queue of Kueue: it is suspended until the quota admits it, gives way to a more urgent one, goes on."""

import pytest
from e2e.commands import running
from e2e.queues import open_queue
from launchers.sites.rayjob import open_site
from launchers.test_launchers import SLOW, STEPS, assert_every_step_was_taken, assert_nothing_is_left, prepare

pytestmark = pytest.mark.timeout(1200, func_only=True)


@pytest.fixture(scope="module")
def rayjob_site(request, tmp_path_factory):
    with open_site(request, tmp_path_factory.mktemp("rayjob")) as opened:
        yield opened


@pytest.fixture(scope="module")
def queue(rayjob_site):
    with open_queue(rayjob_site.namespace) as names:
        yield names


def test_it_waits_for_its_quota_gives_way_and_goes_on(rayjob_site, queue, monkeypatch, tmp_path):
    for name, value in rayjob_site.environment.items():
        monkeypatch.setenv(name, value)
    name, low, high = queue
    queued = {**SLOW, "launch.nodes": 1, "launch.kubernetes.queue": name}
    long = {**queued, "train.steps": 4 * STEPS, "launch.kubernetes.queue_priority": low}
    victim = prepare(rayjob_site, long, tmp_path)
    urgent = prepare(rayjob_site, {**queued, "launch.kubernetes.queue_priority": high}, tmp_path)
    with running("train", victim, folder=tmp_path) as first:
        first.wait_for("checkpoint at step 10 committed", 360)
        with running("train", urgent, folder=tmp_path) as second:
            first.wait_for("Queued: ", 120)
            second.wait_for("Training", 360)
            second.finish()
        first.wait_for("going on after step", 360)
        first.finish()
    assert "insufficient unused quota for" in first.output
    assert_every_step_was_taken(urgent, 1)
    for run_uri in (victim, urgent):
        assert_nothing_is_left(rayjob_site, run_uri)
