import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from kftrain.train.settings import OptimizerConfig


def test_warmup_rises_to_the_peak_and_the_cosine_falls_to_the_floor():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_learning_rate_fraction=0.1)
    rates = [learning_rate(config, step, 110) for step in range(110)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0)
    assert rates[109] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_the_schedule_equals_torchs_own():
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, final_learning_rate_fraction=0.0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=99)
    for step in range(100):
        assert math.isclose(learning_rate(config, step, 100), theirs.get_last_lr()[0], abs_tol=1e-12)
        optimizer.step()
        theirs.step()


@settings(derandomize=True)
@given(st.integers(0, 300), st.integers(1, 200), st.sampled_from(["warmup_cosine", "constant"]))
def test_every_rate_is_positive_and_at_most_the_peak(warmup_steps, num_steps, schedule):
    config = OptimizerConfig(learning_rate=0.3, warmup_steps=warmup_steps, schedule=schedule)
    assert all(0 < learning_rate(config, step, num_steps) <= 0.3 + 1e-12 for step in range(num_steps))


def test_an_update_equals_torchs_adamw_with_decay_on_matrices_only():
    torch.manual_seed(0)
    ours = torch.nn.Linear(4, 3)
    theirs = torch.nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    mine = build_optimizer(ours, config)
    other = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.5}, {"params": [theirs.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for _ in range(5):
        data = torch.randn(8, 4)
        for model, optimizer in ((ours, mine), (theirs, other)):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_the_rate_is_set_on_every_group():
    optimizer = build_optimizer(torch.nn.Linear(2, 2), OptimizerConfig())
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
