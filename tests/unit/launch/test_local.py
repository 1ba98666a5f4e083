"""Jobs of this machine, found and acted on from other processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest
from click.testing import CliRunner
from helpers.documents import opened_run

from kftrain import cli, config
from kftrain.cli.jobs import cancel_command, logs_command, status_command
from kftrain.core import storage
from kftrain.errors import LaunchError
from kftrain.launch.base import build_launcher, find_jobs
from kftrain.launch.spec import make_job
from kftrain.process import presence
from kftrain.run.job_tasks import TRAINING

SCRIPT = """
import signal, sys, time
from kftrain.process import presence
with presence.show_process(sys.argv[1], "train"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Nobody else's jobs are seen, here and in child processes."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def run(tmp_path):
    """A run of the local backend that was opened."""
    return opened_run(config.parse("", [f"run.storage_root={tmp_path}/store"]), "a-1").paths


@contextlib.contextmanager
def at_work(paths):
    """A launcher of another process is at work on the run."""
    command = [sys.executable, "-c", SCRIPT, paths.uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def invoke(command, *arguments):
    return CliRunner().invoke(command, arguments, standalone_mode=False)


def test_a_job_is_seen_while_its_launcher_lives(run):
    assert json.loads(invoke(status_command, run.uri, "--json").output)[0]["run_id"] == "a-1"
    with at_work(run) as process:
        (found,) = json.loads(invoke(status_command, run.uri, "--json").output)
        assert (found["run"], found["task"], found["state"]) == ("a-1", "train", "Training")
        assert str(process.pid) in found["job"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert find_jobs(config.parse("")).describe(run.uri) == []


def test_it_is_cancelled_by_a_signal_to_its_launcher(run):
    with at_work(run) as process:
        assert invoke(cancel_command, run.uri).output == f"deleted a-1-train (process {process.pid})\n"
        assert process.wait(120) == 0
    assert "this run has no job on this machine" in str(invoke(cancel_command, run.uri).exception)


def test_a_job_of_another_run_is_left_alone(tmp_path, run):
    other = opened_run(config.parse("", [f"run.storage_root={tmp_path}/store"]), "b-1").paths
    with at_work(run) as process:
        assert isinstance(invoke(cancel_command, other.uri).exception, LaunchError)
        assert process.poll() is None


def test_a_process_that_got_a_dead_ones_number_is_never_told_to_stop(run):
    """The file of a launcher that was killed stays; without a lock it says nothing."""
    folder = presence._make_folder()
    document = {"subject": run.uri, "task": "train", "process_id": os.getpid(), "since": 0.0}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(document))
    presence.WorkingProcess(**document).terminate()
    assert presence.find_processes(run.uri) == [] and not list(folder.iterdir())


def test_a_link_to_another_folder_in_the_place_of_ours_is_not_followed(monkeypatch, tmp_path):
    """Who planted it would have us delete files there: the folder of all temporary files is everybody's."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "1.json").write_text("{}")
    (tmp_path / "tmp" / f"kftrain-{os.getuid()}").symlink_to(tmp_path / "victim")
    assert presence.find_processes() == [] and os.listdir(tmp_path / "victim") == ["1.json"]
    with presence.show_process("s3://b/runs/a", "train"):
        assert presence.find_processes() == [] and os.listdir(tmp_path / "victim") == ["1.json"]


def test_where_no_file_can_be_written_the_job_runs_all_the_same(run, monkeypatch, tmp_path):
    monkeypatch.setattr(presence, "_make_folder", lambda: tmp_path / "nowhere")
    with presence.show_process(run.uri, "train"):
        assert presence.find_processes() == []


def test_logs_are_those_of_the_last_attempt(run):
    for attempt in (2, 10):
        for rank in (0, 1):
            storage.publish(f"{run.logs}/attempt-{attempt}/rank-{rank}.log", f"attempt {attempt}\n")
    assert invoke(logs_command, run.uri).output == "[rank 0] attempt 10\n[rank 1] attempt 10\n"
    assert "has no logs" in str(invoke(logs_command, run.uri, "--task", "evaluate").exception)
    with at_work(run):
        assert "wait for it: --follow" in str(invoke(logs_command, run.uri).exception)


@pytest.mark.parametrize("verb", ["suspend", "unsuspend"])
def test_what_a_machine_cannot_do_says_what_to_do_instead(run, verb, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, run.uri])
    assert caught.value.code == 13 and "kftrain run --resume" in capsys.readouterr().err


def test_building_a_request_starts_nothing(run, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *arguments, **options: pytest.fail("it was started"))
    resolved = config.parse("launch: {processes_per_node: 3}")
    request = build_launcher(resolved).build(make_job(TRAINING, run, resolved, "m 1"))
    assert request.content["environment"] == {"KFTRAIN_MLFLOW_RUN_ID": "m 1"}
    assert request.text.startswith("KFTRAIN_MLFLOW_RUN_ID='m 1' kftrain worker --task train ")
