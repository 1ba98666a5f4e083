"""Whose weights come from `init_weights`: of a class that says so itself, and of no other."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from kftrain.errors import ConfigError
from kftrain.models.base import draw_weights, has_init_weights
from kftrain.models.transformer import Transformer
from kftrain.models.vision_transformer import VisionTransformer


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def init_weights(self, name, parameter, generator):
        parameter.normal_(generator=generator)


class WithoutConstructor(Own):
    """Adds nothing that could set a weight."""


class WithConstructor(Own):
    """May have loaded weights."""

    def __init__(self):
        super().__init__()


class SaysSoAnew(WithConstructor):
    init_weights = Own.init_weights


class OfALibrary(nn.Linear):
    def init_weights(self, mode=""):
        raise AssertionError("was called")


class HasAnAttribute(nn.Linear):
    init_weights = True


def a_function():
    return Own()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Own, True),
        (WithoutConstructor, True),
        (WithConstructor, False),
        (SaysSoAnew, True),
        (OfALibrary, False),
        (HasAnAttribute, False),
        (nn.Linear, False),
        (a_function, False),
        (Transformer, True),
        (VisionTransformer, True),
    ],
)
def test_the_nearer_of_constructor_and_init_weights_sets_the_weights(target, expected):
    assert has_init_weights(target) is expected


@pytest.mark.parametrize("method", [lambda self, generator: None, lambda self, module, seed: None])
def test_a_method_of_other_arguments_is_refused_in_one_line(method):
    target = type("Odd", (nn.Linear,), {"init_weights": method})
    with pytest.raises(ConfigError, match=r"model Odd.init_weights: init_weights must take a name, a parameter and"):
        has_init_weights(target)


def test_a_constructor_may_draw_all_weights_from_the_global_generator():
    torch.manual_seed(3)
    model = Own()
    draw_weights(model)
    torch.manual_seed(3)
    assert torch.equal(model.weight, torch.randn(3))


def test_the_protocol_is_known_without_torch():
    code = "import sys; sys.modules['torch'] = None; from kftrain.models import base; print(base.has_init_weights(int))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"False\n"
