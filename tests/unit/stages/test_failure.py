import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from kftrain import errors, tracking
from kftrain.core import storage
from kftrain.errors import (
    DataError,
    FencedError,
    InterruptedByUser,
    Preempted,
    RetryableError,
    TrackingError,
)
from kftrain.process import stage_lifetime, termination
from kftrain.run.error import read_error
from kftrain.run.paths import RunPaths
from kftrain.stages import failure
from kftrain.tracking import mlflow_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's paths, its lines, and what MLflow is told."""
    from helpers.documents import digits_config

    paths, lines, ended = RunPaths(f"{tmp_path}/runs/r"), [], []
    monkeypatch.setattr(tracking, "finish_run", lambda *arguments: ended.append(arguments))
    monkeypatch.setattr(tracking, "read_status", lambda uri, mlflow_run_id: "RUNNING")
    monkeypatch.setattr(termination, "TERMINATION_LOG", str(tmp_path / "termination-log"))
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m1").to_dict())
    return paths, digits_config(tmp_path), lines, ended


def fail(run, error):
    paths, config, lines, _ = run
    with pytest.raises(type(error)) as caught, failure.report_failure("train", paths, config, lines.append):
        raise error
    assert caught.value is error


def test_a_failure_is_written_announced_and_raised_again(run):
    paths, config, lines, ended = run
    fail(run, DataError("a shard is damaged", where="x.tar", fix="shard again"))
    found = read_error(paths.error)
    assert (found.stage, found.exit_code) == ("train", 11)
    assert found.to_error().line == "x.tar: a shard is damaged; shard again"
    announced = json.loads(lines[-1].removeprefix("error "))
    assert announced["line"] == found.line
    assert ended == [
        (config.tracking.uri, "m1", "FAILED", {"kftrain.error": found.line, "kftrain.failure_class": "data"})
    ]


def test_fault_48_a_full_disk_is_retryable_and_hides_behind_nothing(run, monkeypatch):
    """error.json cannot be written either: the line says it, and the exit code."""
    paths, config, lines, ended = run
    monkeypatch.setattr(storage, "publish_json", full)
    for place in (
        failure.report_failure("shard", paths, config, lines.append),
        failure.announce_failure("shard", lines.append),
    ):
        with pytest.raises(RetryableError) as caught, place:
            full("x.tar")
        assert caught.value.exit_code == 138
        assert json.loads(lines[-1].removeprefix("error "))["line"].startswith("x.tar: no space is left on the device")
    assert ended[0][2] == "FAILED"


def full(uri, *content):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), uri)


def test_a_bug_is_written_with_its_place_and_exit_code_1(run):
    fail(run, ZeroDivisionError("by zero"))
    found = read_error(run[0].error)
    assert found.exit_code == 1
    assert "ZeroDivisionError" in found.line and "test_failure.py" in found.line


def test_who_does_not_hold_the_run_any_more_leaves_its_folder_and_its_mlflow_run(run):
    fail(run, FencedError("another launcher holds this run"))
    paths, _, lines, ended = run
    assert read_error(paths.error) is None and ended == []
    assert "another launcher holds this run" in lines[-1]


@pytest.mark.parametrize("error", [Preempted("stopped"), InterruptedByUser("stopped")])
def test_a_run_that_was_stopped_is_killed_in_mlflow_not_failed(run, error):
    fail(run, error)
    assert run[3][0][2] == "KILLED"


def test_a_finished_mlflow_run_stays_finished(run, monkeypatch):
    """Its training is complete and registered: setting it to FAILED would stretch its duration, too."""
    monkeypatch.setattr(tracking, "read_status", lambda uri, mlflow_run_id: "FINISHED")
    fail(run, InterruptedByUser("stopped"))
    assert run[3] == []


def test_a_signal_is_announced_also_where_no_run_is_open_yet():
    lines = []
    with pytest.raises(Preempted), failure.announce_failure("shard", lines.append):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert json.loads(lines[-1].removeprefix("error "))["exit_code"] == 143


def test_that_mlflow_is_down_does_not_hide_the_first_error(run, monkeypatch):
    def refuse(*arguments):
        raise TrackingError("no answer")

    monkeypatch.setattr(tracking, "finish_run", refuse)
    fail(run, DataError("a shard is damaged"))
    assert read_error(run[0].error).kind == "DataError"
    assert any("could not be marked" in line for line in run[2])


def test_that_storage_is_away_does_not_hide_the_first_error(run, storage_is_away, capsys):
    paths, config, lines, ended = run
    with (
        pytest.raises(DataError, match="a shard is damaged"),
        failure.report_failure("train", paths, config, lines.append),
    ):
        storage_is_away()
        raise DataError("a shard is damaged")
    announced = json.loads(lines[-1].removeprefix("error "))
    assert (announced["exit_code"], announced["line"]) == (11, "a shard is damaged")
    assert capsys.readouterr().out.count("ConnectionError: the endpoint does not answer") == 3
    assert ended == []


def test_what_could_be_read_before_storage_went_away_is_used(run, monkeypatch, capsys):
    """Each of the steps is tried: that one fails says nothing of the next."""

    def refuse(*arguments):
        raise ConnectionError("the endpoint does not answer")

    monkeypatch.setattr(storage, "publish_json", refuse)
    fail(run, DataError("a shard is damaged"))
    assert "error.json could not be written: storage cannot be reached: ConnectionError" in capsys.readouterr().out
    assert run[3][0][:3] == (run[1].tracking.uri, "m1", "FAILED")


def test_a_stage_that_starts_removes_the_error_of_the_one_before(run):
    paths, config, lines, _ = run
    fail(run, DataError("first"))
    with failure.report_failure("train", paths, config, lines.append):
        assert read_error(paths.error) is None
    assert read_error(paths.error) is None


def test_the_reason_reaches_the_pods_termination_message_where_there_is_one(run, tmp_path):
    fail(run, DataError("no pod"))
    assert not (tmp_path / "termination-log").exists()
    (tmp_path / "termination-log").touch()
    fail(run, DataError("x" * 5000))
    message = (tmp_path / "termination-log").read_text()
    assert message.startswith("kftrain exit code 11 (DataError): xxx") and len(message) == termination.TERMINATION_BYTES


def test_sigterm_becomes_an_error_that_is_reported(run):
    paths, config, lines, _ = run
    with pytest.raises(Preempted), failure.report_failure("shard", paths, config, lines.append):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert read_error(paths.error).exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_becomes_an_error_that_is_reported(run):
    paths, config, lines, _ = run
    with pytest.raises(InterruptedByUser), failure.report_failure("shard", paths, config, lines.append):
        raise KeyboardInterrupt
    assert read_error(paths.error).exit_code == 130


def test_a_stage_that_starts_after_the_stop_was_asked_for_does_no_work(run, monkeypatch):
    paths, config, lines, _ = run
    monkeypatch.setenv(stage_lifetime.STOP_VARIABLE, "1")
    with pytest.raises(Preempted), failure.report_failure("evaluate", paths, config, lines.append):
        pytest.fail("the stage ran")
    assert read_error(paths.error).exit_code == errors.Preempted.exit_code


NOWHERE = "{storage_root: s3://bucket/root}"


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        (
            f"from kftrain.stages.shard import *; shard_from_pipeline('run: {NOWHERE}', {{}}, '', '8f11')",
            "_KFP_RUNTIME",
        ),
        ("from kftrain.cli import main; main(['submit', '--dry-run', '--resume', 's3://bucket/root/runs/r'])", "CLI"),
        ("from kftrain.cli import main; main(['run', '--resume', 's3://bucket/root/runs/r'])", "CLI"),
        ("from kftrain.cli import main; main(['checkpoints', 'list', 's3://bucket/root/runs/r'])", "CLI"),
    ],
)
def test_credentials_that_are_missing_are_one_line(code, environment):
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "KUBE"))}
    away = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/none", "AWS_SHARED_CREDENTIALS_FILE": "/none"}
    away |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", environment: "true"}
    done = subprocess.run([sys.executable, "-c", code], env={**variables, **away}, capture_output=True, text=True)
    assert done.returncode in ((10, 138) if environment == "CLI" else (1,))
    assert "NoCredentialsError" in done.stderr and done.stderr.startswith("kftrain: error: ")
    assert done.stderr.count("\n") == 1


def test_a_bug_in_a_step_keeps_its_traceback():
    code = "from kftrain.stages.failure import *\nwith announce_failure('shard', print): {}['missing']"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "_KFP_RUNTIME": "true"}, capture_output=True, text=True
    )
    assert "Traceback" in done.stderr and "KeyError" in done.stderr
