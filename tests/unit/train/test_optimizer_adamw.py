"""Our AdamW against torch's, its plain loop over parameters: what is kept between steps is never out of date."""

import copy

import pytest
import torch
from torch import nn

from kftrain.train.optimizer_kinds import AdamW

BETAS, EPSILON, RATE = (0.8, 0.9), 1e-3, 0.05


class Model(nn.Module):
    """Parameters of two formats, one of which is not used in each step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.now_and_then = nn.Parameter(torch.randn(4))
        self.precise = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def loss(self, step):
        found = (self.matrix.sum(1) * (step + 1)).square().sum() + self.precise.float().cos().sum()
        return found + self.now_and_then.square().sum() if step % 2 else found


def groups_of(model):
    return [
        {"params": [model.matrix, model.precise], "weight_decay": 0.3},
        {"params": [model.now_and_then], "weight_decay": 0.0},
    ]


def pair():
    ours, theirs = Model(), Model()
    torchs = torch.optim.AdamW(groups_of(theirs), lr=RATE, betas=BETAS, eps=EPSILON, foreach=False)
    return (ours, AdamW(groups_of(ours), RATE, BETAS, EPSILON)), (theirs, torchs)


def take(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()


def assert_same(ours, theirs):
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_parameters_of_several_formats_and_without_a_gradient():
    (ours, mine), (theirs, torchs) = pair()
    for model, optimizer in ((ours, mine), (theirs, torchs)):
        take(model, optimizer, range(7))
    assert_same(ours, theirs)
    assert [float(mine.state[each]["step"]) for each in ours.parameters()] == [7, 3, 7]


def test_a_state_that_is_loaded_is_the_one_that_goes_on():
    (ours, mine), (theirs, torchs) = pair()
    for model, optimizer in ((ours, mine), (theirs, torchs)):
        take(model, optimizer, range(3))
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        take(model, optimizer, range(3, 5))
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] = 2 * RATE
        take(model, optimizer, range(5, 8))
    assert_same(ours, theirs)
    assert [float(mine.state[each]["step"]) for each in ours.parameters()] == [6, 3, 6]


def test_torchs_own_state_goes_on_in_ours():
    (ours, mine), (theirs, torchs) = pair()
    take(theirs, torchs, range(4))
    ours.load_state_dict(theirs.state_dict())
    mine.load_state_dict(copy.deepcopy(torchs.state_dict()))
    for model, optimizer in ((ours, mine), (theirs, torchs)):
        take(model, optimizer, range(4, 8))
    assert_same(ours, theirs)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_step_that_is_skipped_is_none(number):
    (ours, mine), (theirs, torchs) = pair()
    for model, optimizer in ((ours, mine), (theirs, torchs)):
        take(model, optimizer, range(2))
    ours.loss(1).backward()
    ours.matrix.grad[0, 0] = number
    mine.found_inf = torch.ones(())
    mine.step()
    assert_same(ours, theirs)
    mine.found_inf = torch.zeros(())
    for model, optimizer in ((ours, mine), (theirs, torchs)):
        take(model, optimizer, range(2, 5))
    assert_same(ours, theirs)


def test_a_parameter_that_is_given_other_memory_goes_on_there():
    (ours, mine), (theirs, torchs) = pair()
    for model, optimizer in ((ours, mine), (theirs, torchs)):
        for step in range(6):
            take(model, optimizer, [step])
            model.matrix.data = model.matrix.data.clamp(-0.5, 0.5)
    assert_same(ours, theirs)
