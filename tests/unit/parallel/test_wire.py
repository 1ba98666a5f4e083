"""Bytes of a step, by hand: units are the bytes of all parameters, which gradients have as many of."""

from fractions import Fraction

import pytest
from helpers import wire
from helpers.tensor_traffic import AlongTensor

from kftrain.parallel.shape import Shape

UNIT = 1 << 20

BY_HAND = [
    ("ddp", "step", Shape(replicate=2), 1, {"replicate": Fraction(1)}),
    ("ddp", "step", Shape(replicate=4), 3, {"replicate": Fraction(3, 2)}),
    ("zero1", "step", Shape(shard=4), 3, {"shard": Fraction(3, 2)}),
    ("zero2", "step", Shape(shard=4), 3, {"shard": Fraction(3, 4) * 4}),
    ("fsdp", "step", Shape(shard=2), 1, {"shard": Fraction(3, 2)}),
    ("fsdp", "step", Shape(shard=4), 2, {"shard": Fraction(3, 4) * 5}),
    ("fsdp", "micro_batch", Shape(shard=4), 2, {"shard": Fraction(3, 4) * 6}),
    ("fsdp", "step", Shape(shard=4, replicate=3), 1, {"shard": Fraction(9, 4), "replicate": Fraction(1, 3)}),
    ("fsdp", "step", Shape(), 1, {}),
]


@pytest.mark.parametrize(("strategy", "exchange", "shape", "num_micro", "expected"), BY_HAND)
def test_bytes_of_the_data_axes(strategy, exchange, shape, num_micro, expected):
    amounts = wire.bytes_sent(shape, strategy, exchange, wire.Step(UNIT, UNIT, num_micro))
    assert amounts == pytest.approx({axis: float(units * UNIT) for axis, units in expected.items()})


def test_along_tensor_activations_travel_and_gradients_of_copies():
    split = AlongTensor(num_features=100, num_sums=3, num_copied=60, num_moved=7)
    step = wire.Step(UNIT, UNIT / 2, 2, split, num_places=10, compute_bytes=2)
    amounts = wire.bytes_sent(Shape(shard=2, tensor=4), "fsdp", "step", step)
    by_hand = 2 * 3 / 4 * (2 * 10 * (2 * 100 + 4 * 3) + 4 * 60 / 2) + 2 * 2 * 7
    assert amounts == {"shard": (4 * UNIT + UNIT / 2) / 2, "tensor": by_hand}


def test_what_is_split_in_a_way_that_is_not_known_has_no_number():
    assert wire.bytes_sent(Shape(tensor=2), "fsdp", "step", wire.Step(UNIT, UNIT)) == {"tensor": 0.0}
