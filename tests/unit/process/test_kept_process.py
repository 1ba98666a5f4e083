"""A process that is kept for another task: real processes, no torch."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from kftrain.process.kept import REPORT_ENV, KeptProcess

PROGRAM = """
import os, signal, sys
from kftrain.process.kept import Reporter
reporter, tasks = Reporter(), 0
while reporter.begin():
    tasks += 1
    if os.environ["DO"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    print(os.getpid(), tasks, os.environ["DO"], os.environ.get("KEPT"), file=open(os.environ["SEEN"], "a"))
    reporter.end(int(os.environ["DO"]))
sys.exit(99)
"""


@pytest.fixture
def process(tmp_path):
    kept = KeptProcess([sys.executable, "-c", PROGRAM])
    yield kept
    kept.close()


def run(process, tmp_path, do):
    process.start({**os.environ, "KEPT": "always", "DO": do, "SEEN": str(tmp_path / "seen")})
    return process.wait()


def seen(tmp_path):
    return [line.split() for line in (tmp_path / "seen").read_text().splitlines()]


def test_the_same_process_does_one_task_after_another_each_with_its_own_environment(process, tmp_path):
    assert [run(process, tmp_path, do) for do in ("138", "0", "7")] == [138, 0, 7]
    pid = seen(tmp_path)[0][0]
    assert seen(tmp_path) == [[pid, "1", "138", "always"], [pid, "2", "0", "always"], [pid, "3", "7", "always"]]


def test_a_process_that_was_killed_is_started_again(process, tmp_path):
    assert run(process, tmp_path, "138") == 138
    assert run(process, tmp_path, "die") == -signal.SIGKILL
    assert process.pid is None
    assert run(process, tmp_path, "0") == 0
    assert [tasks for _, tasks, _, _ in seen(tmp_path)] == ["1", "1"]
    process.kill()  # between two tasks
    process._process.wait(120)
    assert run(process, tmp_path, "5") == 5


def test_it_ends_with_whoever_keeps_it_and_with_close(process, tmp_path):
    assert run(process, tmp_path, "1") == 1
    child = psutil.Process(process.pid)
    process.close()
    assert not child.is_running() and process.pid is None
    assert run(process, tmp_path, "1") == 1
    child = psutil.Process(process.pid)
    process._process.stdin.close()  # as the kernel does for a process that dies
    assert child.wait(120) == 99


def test_without_a_keeper_the_first_task_is_the_only_one(tmp_path, monkeypatch):
    monkeypatch.delenv(REPORT_ENV, raising=False)
    environment = {**os.environ, "DO": "3", "SEEN": str(tmp_path / "seen")}
    assert subprocess.run([sys.executable, "-c", PROGRAM], env=environment, timeout=120, check=False).returncode == 99
    assert len(seen(tmp_path)) == 1
