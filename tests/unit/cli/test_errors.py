"""What a wrong command looks like: one line, and the code that says whose fault it is."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kftrain import cli
from kftrain.errors import DataError


def run(*arguments):
    """Calls the program in this process; returns its exit code."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["config", "show", "--set", "train.stepz=3"], 10, ["train.stepz", "unknown key", "did you mean 'steps'?"]),
        (["config", "show", "--set", "train.steps=abc"], 10, ["train.steps", "abc"]),
        (["config", "show", "--set", "steps"], 10, ["--set", "section.field=value"]),
        (["config", "show", "--config", "missing.yaml"], 10, ["missing.yaml", "cannot read"]),
        (["shard", "--run", "No Name"], 10, ["not a run id", "No Name"]),
        (["run", "--resume", "nowhere/r"], 10, ["not a run", "nowhere/r"]),
        (["train", "nowhere"], 10, ["not a run", "nowhere"]),
        (["shards", "show", "nowhere"], 11, ["manifest.json is missing", "nowhere"]),
        (["shards", "show", "c.yaml"], 10, ["c.yaml", "the system refuses it: Not a directory"]),
        (["shards", "verify", "a" * 300], 10, ["the system refuses it: File name too long"]),
        (["checkpoints", "verify", "nowhere"], 12, ["no committed checkpoint"]),
        (["compile", "-o", "nowhere/p.yaml"], 10, ["--output", "nowhere/p.yaml"]),
        (["config", "show", "--nope"], 2, ["--nope", "kftrain config show --help"]),
        (["nope"], 2, ["No such command 'nope'"]),
        (["run", "--resume", ""], 2, ["'--resume'", "it is empty"]),
        (["submit", "--resume", " "], 2, ["'--resume'", "it is empty"]),
        (["models", "promote", "1", "--reason", ""], 2, ["'--reason'", "it is empty"]),
        (["models", "promote", "9" * 30, "--reason", "x"], 2, ["VERSION", "is not in the range"]),
        (["models", "compare"], 15, ["there is no such database", "mlflow.db"]),
        (["models", "audit", "--set", "tracking.uri=sqlite:///c.yaml"], 15, ["not an sqlite database"]),
        (["models", "audit", "--set", "tracking.uri=postgresql://127.0.0.1:1/x"], 15, ["No module named", "psycopg"]),
        (["tokenizer", "train", "--set", "data.source=x.txt", "--out", "/proc/x"], 10, ["/proc", "the system refuses"]),
        (["config", "show", "--set", "optimizer.kind=adam"], 10, ["did you mean 'adamw'?"]),
        (["config", "show", "--set", "train.learning_rate=1"], 10, ["did you mean 'optimizer.learning_rate'?"]),
    ],
)
def test_a_wrong_command_is_one_line_on_stderr_and_its_exit_code(arguments, code, parts, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("{}  # no database\n")
    (tmp_path / "x.txt").write_text("some words")
    assert run(*arguments) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("kftrain: error: ") and err.count("\n") == 1
    assert all(part in err for part in parts)
    assert not (tmp_path / "mlflow.db").exists()


def test_without_kfp_the_package_that_is_missing_is_named(capfd, tmp_path, monkeypatch):
    """The pipeline's process ended without saying why."""
    monkeypatch.chdir(tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "kfp" else found(name))
    assert run("run") == 10
    assert "kfp is needed for this; pip install 'kftrain[kfp]'" in capfd.readouterr().err


def test_a_broken_yaml_file_is_refused_in_one_line(capfd, tmp_path):
    (tmp_path / "c.yaml").write_text("train: {steps: 3")
    assert run("config", "show", "--config", str(tmp_path / "c.yaml")) == 10
    assert capfd.readouterr().err.count("\n") == 1


def test_the_configuration_is_shown_with_its_overrides(capfd):
    assert run("config", "show", "--set", "train.steps=3") == 0
    assert "steps: 3" in capfd.readouterr().out


def test_a_warmup_longer_than_the_training_is_said_beside_the_configuration(capfd):
    assert run("config", "show", "--set", "train.steps=3", "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["train"]["steps"] == 3
    assert err.startswith("warning: optimizer.warmup_steps (50) is more than train.steps (3)") and err.count("\n") == 1


def test_a_bug_keeps_its_traceback(monkeypatch, capfd):
    def broken(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(cli.cli, "main", broken)
    assert run() == 1
    shown = capfd.readouterr().err
    assert shown.startswith("Traceback (most recent call last):") and shown.endswith("\nZeroDivisionError\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (DataError("bad shard", where="x"), 11, "x: bad shard"),
        (ModuleNotFoundError("no torch", name="torch.nn"), 10, "pip install 'kftrain[train]'"),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(error, code, line, monkeypatch, capfd):
    def broken(*arguments, **options):
        raise error

    monkeypatch.setattr(cli.cli, "main", broken)
    assert run() == code
    assert line in capfd.readouterr().err


def test_a_missing_module_of_ours_is_a_bug(monkeypatch, capfd):
    def broken(*arguments, **options):
        raise ModuleNotFoundError("no module", name="kftrain.nope")

    monkeypatch.setattr(cli.cli, "main", broken)
    assert run() == 1
    assert "ModuleNotFoundError: no module" in capfd.readouterr().err


def test_every_command_in_the_help_exists():
    for name in cli.COMMANDS:
        assert cli.cli.get_command(None, name).name == name


def test_the_help_imports_nothing_heavy():
    code = "import sys; from kftrain.cli import cli; cli.main(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100"}
    )
    modules = done.stdout.splitlines()[-1].split()
    assert not {"numpy", "torch", "kfp", "mlflow", "pydantic", "rich"} & set(modules)
    assert "Commands:" in done.stdout
