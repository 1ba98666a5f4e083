"""A job under its supervisors, all of it real: silent launchers, signals at bad moments, lost processes."""

import contextlib
import json
import re
import signal
import time

import psutil
import pytest
from helpers import jobs

from kftrain import config
from kftrain.core import storage
from kftrain.launch.spec import ADDRESS_ENV, LAUNCHER_TIMEOUT_ENV, NODE_NAME_ENV, NODE_RANK_ENV
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.run.heartbeat import Heartbeat

pytestmark = pytest.mark.slow

SCRIPTED = "task.kind=helpers.models.scripted_task:ScriptedTask"
"""The same training as the oracle's, whose processes can be told to misbehave."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of the scripted task; checkpoints only at the end, so that any other one comes from a request to stop."""
    monkeypatch.syspath_prepend(str(jobs.TESTS))
    return jobs.make_run(tmp_path, [SCRIPTED, "checkpoint.interval_steps=20"])


def node(number):
    return {"nodes": 2, "processes": 1, NODE_RANK_ENV: str(number), ADDRESS_ENV: "127.0.0.1"}


@pytest.mark.usefixtures("rendezvous")
def test_a_job_of_two_nodes_whose_launcher_falls_silent_commits_and_ends_for_good(run, two_processes):
    paths, resolved = run
    script = {"step_seconds": 1, "step": 9, "do": "await_stop"}
    environment = {"SCRIPT": json.dumps(script), LAUNCHER_TIMEOUT_ENV: "6"}
    with Heartbeat(paths, interval_seconds=0.2):
        first, second = (jobs.start_worker(paths, resolved, **node(number), **environment) for number in (0, 1))
        jobs.wait_for_line(first, "step 7/20")  # it was watched for longer than 6 s until here
    outputs = [process.communicate(timeout=600)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (18, 143), outputs
    error = storage.read_json(paths.error)
    assert (error["kind"], error["exit_code"], error["node_rank"]) == ("LauncherGoneError", 18, 0)
    step = commit.find_last_step(paths)
    assert 7 <= step < 20
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"going on after step {step}" in done.stdout
    assert jobs.losses(paths) == two_processes[1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_that_is_started_again_at_the_very_end_ends_alone(two_processes, number):
    paths, _ = two_processes
    resolved = config.parse(storage.read_text(paths.config))
    done = jobs.run_worker(paths, resolved, **node(number))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "already complete: nothing to do" in done.stdout, "it waits for nobody"


def test_every_process_has_its_complete_log_and_is_named_on_the_console(run):
    paths, resolved = run
    done = jobs.run_worker(paths, resolved, SCRIPT=json.dumps({"chatter": True}))
    assert done.returncode == 0, done.stdout + done.stderr
    console = done.stdout.splitlines()
    for rank in (0, 1):
        log = storage.read_text(storage.join(paths.logs, "attempt-1", f"rank-{rank}.log"))
        assert log.splitlines() == [
            line.removeprefix(f"[rank {rank}] ") for line in console if f"[rank {rank}] " in line
        ]
        for step in range(20):
            assert f"rank {rank} from C {step}\n" in log
            assert all(f"rank {rank} step {step} line {index}\n" in log for index in range(50))
            assert all(f"rank {rank} warns {step} {index}\n" in log for index in range(50))
        assert log.endswith(f"rank {rank} waits ...") or rank == 0
    assert "kftrain| step 20/20" in storage.read_text(storage.join(paths.logs, "attempt-1", "rank-0.log"))


def test_a_process_that_is_killed_is_named(run):
    paths, resolved = run
    script = json.dumps({"rank": 1, "step": 3, "do": "kill"})
    done = jobs.run_worker(paths, resolved, SCRIPT=script, **{NODE_NAME_ENV: "gpu-7"})
    error = storage.read_json(paths.error)
    assert (done.returncode, error["exit_code"]) == (137, 137), done.stdout + done.stderr
    assert (error["rank"], error["node"]) == (1, "gpu-7")
    assert error["line"] == "rank 1 ended by SIGKILL without a word"
    assert "lost contact" in storage.read_text(storage.join(paths.logs, "attempt-1", "rank-0.log"))


def test_a_process_that_fails_is_named_and_its_traceback_is_in_its_log(run):
    paths, resolved = run
    done = jobs.run_worker(paths, resolved, SCRIPT=json.dumps({"rank": 1, "step": 2, "do": "fail"}))
    error = storage.read_json(paths.error)
    assert (done.returncode, error["exit_code"], error["rank"]) == (16, 16, 1), done.stdout + done.stderr
    log = storage.read_text(storage.join(paths.logs, "attempt-1", "rank-1.log"))
    assert "Traceback" in log and "ValueError: scripted" in log


def test_processes_that_leave_with_0_in_the_middle_are_no_success(run):
    paths, resolved = run
    script = {"step": 3, "do": "leave"}
    done = jobs.run_worker(paths, resolved, processes=1, SCRIPT=json.dumps(script))
    assert done.returncode == 138, done.stdout + done.stderr
    assert "the job is not complete" in storage.read_json(paths.error)["line"]


def test_sigterm_while_torch_is_read_ends_it_at_once_and_harms_nothing(run, two_processes):
    paths, resolved = run
    process = jobs.start_worker(paths, resolved)
    until(lambda: psutil.Process(process.pid).children())
    process.send_signal(signal.SIGTERM)
    assert_preempted(process, paths)
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert jobs.losses(paths) == two_processes[1]


def test_sigterm_while_the_processes_start_harms_nothing(run):
    paths, resolved = run
    process = jobs.start_worker(paths, resolved)
    until(lambda: any(is_rank(child) for child in psutil.Process(process.pid).children(recursive=True)))
    process.send_signal(signal.SIGTERM)
    assert_preempted(process, paths)


def test_a_second_sigterm_does_not_disturb_the_commit(run, two_processes):
    paths, resolved = run
    process = jobs.start_worker(paths, resolved, SCRIPT=json.dumps({"step": 5, "do": "await_stop"}))
    jobs.wait_for_line(process, "step 4/20")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert_preempted(process, paths)
    assert "everything up to it is committed" in storage.read_json(paths.error)["line"]
    assert 4 <= commit.find_last_step(paths) < 20
    assert jobs.run_worker(paths, resolved).returncode == 0
    assert jobs.losses(paths) == two_processes[1]


def start_late_export(run, path, **environment):
    """A node that has begun its export, which waits for a file."""
    process = jobs.start_worker(*run, SCRIPT=json.dumps({"export_after": str(path)}), **environment)
    jobs.wait_for_line(process, "export begins")
    return process


def test_sigterm_during_the_export_does_not_keep_the_job_from_completing(run, tmp_path):
    paths, _ = run
    process = start_late_export(run, tmp_path / "go on")
    assert not storage.exists(paths.complete)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.0)  # it reaches the processes
    (tmp_path / "go on").touch()
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert documents.read(Completion, paths.complete).step == 20


def test_a_job_that_is_killed_during_the_export_completes_in_the_next_attempt(run, two_processes, tmp_path):
    paths, resolved = run
    process = start_late_export(run, tmp_path / "never")
    jobs.kill_tree(process)
    assert not storage.exists(paths.complete)
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert documents.read(Completion, paths.complete).attempt == 2
    assert jobs.losses(paths) == two_processes[1]


@pytest.mark.usefixtures("rendezvous")
def test_a_first_node_that_is_lost_during_the_export_takes_the_other_one_along(run, two_processes, tmp_path):
    paths, resolved = run
    second = jobs.start_worker(paths, resolved, **node(1))
    first = start_late_export(run, tmp_path / "never", **node(0))
    time.sleep(2.0)
    assert second.poll() is None
    jobs.kill_tree(first)
    output = second.communicate(timeout=600)[0]
    assert second.returncode == 138, output
    again = [jobs.start_worker(paths, resolved, **node(number)) for number in (0, 1)]
    outputs = [process.communicate(timeout=600)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], outputs
    assert jobs.losses(paths) == two_processes[1]


def test_sigterm_ends_an_evaluation_at_once_and_what_is_evaluated_needs_no_peers(run):
    paths, resolved = run
    assert jobs.run_worker(paths, resolved).returncode == 0
    jobs.request_evaluation(paths)
    slow = json.dumps({"statistics_seconds": 600})
    process = jobs.start_worker(paths, resolved, task="evaluate", SCRIPT=slow)
    jobs.wait_for_line(process, "slow statistics")
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    assert time.monotonic() - start < 300
    done = jobs.run_worker(paths, resolved, "evaluate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert storage.list_names(storage.join(paths.logs, "evaluation")) == ["rank-0.log", "rank-1.log"]
    assert jobs.run_worker(paths, resolved, "evaluate", **node(1)).returncode == 0


def is_rank(process):
    """Whether it is a training process: forked from the agent, it has the agent's command line."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return all("kftrain.worker.agent" in each.cmdline() for each in (process, process.parent()))
    return False


def until(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def assert_preempted(process, paths):
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    assert storage.read_json(paths.error)["kind"] == "Preempted"
    assert not storage.exists(paths.complete)
    assert not re.search(r"Traceback", output), output
