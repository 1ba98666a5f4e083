import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.train.loop import compute_learning_rate
from kftrain.train.settings import SHORT_NAMES, OptimizerConfig

SCHEDULES = ["constant", "warmup_constant", *SHORT_NAMES.values()]


def test_warmup_rises_to_the_peak_and_the_cosine_falls_to_the_floor():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_learning_rate_fraction=0.1)
    rates = [compute_learning_rate(config, step, 110) for step in range(110)]
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
        assert math.isclose(compute_learning_rate(config, step, 100), theirs.get_last_lr()[0], abs_tol=1e-12)
        optimizer.step()
        theirs.step()


@settings(derandomize=True)
@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 300), st.sampled_from(SCHEDULES))
def test_every_rate_is_positive_and_at_most_the_peak(warmup_steps, num_steps, decay_steps, schedule):
    config = OptimizerConfig(learning_rate=0.3, warmup_steps=warmup_steps, decay_steps=decay_steps, schedule=schedule)
    assert all(0 < compute_learning_rate(config, step, num_steps) <= 0.3 + 1e-12 for step in range(num_steps))


def rates(schedule, num_steps, **options):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, **options)
    return [compute_learning_rate(config, step, num_steps) for step in range(num_steps)]


def test_short_names_are_the_same_schedules_and_the_same_training():
    for short, name in SHORT_NAMES.items():
        one, other = (OptimizerConfig(schedule=each) for each in (short, name))
        assert one.schedule == name and one.identity() == other.identity()


def test_constant_has_no_warmup_and_warmup_constant_has_one():
    assert rates("constant", 4, warmup_steps=2) == [1.0] * 4
    assert rates("warmup_constant", 5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_by_the_same_amount_in_each_step_to_the_fraction_at_the_last_one():
    found = rates("warmup_linear", 7, warmup_steps=2, final_learning_rate_fraction=0.2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    ("decay_steps", "expected"),
    [
        (4, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        (1, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.1]),
        (None, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.1]),
        (99, [0.5, 1.0, *(1.0 - 0.9 * number / 8 for number in range(1, 9))]),
    ],
)
def test_warmup_stable_decay_is_constant_until_the_last_steps(decay_steps, expected):
    assert rates("warmup_stable_decay", 10, warmup_steps=2, decay_steps=decay_steps) == pytest.approx(expected)
    assert rates("warmup_stable_decay", 1000, warmup_steps=0)[899:901] == pytest.approx([1.0, 1.0 - 0.9 / 100])


def test_the_stable_phase_does_not_know_how_long_the_training_is():
    assert rates("wsd", 500, warmup_steps=7, decay_steps=50)[:450] == rates("wsd", 900, warmup_steps=7)[:450]


def test_inverse_sqrt_is_the_formula_of_vaswani():
    """`min(n ** -0.5, n * warmup ** -1.5)` of the n-th step, over its largest value."""
    warmup = 40
    formula = [min(n**-0.5, n * warmup**-1.5) / warmup**-0.5 for n in range(1, 201)]
    assert rates("warmup_inverse_sqrt", 200, warmup_steps=warmup) == pytest.approx(formula)
    assert rates("warmup_inverse_sqrt", 4, warmup_steps=0) == pytest.approx([n**-0.5 for n in range(1, 5)])


def test_linear_and_cosine_equal_torchs_schedulers_one_after_the_other():
    for schedule, theirs in (
        ("linear", lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, total_iters=89)),
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=89, eta_min=0.25)),
    ):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=9)
        then = theirs(optimizer)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], milestones=[10])
        found = []
        for _ in range(100):
            found.append(both.get_last_lr()[0])
            optimizer.step()
            both.step()
        assert rates(schedule, 100, warmup_steps=10, final_learning_rate_fraction=0.25) == pytest.approx(found)
