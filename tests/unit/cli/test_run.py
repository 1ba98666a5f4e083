"""How `kftrain run` understands its command line and the output of the pipeline, without running one."""

import io
import os
from pathlib import Path

import pytest
from helpers.documents import opened_run

from kftrain import config, tracking
from kftrain.cli import run
from kftrain.client import local_run
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.errors import CheckpointError, ConfigError, DataError, RetryableError
from kftrain.process import channel
from kftrain.run.advice import Place, Situation
from kftrain.run.paths import RunPaths
from kftrain.stages import failure
from kftrain.tracking import mlflow_run

HERE = Situation(Place.LAPTOP, log="x.log")


class Recorded:
    def __init__(self):
        self.lines = []
        self.steps = []

    def line(self, text):
        self.lines.append(text)

    def step(self, done, total, text):
        self.steps.append(done)


class Told:
    """What stages have told, in place of the file."""

    def __init__(self, *messages):
        self.waiting = list(messages)

    def read_messages(self):
        told, self.waiting = self.waiting, []
        return told


def watching():
    return local_run.PipelineOutput(Recorded(), io.StringIO(), Told())


def saved_run(tmp_path, *overrides):
    resolved = config.parse("run: {name: a}", [f"run.storage_root={tmp_path}/store", *overrides])
    return opened_run(resolved, "a-1").paths


def test_only_our_own_lines_are_shown_and_everything_is_logged():
    log, shown, told = (
        io.StringIO(),
        Recorded(),
        Told(("run", "/w/runs/a-1"), ("error", {"line": "no", "exit_code": 11})),
    )
    watched = local_run.PipelineOutput(shown, log, told)
    lines = [
        "\x1b[96mExecuting task\x1b[0m\n",
        "    kftrain| step 5/10 loss 1\n",
        "    kftrain| 12 shards\n",
        "Traceback (most recent call last):\n",
    ]
    for line in lines:
        watched.take_line(line)
    assert shown.lines == ["run a-1 in /w/runs/a-1", "12 shards"]
    assert shown.steps == [5]
    assert (watched.run_uri, watched.error.exit_code) == ("/w/runs/a-1", 11)
    assert log.getvalue() == "".join(lines)


def test_paths_are_anchored_in_the_workdir(tmp_path):
    resolved, resume_run = local_run.load_run(None, (), tmp_path, "")
    assert resolved.run.storage_root == f"{tmp_path}"
    assert resolved.tracking.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert resume_run == ""


def test_a_resumed_run_keeps_its_configuration_and_takes_overrides(tmp_path):
    paths = saved_run(tmp_path, "train.steps=7", "launch.processes_per_node=2")
    resolved, resume_run = local_run.load_run(None, ("launch.processes_per_node=1",), tmp_path, paths.uri)
    assert resume_run == "a-1"
    assert (resolved.train.steps, resolved.launch.processes_per_node) == (7, 1)
    assert resolved.run.storage_root == f"{tmp_path}/store"


def test_a_run_is_found_by_its_id_below_the_storage_root(tmp_path):
    saved_run(tmp_path, "train.steps=7")
    resolved, resume_run = local_run.load_run(None, ("run.storage_root=store",), tmp_path, "a-1")
    assert (resume_run, resolved.train.steps) == ("a-1", 7)


def test_a_run_that_was_moved_is_resumed_where_it_is_now(tmp_path):
    saved_run(tmp_path)
    (tmp_path / "store").rename(tmp_path / "moved")
    resolved, _ = local_run.load_run(None, (), tmp_path, f"{tmp_path}/moved/runs/a-1")
    assert resolved.run.storage_root == f"{tmp_path}/moved"


def test_a_run_that_does_not_exist_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="not a run"):
        local_run.load_run(None, (), tmp_path, "a-2")
    with pytest.raises(ConfigError, match="not a run id"):
        local_run.load_run(None, (), tmp_path, "A_2")


def test_a_run_is_found_where_a_shells_completion_writes_it(tmp_path, monkeypatch):
    """`--workdir two --resume two/runs/a-1`: the path starts in the current folder, as every other argument does."""
    resolved = config.parse("run: {name: a}", [f"run.storage_root={tmp_path}/two"])
    opened_run(resolved, "a-1")
    monkeypatch.chdir(tmp_path)
    for path in ("two/runs/a-1", "runs/a-1", f"{tmp_path}/two/runs/a-1", "a-1"):
        found, run_id = local_run.load_run((), (), tmp_path / "two", path)
        assert (run_id, found.run.storage_root) == ("a-1", f"{tmp_path}/two"), path


@pytest.mark.parametrize(("stop_code", "expected"), [(0, 12), (130, 130), (143, 143)])
def test_the_exit_code_is_the_errors_own_unless_a_signal_stopped_us(stop_code, expected, tmp_path, capfd):
    watched = watching()
    watched.run_uri = f"{tmp_path}/runs/a-1"
    error = {**CheckpointError("no usable checkpoint").to_dict(), "stage": "train"}
    storage.publish_json(RunPaths(watched.run_uri).error, error)
    with pytest.raises(SystemExit) as caught:
        run._conclude(watched.end(1, stop_code, HERE))
    assert caught.value.code == expected
    assert capfd.readouterr().err.splitlines()[-1] == "kftrain: error: no usable checkpoint"


def test_a_failure_before_there_was_a_run_is_taken_from_the_log(tmp_path, capfd):
    watched = watching()
    watched._messages = Told(("error", {"line": "cannot write", "exit_code": 10}))
    watched.read_messages()
    with pytest.raises(SystemExit) as caught:
        run._conclude(watched.end(1, 0, HERE))
    assert caught.value.code == 10
    assert "kftrain: error: cannot write" in capfd.readouterr().err


def test_what_a_stage_announced_is_newer_than_what_lies_in_the_run(tmp_path, capfd):
    watched = watching()
    watched.run_uri = f"{tmp_path}/runs/a-1"
    storage.publish_json(RunPaths(watched.run_uri).error, CheckpointError("of last week").to_dict())
    watched._messages = Told(("error", {"line": "cannot write", "exit_code": 10}))
    watched.read_messages()
    with pytest.raises(SystemExit) as caught:
        run._conclude(watched.end(1, 0, HERE))
    assert caught.value.code == 10
    assert "of last week" not in capfd.readouterr().err


def test_an_interruption_that_no_stage_could_report_is_no_riddle(capfd):
    with pytest.raises(SystemExit) as caught:
        run._conclude(watching().end(1, 130, HERE))
    assert caught.value.code == 130
    assert capfd.readouterr().err.splitlines()[-1] == "kftrain: error: interrupted"


def test_a_second_signal_leaves_no_running_mlflow_run(tmp_path, monkeypatch, capfd):
    ended = []
    resolved = config.parse("run: {name: a}", [f"run.storage_root={tmp_path}"])
    paths = opened_run(resolved, "a-1").paths
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict())
    monkeypatch.setattr(tracking, "read_status", lambda uri, mlflow_run_id: "RUNNING")
    monkeypatch.setattr(tracking, "finish_run", lambda uri, name, status, tags=None: ended.append((name, status)))
    watched = watching()
    watched.run_uri = paths.uri
    local_run._record_kill(watched, resolved)
    assert ended == [("m-1", "KILLED")]
    assert storage.read_json(paths.error)["exit_code"] == 130
    with pytest.raises(SystemExit):
        run._conclude(watched.end(-9, 130, HERE))
    assert "killed by a second signal" in capfd.readouterr().err


def test_after_a_second_signal_a_job_on_a_cluster_is_named(tmp_path, monkeypatch, capfd):
    """It may go on, so its MLflow run is left as it is."""
    monkeypatch.setattr(tracking, "finish_run", lambda *arguments: pytest.fail("it may still be running"))
    watched = watching()
    watched.run_uri = f"{tmp_path}/runs/a-1"
    local_run._record_kill(watched, config.parse("launch: {backend: pytorchjob}"))
    assert f"kftrain cancel {watched.run_uri}" in capfd.readouterr().err


def test_the_command_that_starts_such_a_run_anew_is_what_was_typed_without_the_resume():
    assert (
        run._build_command(("a b.yaml",), ("x=1",), "two") == "kftrain run --workdir two '--config=a b.yaml' --set=x=1"
    )
    assert run._build_command((), (), ".") == "kftrain run"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(tmp_path):
    """Also not when it is closed: nothing that found no room is tried again."""
    warnings = []
    with local_run.open_log(tmp_path, "a", warnings.append) as opened:
        opened.write("first\n")
        with open("/dev/full", "wb", buffering=0) as full:
            opened._stream = full
            for _ in range(3):
                opened.write("x" * 10000)
    (warning,) = warnings
    assert "has gaps from here on: No space left" in warning
    assert opened.path.read_text() == "first\n"


@pytest.mark.parametrize(
    ("key", "value", "kind", "what"),
    [
        ("data.source", "./nowhere", DataError, "no such file or folder"),
        ("data.source", "digitz", ConfigError, "did you mean 'digits'?"),
        ("data.source", "mine.data:rekords", ConfigError, "module mine.data has no rekords"),
        ("data.mixture", "[{name: a, source: digits}, {name: b, source: ./gone}]", DataError, "no such file or folder"),
        ("task.kind", "language_modelling", ConfigError, "did you mean 'language_modeling'?"),
        ("task.kind", "mine.tusk:Task", ConfigError, "no module named mine.tusk"),
        ("task.kind", "nobodys.task:Task", ConfigError, "no module named nobodys"),
        ("model.kind", "mine.data:Netwrk", ConfigError, "module mine.data has no Netwrk"),
        ("evaluate.metrics", "['mine.data:metrik']", ConfigError, "module mine.data has no metrik"),
    ],
)
def test_what_is_named_and_not_there_is_said_before_any_process_starts(tmp_path, monkeypatch, key, value, kind, what):
    write_module(tmp_path)
    monkeypatch.setattr(local_run, "PipelineProcess", lambda *arguments: pytest.fail("a process was started"))
    chosen, resume_run = local_run.load_run((), (f"{key}={value}",), tmp_path, "")
    with pytest.raises(kind, match=what) as caught:
        local_run.run_here(chosen, resume_run, tmp_path, "kftrain run")
    assert caught.value.line.startswith("data.source: " if key == "data.mixture" else f"{key}: ")
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


@pytest.mark.parametrize(
    ("override", "resume"),
    [
        ("data.source=mine.data:records", ""),
        ("task.kind=mine.made:at_import", ""),
        ("launch.backend=pytorchjob", ""),  # the model is in the image
        ("data.source=./gone", "a-1"),  # its shards are there
    ],
)
def test_what_may_be_there_is_left_to_the_stages_and_nothing_is_imported(tmp_path, monkeypatch, override, resume):
    write_module(tmp_path)
    model = "model.kind=only.in_the_image:Model" if "launch" in override else "model.kind=mine.data:Model"
    monkeypatch.setattr(local_run, "PipelineProcess", Started)
    chosen = local_run.place_run(config.parse("", [override, model]), (), tmp_path, "", keep=False)[0]
    with pytest.raises(StartedError):
        local_run.run_here(chosen, resume, tmp_path, "kftrain run")


class StartedError(Exception):
    """A process would have started."""


class Started:
    def __init__(self, *arguments):
        raise StartedError


def write_module(folder):
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / "mine" / "data.py").write_text("def records(): ...\nclass Model: ...\n")
    (folder / "mine" / "made.py").write_text("globals()['at' + '_import'] = 1\n")


def test_a_workdir_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "logs").write_text("a file, not a folder")
    with (
        pytest.raises(ConfigError, match="--workdir: the log file cannot be written"),
        local_run.open_log(tmp_path, "a", print),
    ):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--workdir"), local_run.open_log(tmp_path / "file", "a", print):
        pass


def test_no_room_for_temporary_files_is_an_error_that_may_pass(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_run.tempfile, "TemporaryDirectory", refuse)
    with (
        pytest.raises(RetryableError, match=r"No space left.*set TMPDIR"),
        local_run._write_arguments(config.parse(""), ""),
    ):
        pass


def test_a_pipeline_that_says_nothing_is_a_bug_with_its_log(tmp_path, capfd):
    with pytest.raises(SystemExit) as caught:
        run._conclude(watching().end(1, 0, HERE))
    assert caught.value.code == 1
    assert "x.log" in capfd.readouterr().err


def test_a_users_line_decides_nothing(tmp_path):
    """Whatever a user's code prints: no line of it stops `kftrain run`, names its run or its error."""
    watched = watching()
    watched.run_uri = "/w/runs/a-1"
    for text in ("error {", 'error {"line": "x", "exit_code": 0}', "error []", "run /elsewhere", "run ", "step 1/0"):
        watched.take_line(f"user says: kftrain| {text}\n")
    watched.take_line("kftrain| step " + "9" * 5000 + "/1\n")
    assert (watched.run_uri, watched.error) == ("/w/runs/a-1", None)


def test_a_stage_tells_its_parent_what_it_must_know(tmp_path, capsys):
    with channel.open_channel(tmp_path) as told:
        watched = local_run.PipelineOutput(Recorded(), io.StringIO(), told)
        assert channel.tell(channel.RUN, "/w/runs/b-2")
        with pytest.raises(CheckpointError), failure.announce_failure("train", to_log):
            raise CheckpointError("no usable checkpoint")
        with (tmp_path / "channel").open("a") as stream:
            stream.write('[1]\n{"error": 3}\n{"run": {}}\nno json\n\xff\n{"run": "/torn')
        watched.take_line("a line of anybody\n")
    assert watched.run_uri == "/w/runs/b-2"
    assert (watched.error.exit_code, watched.error.stage) == (12, "train")
    assert not channel.tell(channel.RUN, "x") and channel.VARIABLE not in os.environ
    assert "no usable checkpoint" not in capsys.readouterr().out
