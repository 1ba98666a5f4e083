"""That a stage's processes end with the `kftrain run` that started them, tried with real processes."""

import os
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

from kftrain.process.stage_lifetime import PARENT_VARIABLE
from kftrain.worker.node import NodeSpec

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
    bound = f"from kftrain.process.parent_death import bind_command; command = bind_command({program!r})"
    source = f"{bound}; import subprocess, time; subprocess.Popen(command); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert psutil.Process(child).is_running()
        parent.send_signal(signal.SIGKILL)
        wait_until_gone(child)


HELD = """
import os
if "HELD" in os.environ:
    folder = os.environ.pop("HELD")
    with open(f"{folder}/ready", "w") as stream:
        stream.write(str(os.getpid()))
    open(f"{folder}/go").read()
"""
"""`sitecustomize`: a process stands at its very beginning until somebody lets it go on."""

AGENT = """
import sys, time
from kftrain.worker import agent, rank
agent._preload = lambda task: None
rank.run_rank = lambda *arguments: time.sleep(600)
agent.main(sys.argv[1])
"""

KEPT = "import time; from kftrain.process.kept import Reporter; Reporter().begin(); time.sleep(600)"

KEEPER = """
import os, sys
from kftrain.process.kept import KeptProcess
environment = dict(os.environ)
KeptProcess([sys.executable, "-c", *sys.argv[2:]]).start({**environment, "HELD": sys.argv[1]})
os.read(0, 1)
"""

ROLE = """
import os, sys
from pathlib import Path
from kftrain.launch.role_processes import RoleProcesses
from kftrain.launch.spec import Role
role = Role(name="server", replicas=1, processes_per_node=1, arguments=())
environment = {**os.environ, "HELD": sys.argv[1]}
with RoleProcesses([sys.executable, "-c", sys.argv[2]], [role], environment, Path(sys.argv[1]), lambda: None):
    os.read(0, 1)
"""


@pytest.mark.parametrize(
    ("parent", "child"),
    [
        (KEEPER, [AGENT, NodeSpec("train", "runs/r", "0" * 64, processes=2).to_argument()]),
        (KEEPER, [KEPT]),
        (ROLE, ["import time; time.sleep(600)"]),
    ],
    ids=["agent", "kept", "role"],
)
def test_sigkill_of_the_parent_before_the_child_has_begun_leaves_nobody(tmp_path, parent, child):
    (tmp_path / "sitecustomize.py").write_text(HELD)
    for name in ("ready", "go"):
        os.mkfifo(tmp_path / name)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", parent, str(tmp_path), *child]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as started:
        orphan = psutil.Process(int((tmp_path / "ready").read_text()))
        started.kill()
    descriptor = os.pidfd_open(orphan.pid)
    (tmp_path / "go").write_text("")
    ended, _, _ = select.select([descriptor], [], [], LIMIT_SECONDS)
    os.close(descriptor)
    for each in [] if ended else [*orphan.children(), orphan]:
        each.kill()
    assert ended
