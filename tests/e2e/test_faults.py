"""What a job survives and what it does not: exit codes, memory, a worker, an operator and a launcher that go away."""

from pathlib import Path

import pytest
from e2e.commands import kftrain, options, running
from e2e.namespace import wait_until
from helpers.jobs import losses

from kftrain import attempts, contracts, storage
from kftrain.contracts import FailureSummary, RunPaths

pytestmark = pytest.mark.timeout(900)

ONE = {"launch.nodes": 1, "launch.processes_per_node": 1}


@pytest.fixture(scope="session")
def faulty_image(builder, images):
    return builder.derive("faulty", "tests/e2e/faulty.Dockerfile", "tests/e2e", images["trainer"])


@pytest.fixture
def faulty(settings, faulty_image, monkeypatch, tmp_path):
    """Settings of a training whose task fails; `fault` and its other options are still to be set."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return {
        **settings,
        **ONE,
        "task.kind": "faulty.task:Faulty",
        "launch.kubernetes.trainer_image": faulty_image,
        "launch.max_restarts_without_progress": 1,
        "launch.kubernetes.memory": "1Gi",
        "train.steps": 40,
    }


def start(pairs, folder):
    return kftrain("shard", *options(pairs), folder=folder)["run_uri"]


def summary(run_uri, folder):
    """What the launcher found out; it stays in the folder, beside the command's output."""
    found = contracts.read(FailureSummary, RunPaths(run_uri).failure)
    (folder / "failure.json").write_text(storage.dump_json(found.to_dict()))
    return found


def test_an_error_of_the_users_code_is_permanent_and_named(faulty, namespace, tmp_path):
    run_uri = start({**faulty, "task.fault": "raise"}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.finish(code=16)
    found = summary(run_uri, tmp_path)
    assert (found.failure_class, found.exit_code, found.rank) == ("user code", 16, 0)
    assert "the model is not right" in found.line and found.node.startswith("node")
    assert any("ValueError" in line for line in found.last_lines)
    assert attempts.last_attempt(RunPaths(run_uri)) == 1 and namespace.jobs() == {}


@pytest.mark.parametrize("fault", ["retryable", "terminate"])
def test_a_passing_fault_costs_one_attempt(fault, faulty, tmp_path):
    marker = f"{faulty['run.storage_root']}/{tmp_path.name}-{fault}"
    run_uri = start({**faulty, "task.fault": fault, "task.marker": marker}, tmp_path)
    kftrain("train", run_uri, folder=tmp_path)
    assert attempts.last_attempt(RunPaths(run_uri)) == 2
    assert sorted(losses(RunPaths(run_uri))) == list(range(1, 41))


def test_memory_is_named_after_the_budget_of_attempts(faulty, namespace, tmp_path):
    run_uri = start({**faulty, "task.fault": "memory", "task.at_call": 2}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.finish(code=13)
    found = summary(run_uri, tmp_path)
    assert found.failure_class == "out of memory on the host" and "more memory than its limit" in found.line
    assert storage.read_json(RunPaths(run_uri).error)["failure"]["failure_class"] == found.failure_class
    assert namespace.jobs() == {}


def test_the_operator_is_away_for_a_while(faulty, namespace, operator, tmp_path):
    run_uri = start({**faulty, "task.slow_seconds": 0.2}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("checkpoint at step 10 started")
        operator.restart()
        command.finish()
    assert attempts.last_attempt(RunPaths(run_uri)) == 1


def test_creation_waits_for_the_operator(faulty, operator, tmp_path):
    run_uri = start({**faulty, "train.steps": 20}, tmp_path)
    with operator.away(), running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("the API server does not answer (500", 60)
        operator.come_back()
        command.finish()


def test_a_suspended_job_goes_on_where_it_was(faulty, namespace, tmp_path):
    run_uri = start({**faulty, "task.slow_seconds": 0.2}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("checkpoint at step 10 started")
        kftrain("suspend", run_uri, "-n", namespace.name)
        command.wait_for("Queued: suspended")
        wait_until(lambda: not namespace.workers(), 60, "the end of the pods")
        kftrain("resume", run_uri, "-n", namespace.name)
        command.finish()
    assert "going on after step" in command.output and attempts.last_attempt(RunPaths(run_uri)) == 2
