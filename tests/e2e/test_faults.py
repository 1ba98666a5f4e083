"""What a job survives and what it does not: exit codes, memory, a worker, an operator and a launcher that go away."""

import pytest
from e2e.commands import kftrain, options, running
from e2e.namespace import wait_until
from helpers.jobs import losses

from kftrain.core import storage
from kftrain.data.shards.manifest import read_manifest, shard_uri
from kftrain.run import attempts
from kftrain.run.error import read_error
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.timeout(900, func_only=True)


def start(pairs, folder):
    return kftrain("shard", *options(pairs), folder=folder)["run_uri"]


def summary(run_uri, folder):
    """What the launcher found out; it stays in the folder, beside the command's output."""
    found = read_error(RunPaths(run_uri).failure)
    (folder / "failure.json").write_text(storage.dump_json(found.to_dict()))
    return found


def test_an_error_of_the_users_code_is_permanent_and_named(faulty, namespace, tmp_path):
    run_uri = start({**faulty, "task.fault": "raise"}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.finish(code=16)
    found = summary(run_uri, tmp_path)
    assert (found.failure_class.value, found.exit_code, found.rank) == ("user code", 16, 0)
    assert "the model is not right" in found.line and found.node.startswith("node")
    assert any("ValueError" in line for line in found.last_lines)
    assert attempts.find_last_attempt(RunPaths(run_uri)) == 1 and namespace.jobs() == {}


@pytest.mark.parametrize("fault", ["retryable", "terminate"])
def test_a_passing_fault_costs_one_attempt(fault, faulty, tmp_path):
    marker = f"{faulty['run.storage_root']}/{tmp_path.name}-{fault}"
    run_uri = start({**faulty, "task.fault": fault, "task.marker": marker}, tmp_path)
    kftrain("train", run_uri, folder=tmp_path)
    assert attempts.find_last_attempt(RunPaths(run_uri)) == 2
    assert sorted(losses(RunPaths(run_uri))) == list(range(1, 41))


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "code", "failure_class", "part"),
    [
        ({"task.fault": "diverge"}, 19, "diverged", "not finite"),
        ({"task.fault": "retryable"}, 13, "lost connection between workers", "a passing fault"),
        ({"task.fault": "freeze", "launch.timeout_seconds": 10}, 13, "hang", "rank 0: stopped or blocked"),
    ],
)
def test_what_failed_has_a_class(changes, code, failure_class, part, faulty, tmp_path):
    run_uri = start({**faulty, **changes, "task.at_call": 2}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.finish(code=code)
    found = summary(run_uri, tmp_path)
    assert (found.failure_class.value, part in found.line) == (failure_class, True), found


@pytest.mark.full
def test_a_torn_shard_is_the_data(faulty, tmp_path):
    root = f"{faulty['run.storage_root']}-torn"
    run_uri = start({**faulty, "run.storage_root": root}, tmp_path)
    manifest_uri = storage.read_json(RunPaths(run_uri).shards)["manifest_uri"]
    shard = shard_uri(manifest_uri, read_manifest(manifest_uri).splits["train"].shards[0])
    storage.publish(shard, storage.read_bytes(shard)[:-1000])
    with running("train", run_uri, folder=tmp_path) as command:
        command.finish(code=11)
    assert summary(run_uri, tmp_path).failure_class.value == "data"


def test_memory_is_named_after_the_budget_of_attempts(faulty, namespace, tmp_path):
    run_uri = start({**faulty, "task.fault": "memory", "task.at_call": 2}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.finish(code=13)
    found = summary(run_uri, tmp_path)
    assert found.failure_class.value == "out of memory on the host" and "more memory than its limit" in found.line
    assert storage.read_json(RunPaths(run_uri).error)["failure_class"] == found.failure_class.value
    assert namespace.jobs() == {}


def test_the_operator_is_away_for_a_while(faulty, namespace, operator, tmp_path):
    run_uri = start({**faulty, "task.slow_seconds": 0.2}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("checkpoint at step 10 started")
        operator.restart()
        command.finish()
    assert attempts.find_last_attempt(RunPaths(run_uri)) == 1


def test_creation_waits_for_the_operator(faulty, operator, tmp_path):
    run_uri = start({**faulty, "train.steps": 20}, tmp_path)
    with operator.away(), running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("the API server does not answer (500", 60)
        operator.come_back()
        command.finish()


def test_a_suspended_job_goes_on_where_it_was(faulty, namespace, tmp_path):
    run_uri = start({**faulty, "task.slow_seconds": 1.0}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("checkpoint at step 10 started")
        kftrain("suspend", run_uri, "-n", namespace.name, folder=tmp_path)
        command.wait_for("Queued: suspended")
        wait_until(lambda: not namespace.workers(), 60, "the end of the pods")
        kftrain("unsuspend", run_uri, "-n", namespace.name, folder=tmp_path)
        command.finish()
    assert "going on after step" in command.output and attempts.find_last_attempt(RunPaths(run_uri)) == 2
