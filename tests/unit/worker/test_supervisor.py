"""The real supervisor as a process, with a scripted program in the agent's place: nothing here needs torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from helpers import jobs
from helpers.documents import completion_of, digits_config, publish_export

from kftrain.core import storage
from kftrain.errors import ConfigError, FencedError, Preempted, UserCodeError
from kftrain.launch.spec import ADDRESS_ENV, LAUNCHER_TIMEOUT_ENV, NODE_NAME_ENV, NODE_RANK_ENV
from kftrain.process.termination import parse_message
from kftrain.run import attempts
from kftrain.run.heartbeat import Heartbeat
from kftrain.run.paths import RunPaths
from kftrain.worker.root_cause import LOST_PEER

LIMIT_SECONDS = 200
"""For what takes a moment on a machine that does not pause."""

SUPERVISOR = """
import os, sys
from kftrain.process import termination
from kftrain.worker import node, supervisor
supervisor.AGENT_MODULE = "helpers.fakes.agent"
supervisor.FIRST_NODE_POLL_SECONDS = 0.1
supervisor.ENDING_SECONDS = float(os.environ.get("ENDING_SECONDS", "1800"))
node.RENDEZVOUS_PORT = int(os.environ.get("FIRST_NODE", "1"))
termination.TERMINATION_LOG = sys.argv.pop(1)
from kftrain.cli import main
main()
"""

RANK = """
import os, signal, sys, time
from kftrain.process.parent_death import die_with_parent
from kftrain.process import output
die_with_parent(os.getppid())
output.redirect_output()
signals = []
signal.signal(signal.SIGTERM, lambda number, _: print("asked") or signals.append(number))
print("started")
while not signals:
    time.sleep(0.05)
time.sleep(0.7)
sys.exit(143)
"""
"""A worker process that commits for a while when it is asked to stop, and ends with 143."""

RANKS = f"""
import os, subprocess, sys, time
from kftrain.process.signals import to_shell_code
time.sleep(float(os.environ.get("START_SECONDS", "0")))
start = lambda n: subprocess.Popen(
    [sys.executable, "-c", {RANK!r}, "kftrain.worker.rank"], env={{**os.environ, "LOCAL_RANK": str(n)}}
)
ranks = [start(0), start(1)]
sys.exit(max(to_shell_code(rank.wait()) for rank in ranks))
"""
"""An agent with two such processes."""


@pytest.fixture
def run(tmp_path):
    resolved = digits_config(tmp_path)
    paths = RunPaths.of(resolved.run.storage_root, "r")
    storage.publish(paths.config, resolved.to_yaml())
    storage.publish_json(paths.shards, {"schema_version": 1, "manifest_uri": "m", "dataset_digest": "d"})
    (tmp_path / "termination-log").touch()
    yield paths, resolved
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_SECONDS)
    started.clear()


started = []
"""Of the present test; one that fails leaves none behind."""


def start(run, agent, task="train", nodes=1, **environment):
    paths, resolved = run
    log = paths.uri.rsplit("/", 3)[0] + "/termination-log"
    arguments = jobs.worker_command(paths, resolved, task, nodes=nodes)[3:]
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, log, *arguments],
        env=jobs.worker_environment({"FAKE_AGENT": agent, **environment}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started.append(process)
    return process


def ended(process):
    """(exit code, output)."""
    output = process.communicate(timeout=LIMIT_SECONDS)[0]
    return process.returncode, output


def wait_for_ranks(process, *ranks, says="started"):
    """Until all of them have, in whatever order."""
    missing = {f"[rank {rank}] {says}\n" for rank in ranks}
    while missing:
        missing.discard(jobs.wait_for_line(process, says)[-1])


def complete(run):
    paths, resolved = run
    completion = completion_of(paths, resolved, "d")
    publish_export(completion.export_uri)
    storage.publish_json(paths.complete, completion.to_dict())


def leaving(error, code):
    """An agent whose process left an error."""
    document = json.dumps({**error.to_dict(), "rank": 1})
    return f"import os, sys; open(os.environ['KFTRAIN_ERROR_FILE'], 'w').write({document!r}); sys.exit({code})"


def node(number, nodes=2):
    return {"nodes": nodes, NODE_RANK_ENV: str(number), ADDRESS_ENV: "127.0.0.1"}


MUST_NOT_START = "raise SystemExit('the agent was started')"


def test_who_was_fenced_says_nothing_of_a_run_that_is_anothers(run):
    """What it left there would hide the real failure of the attempt that holds the run."""
    paths, _ = run
    code, output = ended(start(run, leaving(FencedError(FencedError.BY_ATTEMPT), 17)))
    assert code == 17 and "a newer attempt holds this run" in output
    assert not storage.exists(paths.error)


@pytest.mark.parametrize("number", [0, 1])
def test_a_job_that_is_complete_ends_before_any_rendezvous_on_every_node(run, number):
    complete(run)
    code, output = ended(start(run, MUST_NOT_START, **node(number)))
    assert (code, output) == (0, "kftrain| already complete: nothing to do\n")


def test_a_job_whose_export_is_gone_is_not_complete(run):
    complete(run)
    storage.remove(f"{run[0].uri}/export")
    assert ended(start(run, "raise SystemExit(7)"))[0] == 7


def test_a_completion_of_another_training_does_not_end_a_job(run):
    paths, resolved = run
    storage.publish_json(paths.complete, completion_of(paths, resolved, "other").to_dict())
    assert ended(start(run, "raise SystemExit(7)"))[0] == 7


def test_another_configuration_is_refused_before_the_agent_and_kubernetes_is_told(run, tmp_path):
    paths, _ = run
    storage.publish(paths.config, digits_config(tmp_path, "train.steps=21").to_yaml())
    code, output = ended(start(run, MUST_NOT_START, **{NODE_NAME_ENV: "gpu-7"}))
    document = storage.read_json(paths.error)
    assert code == document["exit_code"] == 10
    assert "config.yaml is not the one this job was started for" in document["line"]
    assert (document["node"], document["node_rank"], document["pod"]) == ("gpu-7", 0, socket.gethostname())
    assert parse_message((tmp_path / "termination-log").read_text()).line == document["line"]
    assert f"node gpu-7: {document['line']}" in output


def test_an_error_that_a_process_left_is_published_with_its_rank_and_place(run, tmp_path):
    error = ConfigError("heads do not divide", where="model.num_heads", value=5)
    code, output = ended(start(run, leaving(error, 10)))
    document = storage.read_json(run[0].error)
    host = socket.gethostname()
    assert code == 10
    assert (document["rank"], document["node"], document["pod"]) == (1, host, host)
    assert (document["failure_class"], document["attempt"], document["stage"]) == ("configuration", 1, "train")
    assert document["line"] == error.line == parse_message((tmp_path / "termination-log").read_text()).line
    assert f"node {host}, rank 1: {error.line}" in output


def test_storage_that_is_down_at_the_end_changes_no_exit_code(run):
    paths, _ = run
    storage.publish(paths.logs, "a file where the folder should be")
    storage.publish(f"{paths.error}/x", "a folder where the file should be")
    code, output = ended(start(run, leaving(ConfigError("wrong"), 10)))
    assert code == 10
    assert "error.json could not be written" in output and "rank-0.log could not be published" in output


def test_storage_that_is_down_at_the_start_is_worth_another_attempt(run):
    paths, _ = run
    storage.remove(paths.config)
    storage.publish(f"{paths.config}/x", "a folder where the file should be")
    code, output = ended(start(run, MUST_NOT_START))
    assert code == 138 and "the run cannot be read: IsADirectoryError" in output


@pytest.mark.parametrize("task", ["train", "evaluate"])
def test_ending_with_0_without_the_proof_is_no_success(run, task):
    code, _ = ended(start(run, "pass", task))
    assert code == 138
    assert "ended with 0, but the job is not complete" in storage.read_json(run[0].error)["line"]


@pytest.fixture
def first_node():
    """Where rank 0 of the first node listens; closing it is its end."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as server:  # nobody takes who asks whether it is there
        yield server


def waiting_node(run, first_node):
    """Node 1, whose processes are through."""
    agent = "print('all done', flush=True)"
    process = start(run, agent, **node(1), FIRST_NODE=str(first_node.getsockname()[1]))
    jobs.wait_for_line(process, "all done")
    time.sleep(1.0)
    assert process.poll() is None
    return process


def test_the_other_nodes_wait_for_the_first_one_to_complete_the_job(run, first_node):
    process = waiting_node(run, first_node)
    complete(run)
    assert ended(process)[0] == 0
    assert not storage.exists(run[0].error)


def test_a_first_node_that_goes_before_the_job_is_complete_takes_the_others_into_another_attempt(run, first_node):
    process = waiting_node(run, first_node)
    first_node.close()
    code, output = ended(process)
    assert code == 138 and LOST_PEER in output
    assert "the first node went" in storage.read_json(run[0].error)["line"]


def test_a_first_node_that_goes_because_the_job_is_complete_is_no_failure(run, first_node):
    process = waiting_node(run, first_node)
    complete(run)
    first_node.close()
    assert ended(process)[0] == 0


def test_a_node_that_is_stopped_while_it_waits_does_not_say_it_succeeded(run, first_node):
    process = waiting_node(run, first_node)
    process.terminate()
    assert ended(process)[0] == 143


def test_sigterm_reaches_every_process_once_and_twice_is_as_good(run):
    process = start(run, RANKS)
    wait_for_ranks(process, 0, 1)
    process.terminate()
    time.sleep(0.3)
    process.terminate()
    code, output = ended(process)
    assert code == 143 and output.count("asked") == 2
    assert storage.read_json(run[0].error)["kind"] == "Preempted"


def test_sigterm_is_not_for_what_a_process_has_forked(run):
    """A data loader's worker would die of it, and take the process along before it has committed."""
    forked = RANK.replace(
        "while not signals",
        "os.fork() or print('forked')\nparent = os.getpid()\nwhile not signals and os.getppid() != 1",
    )
    process = start(run, RANKS.replace(repr(RANK), repr(f"import os{forked}")))
    wait_for_ranks(process, 0, 1, says="forked")
    process.terminate()
    code, output = ended(process)
    assert code == 143 and output.count("asked") == 2, output


def test_processes_that_have_failed_and_do_not_end_are_ended(run, tmp_path):
    """A thread of the user's goes on, on every process: the agent would wait for ever."""
    hangs = RANK.replace("while not signals", "while True")
    error = json.dumps({**UserCodeError("no such label").to_dict(), "rank": 1})
    fail = f"while not os.path.exists({str(tmp_path / 'all have started')!r}): time.sleep(0.05)\n"
    fail += f"open(os.environ['KFTRAIN_ERROR_FILE'], 'w').write({error!r})\n"
    agent = RANKS.replace(repr(RANK), repr(hangs)).replace("sys.exit(max", f"{fail}sys.exit(max")
    process = start(run, agent, ENDING_SECONDS="3")
    wait_for_ranks(process, 0, 1)
    (tmp_path / "all have started").touch()
    code, output = ended(process)
    assert code == 16, output
    assert storage.read_json(run[0].error)["kind"] == "UserCodeError"


def test_sigterm_before_there_are_processes_ends_the_agent_itself(run):
    process = start(run, "import time; print('rendezvous', flush=True); time.sleep(600)")
    jobs.wait_for_line(process, "rendezvous")
    process.terminate()
    assert ended(process)[0] == 143
    assert "stopped before the first step: there was nothing to commit" in storage.read_json(run[0].error)["line"]


def test_sigterm_finds_processes_that_start_later(run):
    """The agent is about to start its processes, and does start a process all the same."""
    late = "import signal; signal.signal(signal.SIGTERM, lambda *_: None); print('going', flush=True)\n" + RANKS
    process = start(run, late, START_SECONDS="1")
    jobs.wait_for_line(process, "going")
    process.terminate()
    assert ended(process)[0] == 143


def test_a_job_that_is_stopped_when_it_was_complete_has_succeeded(run):
    process = start(run, "import time; print('last', flush=True); time.sleep(600)")
    jobs.wait_for_line(process, "last")
    complete(run)
    process.terminate()
    assert ended(process)[0] == 0


def test_a_silent_launcher_ends_the_job_for_good_and_a_beating_one_does_not(run, tmp_path):
    paths, _ = run
    with Heartbeat(paths, interval_seconds=0.1):
        process = start(run, RANKS, **{LAUNCHER_TIMEOUT_ENV: "4"})
        wait_for_ranks(process, 0, 1)
        time.sleep(6)
        assert process.poll() is None
    code, output = ended(process)
    document = storage.read_json(paths.error)
    assert code == document["exit_code"] == 18
    assert document["kind"] == "LauncherGoneError"
    assert parse_message((tmp_path / "termination-log").read_text()).line == document["line"]
    assert "kftrain| the launcher has been silent for 4 s: stopping" in output


def test_processes_that_do_not_stop_for_a_silent_launcher_are_killed(run):
    hanging = RANKS.replace("while not signals", "while True")
    with Heartbeat(run[0], interval_seconds=0.1):
        process = start(run, hanging, **{LAUNCHER_TIMEOUT_ENV: "4"})
        wait_for_ranks(process, 0, 1)
    below = jobs.tree_of(process)[1:]
    assert ended(process)[0] == 18
    assert "did not stop and were killed" in storage.read_json(run[0].error)["line"]
    assert not psutil.wait_procs(below, timeout=LIMIT_SECONDS)[1]


def test_only_the_first_node_watches(run):
    process = start(run, RANKS, **{LAUNCHER_TIMEOUT_ENV: "0.5"}, **node(1))
    wait_for_ranks(process, 2, 3)
    time.sleep(2)
    assert process.poll() is None
    process.terminate()
    assert ended(process)[0] == 143


def start_asked(run, ending):
    """An agent whose launcher falls silent, and that does this once it is asked to stop."""
    agent = "import signal, time\nasked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
    agent += "print('ready', flush=True)\nwhile not asked: time.sleep(0.05)\n"
    with Heartbeat(run[0], interval_seconds=0.1):
        process = start(run, agent + ending, **{LAUNCHER_TIMEOUT_ENV: "4"})
        jobs.wait_for_line(process, "ready")
    return process


def test_a_job_that_completes_although_its_launcher_is_silent_is_complete(run):
    process = start_asked(run, f"import os\nwhile not os.path.exists({run[0].complete!r}): time.sleep(0.05)")
    jobs.wait_for_line(process, "silent for")
    complete(run)
    assert ended(process)[0] == 0


def test_another_error_wins_over_the_silent_launcher(run):
    code, output = ended(start_asked(run, leaving(ConfigError("wrong"), 10)))
    assert "silent for" in output
    assert code == storage.read_json(run[0].error)["exit_code"] == 10


def test_the_logs_of_a_node_are_published_under_its_attempt_whatever_it_ended_with(run):
    paths, _ = run
    attempts.claim_run(paths, 0, 2)
    agent = RANKS.replace("while not signals", "sys.exit(11)\\nwhile not signals")
    assert ended(start(run, agent))[0] == 11
    folder = storage.join(paths.logs, "attempt-2")
    assert storage.list_names(folder) == ["rank-0.log", "rank-1.log"]
    assert storage.read_text(f"{folder}/rank-1.log") == "started\n"
    assert ended(start(run, agent))[0] == 11  # it failed before its claim: the next one adds to it
    assert storage.read_text(f"{folder}/rank-1.log") == "started\nstarted\n"
    assert ended(start(run, agent, **node(1)))[0] == 11
    assert storage.list_names(folder) == [f"rank-{rank}.log" for rank in range(4)]
    assert ended(start(run, agent, "evaluate"))[0] == 11
    assert storage.list_names(storage.join(paths.logs, "evaluation")) == ["rank-0.log", "rank-1.log"]


def test_of_two_nodes_errors_the_cause_is_kept(run):
    paths, _ = run
    lost = {**ConfigError("x").to_dict(), "kind": "LostPeerError", "exit_code": 138, "what": f"{LOST_PEER}: y"}
    storage.publish_json(paths.error, lost)
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert ended(start(run, kill, **node(1)))[0] == 137
    assert storage.read_json(paths.error)["line"] == "the agent ended by SIGKILL without a word"
    assert ended(start(run, leaving(Preempted("stopped"), 143), **node(1)))[0] == 143
    assert storage.read_json(paths.error)["exit_code"] == 137


def test_the_workers_die_with_the_supervisor_while_it_reads_their_output(run):
    process = start(run, RANKS)
    wait_for_ranks(process, 0, 1)
    below = jobs.tree_of(process)[1:]
    os.kill(process.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(below, timeout=LIMIT_SECONDS)
    assert len(gone) == 3 and not alive
