"""Rows of a table against `nn.EmbeddingBag(sparse=True)` with torch's own optimizers, bit by bit."""

import numpy as np
import pytest
import torch
from torch import nn

from kftrain.server.optimizers import RowAdagrad, RowAdam, RowSgd
from kftrain.server.table import RowTable, TableSpec, draw_initial_weights

pytestmark = pytest.mark.timeout(120)

NUM_KEYS = 300
CASES = {
    "sgd": (RowSgd(0.1), lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "adagrad": (RowAdagrad(0.1, is_row_wise=False), lambda weights: torch.optim.Adagrad(weights, lr=0.1)),
    "adagrad from a sum": (
        RowAdagrad(0.03, is_row_wise=False, initial_sum=0.3, epsilon=1e-6),
        lambda weights: torch.optim.Adagrad(weights, lr=0.03, initial_accumulator_value=0.3, eps=1e-6),
    ),
    "adam": (RowAdam(0.01), lambda weights: torch.optim.SparseAdam(weights, lr=0.01)),
}


def draw_batches(num_steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        ids = torch.randint(0, NUM_KEYS, (200,), generator=generator)
        yield ids, torch.arange(0, 200, 4), torch.randn(50, 13, generator=generator)


@pytest.mark.parametrize("case", CASES)
def test_a_table_gives_the_bits_of_torch(tmp_path, case):
    ours, build = CASES[case]
    spec = TableSpec("t", 13, 3)
    table, keys = RowTable(spec, ours, tmp_path), np.arange(NUM_KEYS)
    bag = nn.EmbeddingBag(NUM_KEYS, 13, sparse=True, _weight=torch.from_numpy(draw_initial_weights(spec, keys)))
    optimizer = build(bag.parameters())
    for ids, offsets, target in draw_batches(12):
        optimizer.zero_grad()
        (bag(ids, offsets) - target).pow(2).sum().backward()
        bag.weight.grad = bag.weight.grad.coalesce()
        gradient = bag.weight.grad
        table.update(gradient.indices()[0].numpy(), gradient.values().numpy())
        optimizer.step()
        assert np.array_equal(table.read(keys), bag.weight.detach().numpy())


def test_row_wise_adagrad_keeps_the_sum_of_mean_squares(tmp_path):
    spec = TableSpec("t", 13, 3)
    table, keys = RowTable(spec, RowAdagrad(0.1, epsilon=1e-8), tmp_path), np.arange(NUM_KEYS)
    weights, sums = draw_initial_weights(spec, keys).astype(np.float64), np.zeros(NUM_KEYS)
    rng = np.random.default_rng(0)
    for _ in range(20):
        some = np.unique(rng.integers(0, NUM_KEYS, 80))
        gradients = rng.standard_normal((len(some), 13)).astype(np.float32)
        table.update(some, gradients)
        for key, gradient in zip(some, gradients.astype(np.float64), strict=True):
            sums[key] += (gradient**2).mean()
            weights[key] -= 0.1 * gradient / (np.sqrt(sums[key]) + 1e-8)
    np.testing.assert_allclose(table.read(keys), weights, rtol=1e-5, atol=1e-6)


def test_lazily_decayed_moments_are_those_of_dense_adam(tmp_path):
    """Weights differ, as dense Adam moves rows that are not touched; the moments of the rows touched last do not."""
    table, keys = RowTable(TableSpec("t", 5, 3), RowAdam(0.01, decays_lazily=True), tmp_path), np.arange(40)
    weight = nn.Parameter(torch.zeros(40, 5))
    optimizer = torch.optim.Adam([weight], lr=0.01)
    rng = np.random.default_rng(0)
    for _ in range(25):
        some = np.unique(rng.integers(0, 40, 15))
        gradients = rng.standard_normal((len(some), 5)).astype(np.float32)
        table.update(some, gradients)
        weight.grad = torch.zeros(40, 5)
        weight.grad[some] = torch.from_numpy(gradients)
        optimizer.step()
    order = np.argsort(table.view()["rows"]["key"])
    numbers = table.view()["rows"]["numbers"][order]
    touched = np.isin(keys, some)
    state = optimizer.state[weight]
    np.testing.assert_allclose(numbers[touched, 5:10], state["exp_avg"][touched], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(numbers[touched, 10:], state["exp_avg_sq"][touched], rtol=1e-4, atol=1e-7)
