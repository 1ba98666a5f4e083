"""The local runner under `kftrain run`: what reaches a task and what a signal does, with real processes."""

import contextlib
import json
import os
import signal
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import psutil
import pytest
from kfp import dsl
from kfp.compiler import Compiler

from kftrain.client import pipeline_process
from kftrain.client.pipeline_process import PipelineProcess
from kftrain.core.progress import strip_mark
from kftrain.kubeflow import parameters
from kftrain.pipelines.compile import compiled


@dsl.component(base_image="python", install_kfp_package=False)
def work(folder: str, seconds: float) -> str:
    import time
    from pathlib import Path

    from kftrain.config import Config
    from kftrain.core.progress import to_log
    from kftrain.run.paths import RunPaths
    from kftrain.stages.failure import report_failure

    with report_failure("work", RunPaths(folder), Config(), to_log):
        Path(folder, "seen").write_text(folder)
        to_log("ready")
        time.sleep(seconds)
    return folder


@dsl.component(base_image="python", install_kfp_package=False)
def clean(folder: str, status: dsl.PipelineTaskFinalStatus) -> None:
    from pathlib import Path

    Path(folder, "cleaned").write_text(status.state)


@dsl.pipeline(name="two-steps")
def two_steps(folder: str, seconds: float, next_folder: str) -> None:
    with dsl.ExitHandler(clean(folder=folder)):
        first = work(folder=folder, seconds=seconds)
        work(folder=next_folder, seconds=0.0).after(first)


@pytest.fixture
def folders(tmp_path):
    """Two folders whose names kfp's runner would mangle, because it replaces `python3` in all arguments."""
    made = tmp_path / "python3" / "first", tmp_path / "python3" / "next"
    for folder in made:
        folder.mkdir(parents=True)
    return made


def start(tmp_path, folders, seconds):
    Compiler().compile(two_steps, str(tmp_path / "spec.yaml"))
    arguments = {"folder": str(folders[0]), "next_folder": str(folders[1]), "seconds": seconds}
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    return PipelineProcess(tmp_path / "spec.yaml", tmp_path / "arguments.json", tmp_path / "root", tmp_path, {})


@dsl.component(base_image="python", install_kfp_package=False)
def keep(path: str, values: dict[str, Any] = {}) -> None:  # noqa: B006 - kfp reads it from the signature
    import json
    from pathlib import Path

    Path(path).write_text(json.dumps(values))


@dsl.pipeline(name="kept")
def kept(path: str, values: dict[str, Any] = {}) -> None:  # noqa: B006
    keep(path=path, values=values)


@pytest.mark.parametrize("values", [{}, {"run": {"seed": 2**53 - 1}, "task": {"kind": "a:b", "share": 0.5, "n": [1]}}])
def test_an_object_arrives_as_it_was_meant(tmp_path, values):
    Compiler().compile(kept, str(tmp_path / "spec.yaml"))
    sent = {"path": f"{tmp_path}/found.json", **({"values": values} if values else {})}
    (tmp_path / "arguments.json").write_text(json.dumps(sent))
    PipelineProcess(tmp_path / "spec.yaml", tmp_path / "arguments.json", tmp_path / "root", tmp_path, {}).follow(
        [].append
    )
    found = parameters.restore_object(json.loads((tmp_path / "found.json").read_text()))
    assert json.dumps(found, sort_keys=True) == json.dumps(values, sort_keys=True)


@dsl.component(base_image="python", install_kfp_package=False)
def note(path: str, created: str) -> None:
    from pathlib import Path

    Path(path).write_text(created)


@dsl.pipeline(name="noted")
def noted(path: str) -> None:
    note(path=path, created=dsl.PIPELINE_JOB_CREATE_TIME_UTC_PLACEHOLDER)


def test_a_run_was_created_when_it_is_started(tmp_path):
    """kfp's local runner does not know this placeholder."""
    Compiler().compile(noted, str(tmp_path / "spec.yaml"))
    (tmp_path / "arguments.json").write_text(json.dumps({"path": f"{tmp_path}/found"}))
    process = PipelineProcess(tmp_path / "spec.yaml", tmp_path / "arguments.json", tmp_path / "root", tmp_path, {})
    assert process.follow([].append) == 0
    found = datetime.strptime((tmp_path / "found").read_text(), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    assert abs(datetime.now(timezone.utc) - found) < timedelta(hours=1)


@dsl.component(base_image="python", install_kfp_package=False)
def shard(uri: str, next_step: dsl.OutputPath(str)) -> str:
    from pathlib import Path

    Path(next_step).parent.mkdir(parents=True, exist_ok=True)
    Path(next_step).write_text("finish")
    return uri


@dsl.pipeline(name="conditional")
def conditional(path: str, uri: str) -> None:
    first = shard(uri=uri)
    with dsl.If(first.outputs["next_step"] != "finish", name="something-to-do"):
        note(path=path, created=first.outputs["Output"])


def test_all_steps_run_here_whatever_the_first_one_says_is_next(tmp_path):
    """kfp's local runner takes a condition on a named output for false, and the run would end without a model."""
    Compiler().compile(conditional, str(tmp_path / "spec.yaml"))
    (tmp_path / "arguments.json").write_text(json.dumps({"path": f"{tmp_path}/found", "uri": "bob's \\run"}))
    process = PipelineProcess(tmp_path / "spec.yaml", tmp_path / "arguments.json", tmp_path / "root", tmp_path, {})
    assert process.follow([].append) == 0
    assert (tmp_path / "found").read_text() == "bob's \\run"
    assert pipeline_process.NEXT_STEP in compiled()


def alive_in_session(leader, patience_seconds=120.0):
    """Processes that the runner's session still has; a SIGKILL takes a moment, and zombies do not count."""
    deadline = time.monotonic() + patience_seconds
    while True:
        found = []
        for candidate in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(candidate.pid) == leader and candidate.status() != psutil.STATUS_ZOMBIE:
                    found.append(candidate)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def test_arguments_arrive_as_they_were_given(tmp_path, folders):
    process = start(tmp_path, folders, 0.0)
    lines = []
    assert process.follow(lines.append) == 0
    assert (folders[1] / "seen").read_text() == str(folders[1])
    assert (folders[0] / "cleaned").read_text() == "SUCCEEDED"
    assert [strip_mark(line) for line in lines if strip_mark(line)] == ["ready", "ready"]
    assert process.stop_code == 0


@pytest.fixture
def terminal():
    """A terminal with Ctrl-C that may be closed, also where the tests run under `nohup` or in a shell's background."""
    handlers = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("terminal")
def test_a_signal_stops_the_step_and_the_exit_handler_still_runs(tmp_path, folders, number, capfd):
    process = start(tmp_path, folders, 60.0)

    def stop_when_ready(line):
        if strip_mark(line) == "ready":
            os.kill(os.getpid(), number)

    assert process.follow(stop_when_ready) != 0
    assert process.stop_code == 128 + number
    assert json.loads((folders[0] / "error.json").read_text())["exit_code"] == 143
    assert (folders[0] / "cleaned").read_text() == "FAILED"
    assert not (folders[1] / "seen").exists()
    assert not alive_in_session(process._process.pid)
    assert "stopping" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_under_nohup_outlives_its_terminal(tmp_path, folders):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(tmp_path, folders, 0.0)
        assert process.follow(lambda line: os.kill(os.getpid(), signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal")
def test_a_terminal_that_is_closed_may_say_so_twice(tmp_path, folders):
    process = start(tmp_path, folders, 60.0)

    def hang_up_twice(line):
        if strip_mark(line) == "ready":
            os.kill(os.getpid(), signal.SIGHUP)
            while not process.stop_code:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGHUP)

    process.follow(hang_up_twice)
    assert (process.stop_code, process.killed) == (129, False)
    assert (folders[0] / "cleaned").read_text() == "FAILED"


def test_an_output_that_nobody_reads_any_more_stops_the_step_too(tmp_path, folders):
    process = start(tmp_path, folders, 60.0)

    def broken_pipe(line):
        if strip_mark(line) == "ready":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        process.follow(broken_pipe)
    assert json.loads((folders[0] / "error.json").read_text())["exit_code"] == 143
    assert (folders[0] / "cleaned").read_text() == "FAILED"
    assert not alive_in_session(process._process.pid)


def test_a_second_signal_kills_everything_at_once(tmp_path, folders):
    process = start(tmp_path, folders, 60.0)

    def stop_twice(line):
        if strip_mark(line) == "ready":
            os.kill(os.getpid(), signal.SIGINT)
            while not process.stop_code:  # two signals at once may be delivered as one
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

    assert process.follow(stop_twice) == -signal.SIGKILL
    assert process.stop_code == 130
    assert not (folders[0] / "cleaned").exists()
    assert not alive_in_session(process._process.pid)
