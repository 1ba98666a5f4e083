"""The examples for GPU nodes, shrunk: the same layout and options, on processes of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.toy_data import text_folder

from kftrain.run import documents
from kftrain.run.documents import Completion, Registration
from kftrain.run.paths import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
HERE = {
    "run.storage_root": "store",
    "tracking.uri": "sqlite:///store/mlflow.db",
    "launch.backend": "local",
    "launch.nodes": 1,
    "train.steps": 4,
    "optimizer.warmup_steps": 1,
    "checkpoint.interval_steps": 2,
    "evaluate.interval_steps": 2,
    "evaluate.num_bootstrap": 100,
    "data.validation_fraction": 0.2,
}
TEXT = {"task.tokenizer": "bytes", "task.sequence_length": 32, "model.dim": 32, "model.num_layers": 2}
SMALL = {
    "llama-1b": {**TEXT, "model.num_heads": 2, "train.global_batch_size": 8, "train.micro_batch_size": 2},
    "llama-8b": {
        **TEXT,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.ffn_dim": 64,
        "parallel.tensor": 2,
        "train.global_batch_size": 4,
        "train.micro_batch_size": 2,
    },
    "vit-base": {
        "task.image_size": 32,
        "task.num_classes": 5,
        "model.dim": 32,
        "model.num_layers": 2,
        "model.num_heads": 2,
        "train.global_batch_size": 16,
        "train.micro_batch_size": 4,
        "evaluate.batch_size": 16,
    },
}
NUM_PROCESSES = {"llama-8b": 4}


@pytest.mark.parametrize("name", SMALL)
def test_a_shrunk_example_runs_from_raw_data_to_a_registered_model(name, tmp_path):
    source = tmp_path / "source"
    if name == "vit-base":
        subprocess.run([sys.executable, ROOT / "examples/make_images.py", source, "--images", "60"], check=True)
    else:
        text_folder(source)
    pairs = {**HERE, "data.source": source, "launch.processes_per_node": NUM_PROCESSES.get(name, 2), **SMALL[name]}
    overrides = [part for key, value in pairs.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "kftrain", "run", "--config", ROOT / f"examples/{name}.yaml", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "store/runs").iterdir()
    paths = RunPaths(str(run))
    assert documents.read(Completion, paths.complete).step == 4
    assert documents.read(Registration, paths.registration).model_name == name
