"""Scripts of others under our supervisor (`train.command`), with real processes on gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import jobs

from kftrain import config
from kftrain.core import storage
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths
from kftrain.run.script import with_script_digest

SCRIPT = str(Path(__file__).parents[1] / "helpers" / "scripts" / "ddp.py")
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
