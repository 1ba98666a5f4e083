"""What a stage refuses to send."""

import pytest
import torch
from torch import nn

from kftrain.errors import UserCodeError
from kftrain.models.base import ModelPiece
from kftrain.train.stage_modules import StageModule, StageWork


class Passing(nn.Module):
    """Sends its input as it is."""

    def stages(self):
        return [ModelPiece(lambda _, inputs: inputs[0], []), ModelPiece(lambda hidden, _: hidden, [])]


def compute(shapes, row_weights):
    module = StageModule(Passing(), range(1), False, torch.float32, 0)
    works = enumerate(torch.zeros(shape) for shape in shapes)
    module.work = [StageWork(number, (rows,), lambda returned: returned, row_weights) for number, rows in works]
    sent = []
    for number in range(len(shapes)):
        module.number = number
        sent.append(list(module().shape))
    return sent


@pytest.mark.parametrize("other", [(2, 4), (1, 3), (2, 3, 1)])
def test_a_stage_sends_no_other_shapes_than_those_of_the_first_micro_batch(other):
    """torch would receive them into memory for the first ones, without a word."""
    assert compute([(2, 3), (2, 3)], torch.ones(2)) == [[2, 3], [2, 3]]
    with pytest.raises(UserCodeError, match="other shapes than before"):
        compute([(2, 3), (2, 3), other], torch.ones(2))


def test_the_last_batch_of_an_evaluation_may_have_fewer_rows():
    assert compute([(2, 3), (1, 3)], None) == [[2, 3], [1, 3]]
