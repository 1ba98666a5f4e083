"""A process that hangs is named with its stack and ended; the next attempt gives the same curve."""

import json
import re

import pytest
from helpers import jobs

from kftrain import config
from kftrain.core import storage
from kftrain.launch.spec import ADDRESS_ENV, NODE_RANK_ENV

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 20
"""A collective operation that a pause of the machine makes longer ends the run before what the test is about."""


@pytest.fixture
def script(monkeypatch):
    """Settings of a run whose processes do what `SCRIPT` says."""
    monkeypatch.syspath_prepend(str(jobs.TESTS))
    return ["task.kind=helpers.models.scripted_task:ScriptedTask", f"launch.timeout_seconds={TIMEOUT_SECONDS}"]


@pytest.fixture
def run(tmp_path, script):
    return jobs.make_run(tmp_path, script)


@pytest.mark.parametrize(
    ("what", "how", "stack"),
    [
        ("hang", r"no progress for \d+ s, while others wait", "scripted_task.py"),
        ("hold_the_gil", "stopped or blocked, no sign of life", "scripted_task.py"),
        ("freeze", "stopped or blocked, no sign of life", ""),
    ],
)
def test_fault_20_a_rank_that_hangs_is_named_with_its_stack_and_ended(run, what, how, stack):
    paths, resolved = run
    done = jobs.run_worker(paths, resolved, SCRIPT=json.dumps({"step": 7, "rank": 1, "do": what}))
    assert done.returncode == 140, done.stdout + done.stderr
    error = storage.read_json(paths.error)
    assert (error["kind"], error["rank"]) == ("HangError", 1) and re.search(f"rank 1: {how}", error["line"])
    log = storage.read_text(storage.join(paths.logs, "attempt-1", "rank-1.log"))
    assert not stack or ("most recent call first" in log and f'{stack}", line' in log and what in log)


@pytest.mark.parametrize(("task", "logs"), [("train", "attempt-1"), ("evaluate", "evaluation")])
def test_a_rank_that_hangs_while_it_scores_is_named(tmp_path, script, task, logs):
    paths, resolved = jobs.make_run(tmp_path, [*script, "evaluate.interval_steps=5", "train.steps=5"])
    if task == "evaluate":
        assert jobs.run_worker(paths, resolved).returncode == 0
        jobs.request_evaluation(paths)
    done = jobs.run_worker(paths, resolved, task, SCRIPT=json.dumps({"hang_in_statistics": 1}))
    assert done.returncode == 140, done.stdout + done.stderr
    error = storage.read_json(paths.error)
    assert (error["kind"], error["rank"]) == ("HangError", 1) and "while others wait" in error["line"]
    log = storage.read_text(storage.join(paths.logs, logs, "rank-1.log"))
    assert "most recent call first" in log and 'scripted_task.py", line' in log and "in statistics" in log


def test_the_attempt_after_a_hang_gives_the_same_curve(tmp_path, script, two_processes):
    paths, resolved = jobs.make_run(tmp_path, [*script, "checkpoint.asynchronous=false"])
    jobs.run_worker(paths, resolved, SCRIPT=json.dumps({"step": 7, "rank": 0, "do": "freeze"}))
    again = jobs.run_worker(paths, resolved)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "going on after step 5" in again.stdout
    assert jobs.losses(paths) == two_processes[1]


def test_ddp_whose_operations_end_in_another_order_blames_nobody_else(tmp_path, script):
    """gloo's threads overtake each other, so the last operation that ended is not the last one that began."""
    sizes = ["model.dim=640", "model.num_layers=5", "model.num_heads=10", "model.num_kv_heads=10", "train.steps=8"]
    paths, resolved = jobs.make_run(tmp_path, [*script, *sizes, "optimizer.warmup_steps=1", "parallel.strategy=ddp"])
    done = jobs.run_worker(paths, resolved, SCRIPT=json.dumps({"step": 4, "rank": 1, "do": "hang"}))
    assert done.returncode == 140, done.stdout + done.stderr
    assert storage.read_json(paths.error)["rank"] == 1


def test_an_error_is_kept_while_a_checkpoint_is_still_being_written(run):
    """The process that failed waits for its save, and the others for the process."""
    paths, resolved = run
    script = {"step": 6, "rank": 1, "do": "fail", "commit_seconds": 2 * TIMEOUT_SECONDS}
    done = jobs.run_worker(paths, resolved, SCRIPT=json.dumps(script))
    assert done.returncode == 16, done.stdout + done.stderr
    error = storage.read_json(paths.error)
    assert (error["kind"], error["rank"]) == ("UserCodeError", 1)


def test_fault_12_a_storage_that_hangs_while_a_checkpoint_is_written_ends_the_attempt_retryably(tmp_path, script):
    """And the processes end, although the thread that writes never does."""
    paths, resolved = jobs.make_run(tmp_path, [*script, "train.steps=500", "checkpoint.timeout_seconds=20"])
    done = jobs.run_worker(paths, resolved, SCRIPT=json.dumps({"step_seconds": 0.1, "commit_seconds": 600}))
    assert done.returncode == 138, done.stdout + done.stderr
    assert "checkpoint at step 5 was not written within 20 s" in storage.read_json(paths.error)["line"]
    assert "checkpoint at step 10 skipped" in done.stdout


@pytest.mark.usefixtures("rendezvous")
def test_a_process_alone_on_its_node_is_named_too(run):
    paths, resolved = run
    script = json.dumps({"step": 7, "rank": 1, "do": "hang"})
    settings = [{"nodes": 2, "processes": 1, NODE_RANK_ENV: str(number), ADDRESS_ENV: "127.0.0.1"} for number in (0, 1)]
    first, second = (jobs.start_worker(paths, resolved, SCRIPT=script, **one) for one in settings)
    outputs = [process.communicate(timeout=600)[0] for process in (first, second)]
    error = storage.read_json(paths.error)
    assert error["kind"] == "HangError", outputs
    assert {first.returncode, second.returncode} <= {138, 140}


def test_what_is_only_slow_is_left_alone(run):
    """Every step takes a good part of the timeout, and all together twice as long."""
    paths, resolved = run
    resolved = config.parse(resolved.to_yaml(), ["train.steps=5", "optimizer.warmup_steps=1"])
    storage.publish(paths.config, resolved.to_yaml())
    done = jobs.run_worker(paths, resolved, SCRIPT=json.dumps({"step_seconds": 8}))
    assert done.returncode == 0, done.stdout + done.stderr
