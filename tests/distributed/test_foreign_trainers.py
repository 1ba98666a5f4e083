"""Scripts of others under our supervisor (`train.command`), with real processes on gloo."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import jobs

from kftrain import config
from kftrain.checkpoint import folders
from kftrain.core import storage
from kftrain.errors import CheckpointError, ConfigError
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths
from kftrain.run.script import Script, with_script_digest
from kftrain.trust import require_written

SCRIPT = str(Path(__file__).parents[1] / "helpers" / "scripts" / "ddp.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface"
OF_TRANSFORMER = "model: {kind: transformer, dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2}"


def make_run(root, *arguments, overrides=()):
    """A run whose training is the script with these arguments."""
    text = jobs.TINY.replace("SOURCE", str(jobs.write_texts(root / "texts")))
    text = text.replace(OF_TRANSFORMER, "model: {kind: 'helpers.models.bigram:Bigram', dim: 16}")
    command = json.dumps([SCRIPT, *map(str, arguments)])
    settings = [f"run.storage_root={root}/store", "train.steps=8", f"train.command={command}", *overrides]
    resolved = with_script_digest(config.parse(text, settings))
    paths = RunPaths.of(resolved.run.storage_root, "r")
    if not storage.exists(paths.shards):
        jobs.prepare(root, text, settings[1:])
    storage.publish(paths.config, resolved.to_yaml())
    return paths, resolved


def test_a_bare_script_trains_commits_is_killed_resumes_and_completes(tmp_path):
    paths, resolved = make_run(tmp_path, "--fault", "killed in commit")
    killed = jobs.run_worker(paths, resolved)
    assert killed.returncode == 137, killed.stdout + killed.stderr
    assert [name.step for name in commit.list_committed(paths)] == [3]
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 2" in done.stdout and "going on after step 3" in done.stdout
    completion = documents.read(Completion, paths.complete)
    assert (completion.step, completion.world_size, completion.attempt) == (8, 2, 2)
    assert list(jobs.losses(paths)) == list(range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "line", "last_commit"),
    [
        ("exit 0", 13, "ended without kftrain.complete()", 3),
        ("exit 3", 16, "SystemExit: 3", 3),
        ("crash", 16, "ValueError: no good", 3),
        ("empty", 12, "there is no file to commit", 3),
        ("other model", 12, "more is missing, and [2] there; write the state of the model that model.kind", 8),
        ("hang", 140, "rank 1: no progress", 3),
    ],
)
def test_a_script_that_fails_ends_with_the_code_of_its_failure_and_never_as_complete(
    tmp_path, fault, code, line, last_commit
):
    paths, resolved = make_run(tmp_path, "--fault", fault, "--at", 5, overrides=["launch.timeout_seconds=12"])
    done = jobs.run_worker(paths, resolved)
    error = storage.read_json(paths.error)
    assert (done.returncode, error["exit_code"]) == (code, code), done.stdout + done.stderr
    assert line in error["line"]
    assert commit.find_last_step(paths) == last_commit
    assert not storage.exists(paths.complete)


@pytest.mark.slow
def test_sigterm_lets_the_script_commit_and_the_next_attempt_goes_on_from_there(tmp_path):
    paths, resolved = make_run(tmp_path, "--fault", "stop", "--at", 5)
    process = jobs.start_worker(paths, resolved)
    jobs.wait_for_line(process, "step 5/8")
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 143, output
    assert [name.step for name in commit.list_committed(paths)] == [5, 3]
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0 and "going on after step 5" in done.stdout, done.stdout + done.stderr


def test_a_script_that_was_changed_is_not_run_and_is_another_training(tmp_path):
    _, resolved = make_run(tmp_path)
    train = resolved.train.model_copy(update={"command_digest": "0" * 64})
    other = resolved.model_copy(update={"train": train})
    assert resolved.training_digest("") != other.training_digest("")
    with pytest.raises(ConfigError, match="the script's files are others on this node"):
        Script.parse(other.train.command).require_digest(other.train.command_digest)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("train.command=[torchrun, x.py]", "kftrain starts the processes"),
        ("train.command=[-m]", "kftrain starts the processes"),
        ("parallel.tensor=2", "parallel is of kftrain's own training loop"),
        ("train.from=champion", "train.from is of kftrain's own training loop"),
    ],
)
def test_what_a_script_decides_itself_is_refused_beside_it(settings, message):
    with pytest.raises(ConfigError, match=message):
        config.parse("train: {command: [x.py]}", [settings])


def test_a_script_that_is_not_here_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="there is no such script here"):
        with_script_digest(config.parse("train: {command: [-m, no_such_module_anywhere]}"))


def test_the_example_names_a_script_and_a_model_that_lie_beside_it(monkeypatch):
    monkeypatch.chdir(EXAMPLE)
    resolved = with_script_digest(config.load("llama.yaml"))
    assert len(resolved.train.command_digest) == 64 and resolved.model.kind == "tiny_llama:TinyLlama"
    require_written(resolved.model.kind, "model.kind", str(EXAMPLE))


@pytest.mark.parametrize("path", ["a", "a/b.pt", "COMMITTED", "x=2F=y", "ü%2F..", ".hidden/=/a b"])
def test_any_path_below_a_folder_becomes_a_plain_name_and_comes_back(path):
    name = folders.encode_name(path)
    assert re.fullmatch(r"[\w.=~-]+", name, re.ASCII) and folders.decode_name(name) == path


def test_files_are_copied_into_a_checkpoint_and_back_and_nothing_leads_out_of_the_folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.pt").write_bytes(b"12")
    entries = folders.store_folder(tmp_path / "a", str(tmp_path / "checkpoint"))
    folders.fetch_folder(str(tmp_path / "checkpoint"), entries, tmp_path / "back")
    assert (tmp_path / "back" / "b" / "c.pt").read_bytes() == b"12"
    (name,) = entries
    (tmp_path / "checkpoint" / name).write_bytes(b"13")
    with pytest.raises(CheckpointError, match="a file is damaged"):
        folders.fetch_folder(str(tmp_path / "checkpoint"), entries, tmp_path / "again")
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        folders.decode_name("files=2F..=2Fx")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pipeline_trains_with_a_script_evaluates_and_registers(tmp_path):
    text = jobs.TINY.replace("SOURCE", str(jobs.write_texts(tmp_path / "texts")))
    text = text.replace(OF_TRANSFORMER, "model: {kind: 'helpers.models.bigram:Bigram', dim: 16}")
    (tmp_path / "c.yaml").write_text(text)
    (tmp_path / "ddp.py").write_text(Path(SCRIPT).read_text())
    settings = ["--set", "train.command=[ddp.py]", "--set", "train.steps=8"]
    done = subprocess.run(
        [sys.executable, "-m", "kftrain", "run", "--config", "c.yaml", *settings],
        cwd=tmp_path,
        env=jobs.worker_environment({}),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny version 1, champion" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    paths = RunPaths(str(run))
    identity = commit.read_checkpoint_manifest(documents.read(Completion, paths.complete).checkpoint_uri)[0]
    assert identity.training_identity["train"]["command"] == ["ddp.py"]
    assert len(identity.training_identity["train"]["command_digest"]) == 64
