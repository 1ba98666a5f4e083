"""A job with servers beside its workers, killed on both sides: nothing is lost, and nobody stays behind."""

import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from helpers import clicks, jobs

from kftrain import config
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


def prepare_pair(root, names, sizes):
    """Train a run that nobody disturbs, and return it with another one that has not begun."""
    folder, data = root
    whole, paths = (jobs.prepare(folder, clicks.TEXT, sizes, name, data)[0] for name in names)
    launched = launch(whole)
    printed, _ = launched.communicate(timeout=300)
    assert launched.returncode == 0, printed
    return whole, paths


def require_same_tables(paths, whole, num_attempts):
    """Require that both runs have trained to the same rows, the first in this many attempts."""
    ours, theirs = (documents.read(Completion, one.complete) for one in (paths, whole))
    assert (ours.attempt, theirs.attempt) == (num_attempts, 1)
    tables = [clicks.rows_of(one.checkpoint_uri) for one in (ours, theirs)]
    assert len(tables[0]) and tables[0].tobytes() == tables[1].tobytes()
    wait_until_nobody_is_left(paths)


def read_steps(launched, lines, num_steps):
    """Read what is printed to the end; return the numbers of the steps, and the longest time between two of them."""
    pause, last = 0.0, time.monotonic()
    for line in launched.stdout:
        lines.append(line)
        if "step " in line and f"/{num_steps}" in line:
            pause, last = max(pause, time.monotonic() - last), time.monotonic()
    launched.communicate(timeout=60)
    assert launched.returncode == 0, "".join(lines)
    end = f"/{num_steps}"
    return [line.split(end)[0].split("step ")[-1] for line in lines if "step " in line and end in line], pause


def test_a_run_killed_on_both_sides_has_the_tables_of_one_that_was_not(root):
    whole, paths = prepare_pair(root, ("whole", "killed"), SIZES)
    launched = launch(paths)
    lines = jobs.wait_for_line(launched, "checkpoint at step 20 committed")
    find_servers(paths)[1].kill()
    killed_at = time.monotonic()
    lines += jobs.wait_for_line(launched, "going on after step")
    assert time.monotonic() - killed_at < 30, "workers wait for a server that is gone"
    lines += jobs.wait_for_line(launched, "checkpoint at step 40 committed")
    find_rank(paths).kill()
    rest, _ = launched.communicate(timeout=300)
    text = "".join(lines) + rest
    assert launched.returncode == 0, text
    assert "server-1 ended by SIGKILL" in text
    require_same_tables(paths, whole, 3)
    assert commit.find_last_step(paths) == 60


def test_a_server_that_is_killed_costs_a_run_with_copies_no_step(root):
    whole, paths = prepare_pair(root, ("pair", "widowed"), [*SIZES, "server.copies=2"])
    launched = launch(paths)
    lines = jobs.wait_for_line(launched, "step 25/60")
    find_servers(paths)[0].kill()
    steps, pause = read_steps(launched, lines, 60)
    print(f"the longest time between two steps after the kill: {pause:.2f} s")
    assert "server-0 ended by SIGKILL; the job goes on without it" in "".join(lines)
    assert pause < 3
    assert len(steps) == len(set(steps)) >= 55, "a step was done again"
    require_same_tables(paths, whole, 1)


def test_servers_join_a_run_and_leave_it_while_it_trains(root):
    """One that joins is killed before it has rows; another one joins then, and leaves with the one before it."""
    sizes = [*SIZES, "train.steps=1500", "checkpoint.interval_steps=100"]
    whole, paths = prepare_pair(root, ("fixed", "grown"), sizes)
    launched = launch(paths)
    lines = jobs.wait_for_line(launched, "step 20/1500")
    scale(paths, 3)
    while len(find_servers(paths)) < 3:
        time.sleep(0.05)
    next(server for server in find_servers(paths) if server.environ()["KFTRAIN_NODE_RANK"] == "2").kill()
    lines += jobs.wait_for_line(launched, "server-2 ended by SIGKILL; the job goes on without it")
    for num_servers in (3, 1):
        scale(paths, num_servers)
        lines += jobs.wait_for_line(launched, f"goes on with {num_servers} servers in place of")
    steps, pause = read_steps(launched, lines, 1500)
    print(f"the longest time between two steps: {pause:.2f} s")
    assert len(steps) == len(set(steps)), "a step was done again"
    assert sorted(storage.list_names(paths.servers))[-3:] == ["ring-1.json", "ring-2.json", "wanted.json"]
    require_same_tables(paths, whole, 1)


ISLANDS = """
run: {name: islands, seed: 2}
data: {source: stdlib, validation_fraction: 0.05}
task: {kind: language_modeling, sequence_length: 16, tokenizer: bytes}
model: {kind: transformer, dim: 16, num_layers: 2, num_heads: 2}
parallel: {islands: 2}
server: {num_servers: 2}
train: {steps: 300, global_batch_size: 4, log_interval_steps: 20, outer: {steps: 10, encoding: int8}}
checkpoint: {interval_steps: 100}
evaluate: {interval_steps: 0}
launch: {processes_per_node: 2, timeout_seconds: 120}
"""

QUORUM = ["train.outer.quorum=1", "train.outer.grace_seconds=0"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return folder, jobs.prepare(folder, ISLANDS, (), "data")[0]


@pytest.mark.parametrize("settings", [[], QUORUM], ids=["all", "quorum"])
def test_islands_that_lose_a_server_go_on_from_the_checkpoint(text, settings):
    folder, data = text
    name = "-".join(["islands", *map(str, settings[:1])]).replace("=", "-")
    paths, _ = jobs.prepare(folder, ISLANDS, settings, name, data)
    launched = launch(paths)
    lines = jobs.wait_for_line(launched, "checkpoint at step 100 committed")
    find_servers(paths)[0].kill()
    lines += jobs.wait_for_line(launched, "going on after step")
    rest, _ = launched.communicate(timeout=300)
    shown = "".join(lines) + rest
    assert launched.returncode == 0 and "ended by SIGKILL" in shown and "step 300/300" in shown, shown
    assert "2 islands of fsdp" in shown
    completion = documents.read(Completion, paths.complete)
    assert completion.attempt == 2
    wait_until_nobody_is_left(paths)
    if settings:
        return  # who comes when differs from run to run
    whole, _ = jobs.prepare(folder, ISLANDS, settings, "undisturbed", data)
    launch(whole).communicate(timeout=300)
    models = [
        (storage.local_path(documents.read(Completion, one.complete).export_uri) / "model.safetensors").read_bytes()
        for one in (paths, whole)
    ]
    assert models[0] == models[1]


def test_servers_that_are_told_to_stop_with_the_workers_are_there_for_the_last_meeting(text):
    """As on a cluster, which tells all pods of a job at once."""
    folder, data = text
    paths, _ = jobs.prepare(folder, ISLANDS, [*QUORUM, "train.steps=20000"], "told", data)
    launched = launch(paths)
    lines = jobs.wait_for_line(launched, "step 20/")
    workers = [process for process in find_processes(paths) if "worker" in process.info["cmdline"]]
    for process in [*find_servers(paths), *workers]:
        process.terminate()
    lines += jobs.wait_for_line(launched, "stopped at step")
    launched.terminate()
    launched.communicate(timeout=60)
    assert "attempt 2" not in "".join(lines) and commit.find_last_step(paths) > 0
    wait_until_nobody_is_left(paths)


def scale(paths, num_servers):
    command = [sys.executable, "-m", "kftrain", "scale", paths.uri, "--servers", str(num_servers)]
    assert f"asked for {num_servers} servers" in subprocess.check_output(command, text=True)


def test_a_run_goes_on_with_other_numbers_of_workers_and_servers(root):
    folder, _ = root
    whole, paths = prepare_pair(root, ("same", "resized"), SIZES)
    launched = launch(paths)
    jobs.wait_for_line(launched, "checkpoint at step 20 committed")
    launched.kill()
    launched.communicate()
    wait_until_nobody_is_left(paths)
    sizes = [*SIZES, "server.num_servers=3", "launch.processes_per_node=1"]
    text = config.parse(clicks.TEXT, [f"run.storage_root={folder}/store", *sizes]).to_yaml()
    storage.local_path(paths.config).write_text(text)
    launched = launch(paths)
    printed, _ = launched.communicate(timeout=300)
    assert launched.returncode == 0 and "step 60/60" in printed and "step 20/60" not in printed, printed
    rows, expected = (clicks.rows_of(documents.read(Completion, one.complete).checkpoint_uri) for one in (paths, whole))
    assert np.array_equal(rows["key"], expected["key"]) and np.array_equal(rows["version"], expected["version"])
    # One worker sums the gradients of a step in another order than two.
    np.testing.assert_allclose(rows["numbers"], expected["numbers"], rtol=1e-3, atol=1e-5)


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
