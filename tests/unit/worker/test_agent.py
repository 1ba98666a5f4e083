"""How an agent waits for its ranks: real forks, no torch."""

import contextlib
import json
import os
import signal
import time

import pytest

from kftrain.worker import agent


def forked(action):
    pid = os.fork()
    if not pid:
        try:
            action()
        finally:
            os._exit(0)
    return pid


def exits(code, after_seconds=0.0):
    return lambda: (time.sleep(after_seconds), os._exit(code))


def exits_after(pid, code):
    """Once the agent knows of the end of that other process."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.01)
    os._exit(code)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def patient():
    """Ends with 143 when it is asked to."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    time.sleep(600)


def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def failures(*actions):
    ranks = {forked(action): rank for rank, action in enumerate(actions)}
    return [(failure.rank, failure.returncode) for failure in agent.wait_for_ranks(ranks)]


def test_ranks_that_all_succeed_leave_no_failure():
    assert failures(exits(0), exits(0, 0.2), exits(0, 0.1)) == []


def test_the_first_failure_is_reported_and_the_others_are_asked_to_end(monkeypatch):
    monkeypatch.setattr(agent, "GRACE_SECONDS", 600.0)
    start = time.monotonic()
    assert failures(patient, exits(11), patient) == [(1, 11)]
    assert time.monotonic() - start < 300


def test_what_fails_at_the_same_moment_is_reported_in_its_order(monkeypatch):
    monkeypatch.setattr(agent, "SAME_MOMENT_SECONDS", 120.0)
    first = forked(killed)
    ranks = {forked(lambda: exits_after(first, 138)): 0, first: 1, forked(exits(0)): 2}
    assert [(failure.rank, failure.returncode) for failure in agent.wait_for_ranks(ranks)] == [(1, -9), (0, 138)]


def test_a_rank_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(agent, "GRACE_SECONDS", 0.3)
    assert failures(deaf, exits(16, 0.2)) == [(1, 16)]


def test_a_rank_that_succeeds_while_another_fails_is_no_failure():
    assert failures(exits(0, 0.05), exits(1)) == [(1, 1)]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_fault_19_a_rank_that_crashes_is_named_with_its_signal_and_the_code_is_retryable(tmp_path, monkeypatch, number):
    monkeypatch.setenv("KFTRAIN_ERROR_FILE", str(tmp_path / "error.json"))
    crash = forked(lambda: (signal.signal(number, signal.SIG_DFL), os.kill(os.getpid(), number)))
    ranks = {forked(patient): 0, crash: 1}
    assert agent._write_cause(agent.wait_for_ranks(ranks)) == 128 + number
    document = json.loads((tmp_path / "error.json").read_text())
    assert (document["rank"], document["exit_code"]) == (1, 128 + number)
    assert document["line"] == f"rank 1 ended by {number.name} without a word"


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (16, 16)])
def test_the_cause_is_written_for_the_supervisor(tmp_path, monkeypatch, code, seen):
    monkeypatch.setenv("KFTRAIN_ERROR_FILE", str(tmp_path / "error.json"))
    pid = forked(exits(code))
    assert agent._write_cause(agent.wait_for_ranks({pid: 3})) == seen
    assert (tmp_path / "error.json").exists() == bool(code)
    if code:
        assert "rank 3 ended by exit code 16" in (tmp_path / "error.json").read_text()
