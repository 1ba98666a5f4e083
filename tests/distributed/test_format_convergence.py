"""Whole trainings in each format: by workers, to an export; and 300 steps of an example, whose loss is that of fp32."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from helpers import jobs
from safetensors.torch import load_file

from kftrain.core import storage
from kftrain.run import documents
from kftrain.run.documents import Completion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EXAMPLE = (Path(__file__).parents[2] / "examples" / "stdlib-lm.yaml").read_text()
SMALL = ["task.sequence_length=32", "model.dim=64", "model.num_layers=2"]
"""A part of the example: a processor without AVX-512 emulates bf16, so that the whole takes it over ten minutes."""
NUM_POINTS = 5
"""Recorded points at the end, one in ten steps, whose mean is compared."""


@pytest.fixture(scope="module")
def last_loss(tmp_path_factory):
    """Gives the mean loss at the end of a training in a format."""
    root = tmp_path_factory.mktemp("formats")

    def train(compute):
        settings = ["train.steps=300", "evaluate.interval_steps=0", f"precision.compute={compute}", *SMALL]
        paths, resolved = jobs.prepare(root, EXAMPLE, settings, compute)
        done = jobs.run_worker(paths, resolved, processes=1)
        assert done.returncode == 0, done.stdout + done.stderr
        return np.mean(list(jobs.losses(paths).values())[-NUM_POINTS:])

    return train


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="the extra float8 is not installed")
def test_float8_comes_to_the_loss_of_fp32_within_one_percent(last_loss):
    assert abs(last_loss("float8") / last_loss("fp32") - 1) < 0.01


FORMATS = {
    "fp16": ("precision.compute=fp16",),
    "weights in bf16": ("precision.compute=bf16", "precision.master=bf16"),
    "float8": ("precision.compute=float8",),
}


@pytest.mark.parametrize("name", FORMATS)
def test_workers_train_in_a_format_and_export_fp32(tmp_path, name):
    if name == "float8" and importlib.util.find_spec("torchao") is None:
        pytest.skip("the extra float8 is not installed")
    paths, resolved = jobs.make_run(tmp_path, FORMATS[name])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    completion = documents.read(Completion, paths.complete)
    (weights,) = Path(storage.local_path(completion.export_uri)).glob("*.safetensors")
    assert {str(tensor.dtype) for tensor in load_file(weights).values()} == {"torch.float32"}
    losses = list(jobs.losses(paths).values())
    assert losses[-1] < losses[0]
