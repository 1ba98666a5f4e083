"""Faults of the catalogue that only real processes can have, by their numbers."""

import json
import signal
import time

import pytest
from helpers import jobs

from kftrain.core import storage
from kftrain.launch.spec import ADDRESS_ENV, NODE_RANK_ENV
from kftrain.run import attempts, commit

pytestmark = pytest.mark.slow

SCRIPTED = "task.kind=helpers.models.scripted_task:ScriptedTask"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(jobs.TESTS))
    return jobs.make_run(tmp_path, [SCRIPTED, "checkpoint.asynchronous=false"])


def node(number):
    return {"nodes": 2, "processes": 1, NODE_RANK_ENV: str(number), ADDRESS_ENV: "127.0.0.1"}


@pytest.mark.parametrize(("what", "number"), [("segfault", signal.SIGSEGV), ("abort", signal.SIGABRT)])
def test_fault_19_a_rank_that_crashes_is_named_and_the_next_attempt_gives_the_same_curve(
    run, two_processes, what, number
):
    paths, resolved = run
    done = jobs.run_worker(paths, resolved, SCRIPT=json.dumps({"rank": 1, "step": 7, "do": what}))
    error = storage.read_json(paths.error)
    assert done.returncode == error["exit_code"] == 128 + number, done.stdout + done.stderr
    assert (error["rank"], error["line"]) == (1, f"rank 1 ended by {number.name} without a word")
    again = jobs.run_worker(paths, resolved)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "going on after step 5" in again.stdout
    assert jobs.losses(paths) == two_processes[1]


def test_fault_21_a_collective_operation_that_one_rank_calls_alone_is_named(tmp_path):
    """Both ranks have begun equally many, and each would wait for the other for ever."""
    overrides = [SCRIPTED, "checkpoint.asynchronous=false", "launch.timeout_seconds=20"]
    paths, resolved = jobs.make_run(tmp_path, overrides)
    done = jobs.run_worker(paths, resolved, SCRIPT=json.dumps({"rank": 1, "step": 7, "do": "call_alone"}))
    error = storage.read_json(paths.error)
    assert done.returncode == error["exit_code"] == 140, done.stdout + done.stderr
    assert "different collective operations" in error["line"]
    assert "rank 1 in all_reduce" in error["line"] and "rank 0 in all_gather" in error["line"]
    assert "in call_alone" in storage.read_text(storage.join(paths.logs, "attempt-1", "rank-1.log"))


def test_fault_24_a_node_that_was_paused_and_comes_back_changes_nothing(run, two_processes, tmp_path):
    paths, resolved = run
    script = {"step": 8, "do": "await_file", "with": [str(tmp_path / "go on")]}
    paused = jobs.start_worker(paths, resolved, SCRIPT=json.dumps(script))
    jobs.wait_for_line(paused, "step 7/20")
    members = jobs.tree_of(paused)
    for member in members:
        member.suspend()
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    before = contents(paths)
    (tmp_path / "go on").touch()
    for member in members:
        member.resume()
    output = paused.communicate(timeout=600)[0]
    assert paused.returncode in (17, 138, 140), output
    after = contents(paths)
    assert {path: after.get(path) for path in before} == before
    for path in after.keys() - before.keys():  # it may have been killed in the middle of its save
        assert path.parts[0] == "checkpoints" and path.parts[1].endswith("-a1") and path.name != "COMMITTED", output
    assert jobs.losses(paths) == two_processes[1]
    assert attempts.find_last_attempt(paths) == 2


def contents(paths):
    """The files of the run but its logs, which may grow."""
    root = storage.local_path(paths.uri)
    files = (path for path in root.rglob("*") if path.is_file() and "logs" not in path.relative_to(root).parts)
    return {path.relative_to(root): path.read_bytes() for path in files}


def test_fault_25_of_two_groups_that_train_at_once_one_completes_and_the_other_says_why_not(
    run, two_processes, tmp_path
):
    paths, resolved = run
    script = {"step": 2, "do": "await_file", "with": [str(tmp_path / "go on")]}
    both = [jobs.start_worker(paths, resolved, SCRIPT=json.dumps(script)) for _ in range(2)]
    deadline = time.monotonic() + 240
    while attempts.find_last_attempt(paths) < 2:
        assert time.monotonic() < deadline, "the second group has not begun"
        time.sleep(0.1)
    (tmp_path / "go on").touch()
    outputs = [process.communicate(timeout=600)[0] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 17], outputs
    assert "a newer attempt holds this run" in outputs[codes.index(17)]
    assert jobs.losses(paths) == two_processes[1]


def test_fault_32_a_stop_while_a_rank_waits_for_another_is_heard_when_the_step_ends(run):
    paths, resolved = run
    process = jobs.start_worker(paths, resolved, SCRIPT=json.dumps({"rank": 1, "step": 7, "do": "await_stop"}))
    jobs.wait_for_line(process, "late")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    assert 5 < commit.find_last_step(paths) < 10
    assert "everything up to it is committed" in storage.read_json(paths.error)["line"]


@pytest.mark.usefixtures("rendezvous")
@pytest.mark.parametrize("number", [0, 1])
def test_fault_34_a_stop_that_reaches_one_node_stops_both_at_the_same_step(run, number):
    paths, resolved = run
    script = json.dumps({"rank": number, "step": 5, "do": "await_stop"})
    nodes = [jobs.start_worker(paths, resolved, SCRIPT=script, **node(each)) for each in (0, 1)]
    jobs.wait_for_line(nodes[0], "step 3/20")
    nodes[number].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=600)[0] for process in nodes]
    assert [process.returncode for process in nodes] == [143, 143], outputs
    error = storage.read_json(paths.error)
    step = commit.find_last_step(paths)
    assert error["kind"] == "Preempted" and f"stopped at step {step} of 20" in error["line"]
    assert 3 <= step < 10
