"""Weights that a model borrows while it is looked at."""

import numpy as np
import pytest
import torch
from helpers.models import drawn as drawn_models
from helpers.models import odd as odd_models

from kftrain.parallel import initialize
from kftrain.parallel.initialize import Drawn
from kftrain.train.probe import Lender

CPU = torch.device("cpu")


def empty(kind):
    with initialize.take_memory_of_parameters():
        model = kind()
    for parameter in model.parameters():  # as the registry of models does it
        parameter.data = parameter.data.float()
    return model, Drawn(initialize.places_of(model), model.init_weights, 5, CPU)


def whole(kind):
    """The same model with memory, filled."""
    model, weights = empty(kind)
    weights.fill(model)
    return model


def rows():
    return torch.from_numpy(np.random.default_rng(0).normal(size=(2, odd_models.DIM)).astype(np.float32))


@pytest.mark.parametrize("kind", [drawn_models.Drawn, drawn_models.Differentiates])
@pytest.mark.parametrize("units", [[], ["layers.0", "layers.1", "layers.2"]], ids=["at once", "by block"])
def test_a_model_computes_with_what_it_borrows_what_it_will_compute_with_its_own(kind, units):
    model, weights = empty(kind)
    state = torch.get_rng_state()
    with initialize.isolate_generators(), Lender(weights, units).lend(model, CPU, torch.float32):
        borrowed = model(rows())
        assert not model.leave.weight.is_meta and model.layers[0].weight.is_meta == bool(units)
        assert model.twin.weight is model.enter.weight
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert borrowed.requires_grad and torch.equal(borrowed, whole(kind)(rows()))


def test_after_a_failure_nothing_is_lent():
    model, weights = empty(drawn_models.Drawn)
    with pytest.raises(RuntimeError), Lender(weights, ["layers.1"]).lend(model, CPU, torch.float32):
        model(torch.ones(2, odd_models.DIM, dtype=torch.int64))
    assert all(parameter.is_meta for parameter in model.parameters())
    with Lender(weights, ["layers.1"]).lend(model, CPU, torch.float32):
        assert model(rows()).shape == (2, 5)


def test_what_is_lent_has_the_asked_for_type():
    model, weights = empty(drawn_models.Drawn)
    with Lender(weights, []).lend(model, CPU, torch.bfloat16):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
