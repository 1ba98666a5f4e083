"""Jobs with servers beside their workers on one machine: real small processes in the place of `kftrain`."""

import json
import sys

import pytest
from click.testing import CliRunner

from kftrain.cli.jobs import logs_command
from kftrain.core import storage
from kftrain.errors import ConfigError, LaunchError, LostPeerError, Preempted
from kftrain.launch import local, role_processes
from kftrain.launch.local import LocalLauncher
from kftrain.launch.role_processes import RoleFailure, find_root_cause
from kftrain.launch.spec import JobSpec, Role
from kftrain.run.error import ErrorDocument, read_error
from kftrain.run.paths import RunPaths

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from kftrain.process.kept import Reporter

role, how = sys.argv[1:3]
folder, number = Path(os.environ["SHARED"]), os.environ.get("KFTRAIN_NODE_RANK", "")


def wait_for(names):
    deadline = time.monotonic() + 240
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, names
        time.sleep(0.02)


def worker():
    wait_for({"trains": ["server-0", "server-1"], "reads": ["server-0", "server-1", "reader-0"]}.get(how, []))
    if how == "waits":
        signal.sigwait([signal.SIGTERM])
        (folder / "error").write_text('{"kind": "Preempted", "exit_code": 143, "line": "stopped"}')
    elif how == "fails":
        (folder / "error").write_text('{"kind": "ConfigError", "exit_code": 10, "line": "mine"}')
        (folder / "failed").touch()
    return {"waits": 143, "fails": 10, "trains": 0, "reads": 0}[how]


if role == "worker":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    reporter = Reporter()
    while reporter.begin():
        reporter.end(worker())
    sys.exit()

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
(folder / f"{role}-{number}").touch()
print(role, number, "is here", flush=True)
if how == "explains":
    document = {"kind": "DataError", "exit_code": 11, "line": f"{role} {number} has no data", "rank": 0}
    Path(os.environ["KFTRAIN_ERROR_FILE"]).write_text(json.dumps(document))
    sys.exit(11)
if how == "dies" and number == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "ends":
    sys.exit(0)
if how == "follows":
    wait_for(["failed"])
    sys.exit(1)
signal.sigwait([signal.SIGTERM])
if how == "clings":
    time.sleep(600)
print("stopped", flush=True)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a job whose workers and servers do as they are told; returns the exit code."""
    paths = RunPaths.of(str(tmp_path / "store"), "r")
    shared = tmp_path / "shared"
    shared.mkdir()
    storage.publish(paths.config, "")
    (shared / "error").symlink_to(paths.error)
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("SHARED", str(shared))
    monkeypatch.setattr(local, "COMMAND", (sys.executable, str(tmp_path / "program.py")))
    launcher = LocalLauncher()

    def run(worker, server, others=()):
        storage.remove(paths.error)
        return launcher.run(job(paths, worker, server, others))

    run.paths, run.launcher = paths, launcher
    yield run
    launcher.close()


def job(paths, worker="trains", server="serves", others=(), worker_nodes=1):
    roles = (Role("worker", worker_nodes, 1, ("worker", worker)), Role("server", 2, 1, ("server", server)), *others)
    return JobSpec("train", paths.uri, "d", roles, {"GREETING": "hello you"})


def test_every_node_of_every_role_runs_until_the_workers_are_done(run, capfd):
    assert run("reads", "serves", [Role("reader", 1, 1, ("reader", "ends"))]) == 0
    assert sorted(storage.list_names(run.paths.logs)) == ["attempt-1"]
    logs = {name: storage.read_text(f"{run.paths.logs}/attempt-1/{name}") for name in ("server-0.log", "server-1.log")}
    assert logs == {f"server-{n}.log": f"server {n} is here\nstopped\n" for n in (0, 1)}
    printed = capfd.readouterr().out.splitlines()
    assert {"[server 0] server 0 is here", "[server 1] stopped", "[reader 0] reader 0 is here"} <= set(printed)
    shown = CliRunner().invoke(logs_command, [run.paths.uri]).output
    assert "[server 1] server 1 is here\n" in shown and "[reader 0] reader 0 is here\n" in shown


def test_a_node_that_fails_ends_the_job_with_its_own_error(run):
    """The workers, which were told to stop, have said that they were preempted: that is no cause."""
    assert run("waits", "explains") == 11
    error = read_error(run.paths.error)
    assert (error.kind, error.stage, error.attempt) == ("DataError", "train", 1)
    assert error.line == f"server {error.node_rank} has no data"
    assert error.last_lines == [f"server {error.node_rank} is here"]


def test_a_node_that_was_killed_is_named_and_the_next_attempt_starts_all_again(run, tmp_path):
    assert run("waits", "dies") == 137
    error = read_error(run.paths.error)
    assert error.line == "server-1 ended by SIGKILL without a word"
    assert (error.exit_code, error.node_rank, error.last_lines) == (137, 1, ["server 1 is here"])
    for number in (0, 1):
        (tmp_path / "shared" / f"server-{number}").unlink(missing_ok=True)
    assert run("trains", "serves") == 0


def test_the_workers_error_is_the_cause_where_they_failed_by_themselves(run):
    assert run("fails", "follows") == 10
    assert read_error(run.paths.error).line == "mine"


def test_a_node_that_does_not_stop_is_killed(run, monkeypatch):
    monkeypatch.setattr(role_processes, "GRACE_SECONDS", 0.3)
    assert run("trains", "clings") == 0
    assert storage.read_text(f"{run.paths.logs}/attempt-1/server-0.log") == "server 0 is here\n"


FAILED = [RoleFailure("server-1", 1, -9), RoleFailure("server-0", 0, 1)]


@pytest.mark.parametrize(
    ("failures", "left", "place"),
    [
        (FAILED, Preempted("stopped at step 3"), "server-1"),
        (FAILED, LostPeerError("lost contact"), "server-1"),
        (FAILED, None, "server-1"),
        (FAILED, ConfigError("wrong"), None),
        ([], LostPeerError("lost contact"), None),
        ([], None, None),
    ],
)
def test_the_first_node_that_failed_is_the_cause_unless_the_workers_have_one_of_their_own(failures, left, place):
    found = find_root_cause(failures, left and ErrorDocument.of(left))
    assert (found and found.place) == place


def test_a_request_names_every_node(tmp_path):
    request = LocalLauncher().build(job(RunPaths.of(str(tmp_path), "r")))
    assert request.text == (
        "GREETING='hello you' KFTRAIN_NODE_RANK=0 kftrain server serves &\n"
        "GREETING='hello you' KFTRAIN_NODE_RANK=1 kftrain server serves &\n"
        "GREETING='hello you' kftrain worker trains\n"
    )
    assert [each["environment"]["KFTRAIN_NODE_RANK"] for each in request.content["others"]] == ["0", "1"]
    json.dumps(request.content)


@pytest.mark.parametrize("verb", ["build", "run"])
def test_more_than_one_node_of_workers_is_refused(tmp_path, verb):
    with pytest.raises(
        LaunchError, match=r"role worker: .*one node of workers \(got .2 nodes.\); set launch.nodes to 1"
    ):
        getattr(LocalLauncher(), verb)(job(RunPaths.of(str(tmp_path), "r"), worker_nodes=2))
