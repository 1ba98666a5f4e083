"""A task that the product does not have goes through everything that handles jobs, by its entry in the table alone."""

import dataclasses
import signal

import pytest
from helpers.documents import digits_config

from kftrain.core import storage
from kftrain.errors import LaunchError, Preempted
from kftrain.launch.kubernetes import states
from kftrain.launch.kubernetes.observation import Job, Observation, Pod
from kftrain.launch.spec import MLFLOW_RUN_ID_ENV, make_job
from kftrain.run.config import keep_job_config
from kftrain.run.error import ErrorDocument
from kftrain.run.job_tasks import JOB_TASKS, JobTask
from kftrain.run.logs import build_logs_uri, find_last_logs, find_next_attempt
from kftrain.run.paths import RunPaths
from kftrain.stages import dry_run
from kftrain.worker import rank, root_cause

SPEED = "speed.json"


def measure(paths, config, *stop):
    """Measure the bandwidth, on every rank."""
    storage.publish_json(storage.join(paths.uri, SPEED), {"nodes": config.launch.nodes, "stops": len(stop)})


def read_speed(paths, config):
    document = storage.read_json_if_exists(storage.join(paths.uri, SPEED))
    if document is None:
        raise LaunchError("nothing was measured")
    return document


@pytest.fixture(params=[{"log_folder": "bandwidth"}, {"commits": True}], ids=["once", "commits"])
def task(request, monkeypatch):
    task = JobTask("measure", f"{__name__}:measure", read_speed, "Measuring", "nothing is measured", **request.param)
    monkeypatch.setitem(JOB_TASKS, task.name, task)
    return task


@pytest.fixture
def run(tmp_path):
    config = digits_config(tmp_path)
    paths = RunPaths.of(config.run.storage_root, "r")
    storage.publish(paths.config, config.to_yaml())
    keep_job_config(paths, config)
    return paths, config


def test_its_ranks_run_its_function_and_prove_that_it_is_done(task, run):
    paths, config = run
    assert not task.is_complete(paths, config)
    assert rank.run_rank(task.name, paths.uri, config.digest()) == 0
    assert task.is_complete(paths, config)
    assert read_speed(paths, config)["stops"] == task.commits
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_its_job_is_described_and_shown(task, run):
    paths, config = run
    spec = make_job(task, paths, config, "m-7")
    assert spec.workers.arguments[:3] == ("worker", "--task", "measure") and MLFLOW_RUN_ID_ENV not in spec.environment
    assert "--task measure" in dry_run.describe_job_of_run(paths.uri, "measure")
    assert "measure" not in dry_run.describe_jobs_of_new_run(config)


def test_its_logs_have_a_folder(task, run):
    paths, _ = run
    attempt = find_next_attempt(paths, task.name)
    assert attempt == (1 if task.commits else None)
    folder = storage.join(paths.logs, "attempt-1" if task.commits else "bandwidth")
    assert build_logs_uri(paths, task.name, attempt) == find_last_logs(paths, task.name) == folder


def test_a_node_that_was_stopped_says_so_in_its_words(task):
    document = ErrorDocument.salvage({"exit_code": Preempted.exit_code, "line": "x", "rank": 0})
    assert "nothing is measured" in root_cause.explain_stop(document, task.name).line


def test_its_state_is_its_own_word(task):
    job = Job("u", 100.0, frozenset(), suspended=False, has_queue=False, has_status=True, task=task.name)
    seen = Observation(job=job, pods=[Pod("w-0", "u", 0, node="n", scheduled=True, running=True)])
    assert states.assess(dataclasses.replace(seen, claimed=True)).text == "Measuring"
    assert states.assess(seen).text == ("Rendezvous" if task.commits else "Measuring")
