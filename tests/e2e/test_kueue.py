"""Jobs in a Kueue queue: they wait with the reason, are preempted and resumed; what never fits fails at once."""

import pytest
from e2e.commands import kftrain, options, running
from e2e.queues import open_queue

from kftrain.run import attempts
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.timeout(900, func_only=True)


@pytest.fixture(scope="module")
def queue(namespace):
    with open_queue(namespace) as names:
        yield names


@pytest.fixture
def queued(settings, queue):
    """Settings of a small training in the queue, of low priority."""
    one = {"launch.nodes": 1, "launch.processes_per_node": 1, "train.steps": 60, "model.dim": 192}
    return {**settings, **one, "launch.kubernetes.queue": queue[0], "launch.kubernetes.queue_priority": queue[1]}


def shard(pairs, folder):
    return kftrain("shard", *options(pairs), folder=folder)["run_uri"]


def test_a_job_waits_with_the_reason_is_preempted_and_goes_on(queued, queue, tmp_path):
    low = shard({**queued, "train.steps": 400}, tmp_path)  # long enough to be there when the other one comes
    high = shard({**queued, "launch.kubernetes.queue_priority": queue[2], "train.steps": 20}, tmp_path)
    with running("train", low, folder=tmp_path) as victim:
        victim.wait_for("checkpoint at step 10 started", 300)
        with running("train", high, folder=tmp_path) as winner:
            victim.wait_for("Queued: ", 120)
            winner.wait_for("Training", 300)
            winner.finish()
        victim.finish()
    assert "insufficient unused quota for cpu" in victim.output
    assert "going on after step" in victim.output
    assert attempts.find_last_attempt(RunPaths(low)) == 2 and attempts.find_last_attempt(RunPaths(high)) == 1


def test_what_never_fits_fails_at_once(queued, tmp_path):
    run_uri = shard({**queued, "launch.kubernetes.cpu": 3}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("it never fits", 60)
        command.finish(code=13, seconds=60)
    assert "request > maximum capacity" in command.output


def test_a_queue_that_does_not_exist_is_named(queued, tmp_path):
    limit = {"launch.kubernetes.queue": "nowhere", "launch.kubernetes.queue_timeout_seconds": 20}
    run_uri = shard({**queued, **limit}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("LocalQueue nowhere doesn't exist", 60)
        command.finish(code=13, seconds=120)
    assert "Queued for longer than" in command.output


def test_a_priority_class_that_does_not_exist_is_suspected(queued, tmp_path):
    limit = {"launch.kubernetes.queue_priority": "nope", "launch.kubernetes.queue_timeout_seconds": 25}
    run_uri = shard({**queued, **limit}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("Kueue has made no Workload of it", 60)
        command.finish(code=13, seconds=120)
