"""300 steps of an example whose gradients travel compressed: its loss is that of fp32."""

from pathlib import Path

import numpy as np
import pytest
from helpers import jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EXAMPLE = (Path(__file__).parents[2] / "examples" / "stdlib-lm.yaml").read_text()
SMALL = ["task.sequence_length=32", "model.dim=64", "model.num_layers=2"]
"""A small part of the example, so that a training takes a few seconds of each process."""
NUM_POINTS = 5
"""Recorded points at the end, one in ten steps, whose mean is compared."""


@pytest.fixture(scope="module")
def last_loss(tmp_path_factory):
    """Gives the mean loss at the end of a training; of each kind, layout and number of processes once."""
    root, losses, shared = tmp_path_factory.mktemp("compressed"), {}, []

    def train(kind, strategy, processes):
        name = f"{kind}-{strategy}-{processes}"
        if name not in losses:
            settings = ["train.steps=300", "evaluate.interval_steps=0", "precision.compute=fp32", *SMALL]
            settings += [f"parallel.strategy={strategy}", f"parallel.compression.kind={kind}"]
            paths, resolved = jobs.prepare(root, EXAMPLE, settings, name, data=next(iter(shared), None))
            shared.append(paths)
            done = jobs.run_worker(paths, resolved, processes=processes)
            assert done.returncode == 0, done.stdout + done.stderr
            losses[name] = np.mean(list(jobs.losses(paths).values())[-NUM_POINTS:])
        return losses[name]

    return train


@pytest.mark.parametrize(
    ("kind", "strategy", "processes"),
    [("int8", "ddp", 4), ("int8", "fsdp", 2), ("bf16", "ddp", 2), ("fp16", "ddp", 2)],
)
def test_a_compressed_training_comes_to_the_loss_of_fp32_within_one_percent(last_loss, kind, strategy, processes):
    dense, compressed = last_loss("none", "ddp", 2), last_loss(kind, strategy, processes)
    print(f"\n{processes} {strategy}, {kind}: {compressed:.4f}, fp32 {dense:.4f}, {compressed / dense - 1:+.2%}")
    assert abs(compressed / dense - 1) < 0.01
