"""The scale of the loss, step by step, against torch's own scaler and by hand."""

import math

import pytest
import torch
from torch import nn

from kftrain.parallel.distributed import Part
from kftrain.parallel.settings import LossScaleConfig
from kftrain.train.engine import Parts
from kftrain.train.loss_scale import LossScale

CPU = torch.device("cpu")


def overflows(seed, num_steps=60):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(num_steps, generator=generator) < 0.3).tolist()


def scales_of(config, found):
    """The scale of each step, and the last number of skipped ones."""
    scale, seen = LossScale(config, CPU), []
    for each in found:
        metrics = scale.update(torch.tensor(float(each)))
        seen.append(float(metrics["loss_scale"]))
    return seen, int(metrics["skipped_steps"])


@pytest.mark.parametrize("seed", range(3))
def test_the_scale_is_that_of_torchs_scaler_after_every_step(seed):
    found = overflows(seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_factor=3.0, growth_interval=2)
    weight, expected = nn.Parameter(torch.ones(2)), []
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for each in found:
        expected.append(scaler.get_scale())
        scaler.scale(weight.sum()).backward()
        if each:
            weight.grad[1] = math.nan
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    config = LossScaleConfig(initial=2.0**20, growth_factor=3.0, growth_interval_steps=2, minimum=2.0**-126)
    assert scales_of(config, found) == (expected, sum(found))


def test_the_scale_stays_at_the_least_one_and_grows_from_there():
    config = LossScaleConfig(initial=8.0, growth_interval_steps=2, minimum=3.0)
    assert scales_of(config, [1, 1, 1, 0, 0, 0, 0, 1, 0])[0] == [8, 4, 3, 3, 3, 6, 6, 12, 6]


def test_parts_that_are_optional_may_be_missing_and_stay_as_they_are():
    kept = {"scale": 1}
    parts = Parts(
        {
            "model": Part(1, lambda: {}, lambda state: None),
            "scale": Part(1, lambda: kept, kept.update, is_optional=True),
        }
    )
    parts.require_same({"model": 1}, "here")
    assert parts.list_missing({"model": 1}) == ["scale"]
    parts.load({"model": {}})
    assert kept == {"scale": 1}
    parts.load({"model": {}, "scale": {"scale": 2}})
    assert kept == {"scale": 2}
