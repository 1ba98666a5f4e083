"""A job with servers beside its workers, killed on both sides: nothing is lost, and nobody stays behind."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from helpers import clicks, jobs

from kftrain.core import storage
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAUNCH = """
import sys
from kftrain import launch
from kftrain.run.config import read_config
from kftrain.run.paths import RunPaths
from kftrain.trust import permit
paths = RunPaths(sys.argv[1])
launch.run_training(paths, permit(read_config(paths)), lambda: "")
"""

SIZES = ["server.num_servers=2", "train.steps=60", "checkpoint.interval_steps=20", "optimizer.learning_rate=0.1"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("root")
    return folder, jobs.prepare(folder, clicks.TEXT, SIZES, "data")[0]


def launch(paths):
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, paths.uri],
        env=jobs.worker_environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def find_processes(paths):
    """All processes of the run, by the lines that they were started with; the launcher is one of them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and any(paths.uri in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


def find_servers(paths):
    return [process for process in find_processes(paths) if "server" in process.info["cmdline"]]


def find_rank(paths):
    agents = [process for process in find_processes(paths) if "kftrain.worker.agent" in process.info["cmdline"]]
    ranks = [process for process in agents if process.ppid() in {agent.pid for agent in agents}]
    assert len(ranks) >= 2
    return ranks[-1]  # forked from the agent, with its command line


def wait_until_nobody_is_left(paths):
    deadline = time.monotonic() + 60
    while left := find_processes(paths):
        assert time.monotonic() < deadline, [process.info["cmdline"] for process in left]
        time.sleep(0.2)


def test_a_run_killed_on_both_sides_has_the_tables_of_one_that_was_not(root):
    folder, data = root
    whole, paths = (jobs.prepare(folder, clicks.TEXT, SIZES, name, data)[0] for name in ("whole", "killed"))
    launched = launch(whole)
    printed, _ = launched.communicate(timeout=300)
    assert launched.returncode == 0, printed
    launched = launch(paths)
    lines = jobs.wait_for_line(launched, "checkpoint at step 20 committed")
    find_servers(paths)[1].kill()
    lines += jobs.wait_for_line(launched, "going on after step")
    lines += jobs.wait_for_line(launched, "checkpoint at step 40 committed")
    find_rank(paths).kill()
    rest, _ = launched.communicate(timeout=300)
    text = "".join(lines) + rest
    assert launched.returncode == 0, text
    assert "server-1 ended by SIGKILL" in text
    ours, theirs = (documents.read(Completion, one.complete) for one in (paths, whole))
    assert (ours.attempt, theirs.attempt) == (3, 1)
    tables = [clicks.rows_of(one.checkpoint_uri) for one in (ours, theirs)]
    assert len(tables[0]) and tables[0].tobytes() == tables[1].tobytes()
    assert commit.find_last_step(paths) == 60
    wait_until_nobody_is_left(paths)


def test_nobody_outlives_a_launcher_that_was_killed_and_the_secret_is_nowhere(root):
    folder, data = root
    paths, _ = jobs.prepare(folder, clicks.TEXT, SIZES, "orphans", data)
    launched = launch(paths)
    text = "".join(jobs.wait_for_line(launched, "checkpoint at step 20"))
    servers = find_servers(paths)
    assert len(servers) == 2
    secret = servers[0].environ()["KFTRAIN_SERVER_SECRET"]
    command_lines = [" ".join(process.info["cmdline"]) for process in find_processes(paths)]
    launched.kill()
    launched.communicate()
    wait_until_nobody_is_left(paths)
    assert len(secret) == 64 and not any(secret in shown for shown in [text, *command_lines])
    files = storage.local_path(RunPaths(paths.uri).uri).rglob("*")
    assert not any(secret.encode() in file.read_bytes() for file in files if file.is_file())
