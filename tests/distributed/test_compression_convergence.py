"""An example whose gradients travel compressed: its loss is that of fp32 after 300 steps, or near it after 1,000.

pytest -s -m slow tests/distributed/test_compression_convergence.py      prints the losses
"""

from pathlib import Path

import numpy as np
import pytest
from helpers import jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EXAMPLE = (Path(__file__).parents[2] / "examples" / "stdlib-lm.yaml").read_text()
SMALL = ["task.sequence_length=32", "model.dim=64", "model.num_layers=2"]
"""A small part of the example, so that a training takes a few seconds of each process."""
COMMON = ["evaluate.interval_steps=0", "precision.compute=fp32", "train.log_interval_steps=1", *SMALL]
NUM_STEPS = 100
"""Steps at the end, the mean of whose losses is compared."""

SGD = ["train.steps=1000", "optimizer.kind=sgd", "optimizer.weight_decay=0.0001"]
MORE = {"topk": ("parallel.compression.warmup_steps=200", "optimizer.momentum=0.8")}
RATES = {"none": 0.8, "topk": 1.6, "sign": 0.003}
"""Of `none` and `topk` about the best in a bare loop of the same formulas, among rates from 0.05 to 4."""
BAR = 0.05
"""What a kind may lose to dense SGD."""


def train(root, name, settings, processes, shared):
    """The mean loss at the end of a training."""
    paths, resolved = jobs.prepare(root, EXAMPLE, [*COMMON, *settings], name, data=next(iter(shared), None))
    shared.append(paths)
    done = jobs.run_worker(paths, resolved, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return np.mean(list(jobs.losses(paths).values())[-NUM_STEPS:])


@pytest.fixture(scope="module")
def last_loss(tmp_path_factory):
    """Gives the mean loss at the end of a training; of each kind, layout, number of processes and settings once."""
    root, losses, shared = tmp_path_factory.mktemp("compressed"), {}, []

    def find(kind, strategy, processes, more=("train.steps=300",)):
        key = kind, strategy, processes, more
        if key not in losses:
            layout = [f"parallel.strategy={strategy}", f"parallel.compression.kind={kind}"]
            losses[key] = train(root, f"r{len(losses)}", [*layout, *more], processes, shared)
        return losses[key]

    return find


@pytest.mark.parametrize(
    ("kind", "strategy", "processes"),
    [("int8", "fsdp", 2), *((kind, "ddp", 4) for kind in ("int8", "bf16", "fp16", "powersgd"))],
)
def test_a_compressed_training_comes_to_the_loss_of_fp32_within_one_percent(last_loss, kind, strategy, processes):
    dense, compressed = last_loss("none", "ddp", 2), last_loss(kind, strategy, processes)
    print(f"\n{processes} {strategy}, {kind}: {compressed:.4f}, fp32 {dense:.4f}, {compressed / dense - 1:+.2%}")
    assert abs(compressed / dense - 1) < 0.01


@pytest.mark.parametrize("kind", ["topk", "sign"])
def test_largest_numbers_and_signs_come_near_to_the_loss_of_dense_sgd(last_loss, kind):
    dense, compressed = (
        last_loss(name, "ddp", 2, (*SGD, *MORE.get(name, ()), f"optimizer.learning_rate={RATES[name]}"))
        for name in ("none", kind)
    )
    lost = compressed / dense - 1
    print(f"\n{kind}: {compressed:.4f}, dense SGD {dense:.4f}, {lost:+.2%}; bar {BAR:.0%}")
    assert lost < BAR
