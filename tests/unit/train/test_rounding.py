"""Rounding to bf16 by chance: to neighbours only, right in the mean, and what it is for."""

import math

import pytest
import torch

from kftrain.train.rounding import RoundedAdamW, round_by_chance

NUM_DRAWS = 200_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "value", [1.0 + 2.0**-10, -(1.0 + 2.0**-10), 3.14159265, -1e-20, 1e30, 2.0**-126 * 1.001, 255.9]
)
def test_a_number_becomes_one_of_its_neighbours_and_in_the_mean_itself(value):
    numbers = torch.full((NUM_DRAWS,), value)
    exact, rounded = numbers[0].double().item(), round_by_chance(numbers, generator()).double()
    size = 2.0 ** (math.frexp(exact)[1] - 8)  # the distance of two numbers of bf16 there
    below = math.floor(exact / size) * size
    assert set(rounded.tolist()) == {below, below + size}
    share = (exact - below) / size
    assert abs(rounded.mean().item() - exact) < 5 * math.sqrt(share * (1 - share) / NUM_DRAWS) * size


def test_numbers_of_bf16_and_what_is_none_stay_as_they_are():
    kept = torch.tensor([0.0, -0.0, 1.0, -2.5, 3.3895313892515355e38, math.inf, -math.inf, math.nan])
    for seed in range(20):
        torch.testing.assert_close(
            round_by_chance(kept, generator(seed)), kept.bfloat16(), rtol=0, atol=0, equal_nan=True
        )


def train(found_inf=0.0):
    """Twenty steps of 1e-4 downwards, from 1; the weights and the state."""
    weight = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    optimizer = RoundedAdamW([{"params": [weight], "weight_decay": 0.0}], 1e-4, (0.9, 0.95), 1e-8)
    optimizer.names = {weight: "weight"}
    optimizer.found_inf = torch.tensor(found_inf)
    for step in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.position = 8 * step
        optimizer.step()
    return weight.detach().double(), optimizer.state[weight]


def test_updates_that_are_too_small_for_bf16_count_in_the_mean(monkeypatch):
    # Each step is a coin that falls on one side with a chance of 1e-4 * 2**8, and then is worth 2**-8.
    deviation = 2.0**-8 * math.sqrt(20 * 1e-4 * 2**8 / 10_000)
    assert abs(train()[0].mean().item() - (1 - 20e-4)) < 5 * deviation
    monkeypatch.setattr("kftrain.train.rounding.round_by_chance", lambda value, _: value.bfloat16())
    assert train()[0].unique().tolist() == [1.0], "rounded to the nearest no weight moves"


def test_a_skipped_step_changes_neither_weights_nor_moments():
    weights, state = train(found_inf=1.0)
    assert weights.unique().tolist() == [1.0]
    assert float(state["step"]) == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
