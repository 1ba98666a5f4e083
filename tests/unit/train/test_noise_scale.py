"""The gradient noise scale of samples whose gradients are drawn: it must come to what they are drawn from."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kftrain import config
from kftrain.data.order import BatchPlan
from kftrain.parallel.distributed import Distributed
from kftrain.train.noise_scale import NoiseScale

DIM, DEVIATION, BATCH = 50, 2.0, 32


def measure(num_parts, size, seed, num_steps=600):
    """The last noise scale. Gradients of samples are normal around a vector of this size."""
    world = SimpleNamespace(size=1, device=torch.device("cpu"))
    mesh = SimpleNamespace(world=world, shape=SimpleNamespace(replicate=1))
    model = nn.Linear(DIM, 1, bias=False)
    distributed = Distributed(model, mesh)
    resolved, plan = config.parse(f"train: {{global_batch_size: {BATCH}}}"), BatchPlan(BATCH, 1, BATCH // num_parts)
    NoiseScale(resolved, plan, mesh).apply(distributed, [])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        rows = size / DIM**0.5 + DEVIATION * torch.randn(BATCH, DIM, generator=generator)
        model.zero_grad()
        for number, part in enumerate(rows.chunk(num_parts)):
            (model(part).sum() / BATCH).backward()
            if number == 0:
                distributed.note_part(distributed.list_gradients())
        distributed.hand_over()
    return float(distributed.metrics["noise_scale"])


@pytest.mark.parametrize("num_parts", [2, 8])
@pytest.mark.parametrize("size", [2.0, 5.0])
def test_it_is_the_trace_of_the_covariance_over_the_square_of_the_gradient(num_parts, size):
    expected = DIM * DEVIATION**2 / size**2
    measured = [measure(num_parts, size, seed) for seed in range(3)]
    assert sum(measured) / 3 == pytest.approx(expected, rel=0.08)


def test_it_is_nearly_0_where_samples_agree_and_large_or_no_number_where_there_is_no_gradient():
    assert abs(measure(2, 1e6, 0)) < 1e-4  # norms are fp32
    assert not measure(2, 0.0, 0) <= 50 * BATCH
