"""The examples of `train.command`: trainers of other libraries, each killed once, through the whole pipeline.

They live in environments of their own, made as docs/foreign-trainers.md says: KFTRAIN_HF_PYTHON names the interpreter.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from helpers import jobs
from safetensors.numpy import load_file

from kftrain import config
from kftrain.core import storage
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths

EXAMPLES = Path(__file__).parents[2] / "examples"

STEPS = 24
"""Steps of a training; the examples commit four times."""

UNDISTURBED = "undisturbed"
"""Name of the run in one go."""

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def find_python(variable, *modules):
    """The interpreter that a variable names; skips the test where it is not given or lacks a module."""
    python = os.environ.get(variable, "")
    if not python:
        pytest.skip(f"{variable} names no interpreter with {', '.join(modules)}")
    lacking = subprocess.run(
        [python, "-c", f"import {', '.join(modules)}, kftrain"], capture_output=True, text=True, check=False
    )
    if lacking.returncode:
        pytest.skip(f"{variable}: {lacking.stderr.strip().splitlines()[-1]}")
    return python


def copy_example(name, folder):
    """An example's folder, beside it a source of text that takes a second."""
    shutil.copytree(EXAMPLES / name, folder)
    jobs.write_texts(folder / "texts")
    return folder


def run_and_kill_a_rank(python, folder, *arguments):
    """Runs the pipeline; SIGKILL to one rank once a checkpoint is committed. Returns the output and the run's paths."""
    command = [python, "-m", "kftrain", "run", *arguments]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=ONE_THREAD, stdout=output, stderr=output)
        try:
            paths = wait_for_commit(folder, process)
            find_ranks(process)[-1].kill()
            process.wait(timeout=400)
        finally:
            for member in jobs.tree_of(process) if process.poll() is None else []:
                member.kill()
    text = (folder / "output").read_text()
    assert process.returncode == 0, text
    return text, paths


def wait_for_commit(folder, process):
    """The paths of the folder's only run, once it has a checkpoint."""
    while process.poll() is None:
        for run in folder.glob("runs/*/config.yaml"):
            paths = RunPaths(str(run.parent))
            if commit.list_committed(paths):
                return paths
        time.sleep(0.05)
    raise AssertionError((folder / "output").read_text())


def find_ranks(process):
    """The processes that run the script, below a launcher: forks of their node's agent, with the same command line."""
    below = psutil.Process(process.pid).children(recursive=True)
    agents = [child for child in below if child.cmdline()[1:3] == ["-m", "kftrain.worker.agent"]]
    return [child for child in agents if child.ppid() in {agent.pid for agent in agents}]


def train_undisturbed(python, folder, like):
    """The same training on the same data in one go."""
    resolved = config.parse(storage.read_text(like.config))
    paths = RunPaths.of(resolved.run.storage_root, UNDISTURBED)
    storage.publish_json(paths.shards, storage.read_json(like.shards))
    storage.publish(paths.config, resolved.to_yaml())
    command = jobs.worker_command(paths, resolved)
    command[0] = python
    done = subprocess.run(command, cwd=folder, env=ONE_THREAD, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return paths


def read_weights(paths):
    completion = documents.read(Completion, paths.complete)
    return load_file(Path(completion.export_uri.removeprefix("file://")) / "model.safetensors")


def require_same_training(paths, undisturbed):
    """The recorded losses and the exported weights are equal, bitwise."""
    assert documents.read(Completion, undisturbed.complete).attempt == 1
    assert jobs.losses(paths) == jobs.losses(undisturbed)
    require_equal_weights(paths, undisturbed)


def require_equal_weights(paths, others):
    """Bitwise."""
    actual, expected = read_weights(paths), read_weights(others)
    assert actual.keys() == expected.keys()
    assert [name for name in expected if (actual[name] != expected[name]).any()] == []


def train_killed_once(python, folder, file, name):
    """Trains an example through the pipeline, killed once, and in one go; both must be the same. Returns its paths."""
    settings = ["--set", f"data.source={folder}/texts", "--set", f"train.steps={STEPS}"]
    text, paths = run_and_kill_a_rank(python, folder, "--config", file, *settings)
    assert f"{name} version 1, champion" in text
    completion = documents.read(Completion, paths.complete)
    assert (completion.step, completion.attempt, completion.world_size) == (STEPS, 2, 2)
    losses = jobs.losses(paths)
    assert list(losses) == list(range(1, STEPS + 1)) and losses[STEPS] < 0.7 * losses[1]
    require_same_training(paths, train_undisturbed(python, folder, paths))
    return paths


def test_the_trainer_of_hugging_face_is_killed_goes_on_with_the_same_weights_and_is_registered(tmp_path):
    python = find_python("KFTRAIN_HF_PYTHON", "transformers", "accelerate")
    train_killed_once(python, copy_example("huggingface", tmp_path / "h"), "llama.yaml", "huggingface")
