"""Buffers that each process changes, and that the model says how to combine: those of one process."""

import numpy as np
import pytest
import torch
from helpers import ranks
from helpers.models import odd as odd_models
from helpers.models.odd import DIM, ROWS, Loader
from torch import nn

from kftrain import config
from kftrain.errors import ConfigError
from kftrain.parallel.buffers import read_reductions
from kftrain.parallel.mesh import Mesh
from kftrain.tasks import build_task
from kftrain.train import session

STEPS = 5


def train(world, overrides, num_micro):
    """Losses, and the buffers after each step as this process has them."""
    kinds = "{task: {kind: 'helpers.models.odd:Task'}, model: {kind: 'helpers.models.odd:Statistics'}}"
    resolved = config.parse(kinds, ["optimizer.warmup_steps=1", *overrides])
    loader = Loader(world, num_micro)
    engine, _ = session.build(resolved, build_task(resolved.task), loader, Mesh.of_copies(world))
    losses, after = [], []
    for batch in loader.steps(0, STEPS):
        losses.append(world.sum([float(engine.step(batch, ROWS, world.sum).local_loss_sum)])[0])
        after.append({name: buffer.clone().numpy() for name, buffer in engine.model.named_buffers()})
    return losses, after


def bare_loop(num_ranks, num_micro):
    """The same over whole batches: plain numpy, from the rows alone."""
    mean, total, peak = np.zeros(DIM), np.ones(DIM), np.full(DIM, -10.0)
    for step in range(STEPS):
        rows = np.abs(np.random.default_rng(step).normal(size=(ROWS, DIM))).astype(np.float32)
        rows[ROWS // 2 :] *= -1
        for parts in rows.reshape(num_ranks, num_micro, -1, DIM).swapaxes(0, 1):
            together = parts.reshape(-1, DIM)
            mean = 0.9 * mean + 0.1 * together.mean(0)
            total, peak, first = total + together.sum(0), np.maximum(peak, together.max(0)), parts[0, 0]
        yield {"seen.mean": mean, "seen.count": 1 + ROWS * (step + 1), "seen.total": total, "seen.peak": peak} | {
            "picked": first
        }


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("settings", [[], pytest.param(["parallel.strategy=ddp"], marks=pytest.mark.slow)])
def test_they_are_those_of_a_bare_loop_over_whole_batches(settings, num_micro):
    answers = ranks.on(2, train, settings, num_micro)
    assert [repr(after) for _, after in answers] == [repr(answers[0][1])] * 2, "the same on both"
    for losses, after in answers:
        for combined, expected in zip(after, bare_loop(2, num_micro), strict=True):
            assert combined.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(combined[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
        assert losses == answers[0][0]
    if num_micro == 1:  # what a micro batch computes depends on those before, and these are not the same rows
        ((alone, _),) = ranks.on(1, train, settings, 1)
        assert answers[0][0] == pytest.approx(alone, rel=1e-5)


def model(reductions):
    made = odd_models.Statistics()
    made.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    made.buffer_reductions = reductions
    return made


@pytest.mark.parametrize(
    ("reductions", "message"),
    [
        (["seen.mean"], "is no declaration"),
        ({"seen.mean": "average"}, "is no declaration.*mean, sum, places, max, first"),
        ({"seen.men": "mean"}, "names no buffer of the model.*seen.men"),
        ({"seen.count": "mean"}, "holds no floating-point numbers.*seen.count"),
        ({"wave": "sum"}, "complex numbers.*wave"),
    ],
)
def test_what_cannot_be_meant_is_refused(reductions, message):
    with pytest.raises(ConfigError, match=rf"model.buffer_reductions: .*{message}"):
        read_reductions(model(reductions))


def test_the_first_pattern_counts_and_the_rest_is_left_alone():
    assert read_reductions(model({"seen.count": "max", "seen.*": "sum"})) == {
        **{"seen.count": "max", "seen.mean": "sum", "seen.total": "sum", "seen.peak": "sum"}
    }
    assert read_reductions(nn.Linear(1, 1)) == {}
