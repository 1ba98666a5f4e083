"""Moments in eight bits against a bare loop with torchao's codes; where blocks differ, near it and near fp32."""

from dataclasses import replace

import pytest
from helpers.parity import eight_bit
from helpers.parity import rank as parity_rank
from helpers.parity import resume as parity_resume
from helpers.parity import table as parity
from helpers.parity.oracle import STEPS
from helpers.parity.table import Row

DDP = ("parallel.strategy=ddp",)
TENSOR = ("parallel.tensor=2",)


def same_blocks(name, processes, layout=()):
    """A row whose parts begin and end where blocks do. After six steps the last bit of a gradient tips a code."""
    return Row(name, processes, layout, eight_bit.CASE, compared_steps=6, weight_tolerance=0.005)


def other_blocks(name, processes, layout=(), case=eight_bit.CASE):
    """A row whose blocks are others than those of whole parameters: codes differ from the first step on."""
    return Row(name, processes, layout, case, tolerance=5e-3, weight_tolerance=0.01)


def norms_of(row, answers):
    """The answers without their norms, which a sum of errors of all weights is in."""
    curve = parity.curve_of(row.case, None, None, parity.Weights(answers[0].value.first_weights))
    for point, norm in zip(answers[0].value.history, curve.norms, strict=True):
        assert point["gradient_norm"] == pytest.approx(norm, rel=0.1)
        point["gradient_norm"] = norm
    return answers


@pytest.mark.parametrize(
    "row",
    [
        same_blocks("8 bit", 1).param(),
        same_blocks("8 bit, fsdp", 2).param(),
        replace(same_blocks("8 bit, ddp", 2, DDP), slow=True).param(),
        replace(same_blocks("8 bit, zero1", 2, ("parallel.strategy=zero1",)), slow=True).param(),
        replace(same_blocks("8 bit, hsdp", 4, ("parallel.replicate=2",)), slow=True).param(),
    ],
)
def test_a_row_is_the_bare_loop(pools, row):
    parity.check(row, pools.run(row.processes, parity_rank.train, row.job))


@pytest.mark.parametrize(
    "row",
    [
        other_blocks("8 bit, uneven fsdp", 3).param(),
        replace(other_blocks("8 bit, tensor", 2, TENSOR), slow=True).param(),
        replace(other_blocks("8 bit, fsdp x tensor", 4, TENSOR), slow=True).param(),
    ],
)
def test_a_row_with_other_blocks_is_near_the_bare_loop(pools, row):
    parity.check(row, norms_of(row, pools.run(row.processes, parity_rank.train, row.job)))


@pytest.mark.parametrize(("first", "second"), [(2, 3), (1, 2)])
def test_moments_go_on_in_another_layout(pools, tmp_path, first, second):
    for size, num_steps in ((first, 7), (second, STEPS)):
        row = other_blocks("resumed", size)
        answers = pools.run(size, parity_resume.attempt, row.job, str(tmp_path), num_steps)
        assert [answer.kind for answer in answers] == ["done"] * size, answers
    parity.check(row, norms_of(row, answers))


def test_moments_of_other_levels_fail_their_row(pools):
    row = same_blocks("", 1)
    answers = pools.run(1, parity_rank.train, replace(row.job, defect=eight_bit.moments_of_other_levels))
    assert [answer.kind for answer in answers] == ["done"]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        parity.check(row, answers)
