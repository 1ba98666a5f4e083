"""That a stage's processes end with the `kftrain run` that started them, tried with real processes."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from kftrain.process.stage_lifetime import PARENT_VARIABLE

LIMIT_SECONDS = 100
"""For what takes a moment on a machine that does not pause."""

STAGE = """
import subprocess, sys, time
from kftrain.process import stage_lifetime as lifetime
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
lifetime.end_with_parent()
print(child.pid, flush=True)
time.sleep(600)
"""


def start_stage(parent_pid):
    environment = {**os.environ, PARENT_VARIABLE: parent_pid}
    return subprocess.Popen(
        [sys.executable, "-c", STAGE], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def wait_until_gone(pid):
    for _ in range(int(LIMIT_SECONDS / 0.05)):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


def test_sigkill_of_the_parent_ends_the_stage_and_its_children():
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with start_stage(str(parent.pid)) as stage:
        child = int(stage.stdout.readline())
        assert stage.poll() is None
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert stage.wait(LIMIT_SECONDS) == -signal.SIGKILL
        wait_until_gone(child)


def test_a_parent_that_is_gone_already_ends_the_stage_at_once():
    parent = subprocess.Popen([sys.executable, "-c", ""])
    parent.wait()
    with start_stage(str(parent.pid)) as stage:
        assert stage.wait(LIMIT_SECONDS) == -signal.SIGKILL


def test_a_stage_without_such_a_parent_lives_on():
    with start_stage("") as stage:
        child = int(stage.stdout.readline())
        assert stage.poll() is None
        os.killpg(stage.pid, signal.SIGKILL)
        stage.wait(LIMIT_SECONDS)
        wait_until_gone(child)


def test_any_program_can_be_made_to_end_with_who_started_it():
    program = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    command = [sys.executable, "-m", "kftrain.process.parent_death", *program]
    source = f"import subprocess, time; subprocess.Popen({command!r}); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert psutil.Process(child).is_running()
        parent.send_signal(signal.SIGKILL)
        wait_until_gone(child)
