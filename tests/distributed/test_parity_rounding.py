"""Weights that are kept in bf16 alone against a bare loop that rounds by the same coins, row by row."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.parity import rank as parity_rank
from helpers.parity import resume, rounding
from helpers.parity import table as parity
from helpers.parity.oracle import STEPS
from helpers.parity.rounding import ROUNDED
from helpers.parity.table import Refused, Row, Weights

HALVES = (0, 1, 2), (3, 4, 5)
WHOLE = (tuple(range(6)),)
TABLE = [
    Row("weights in bf16", 1, case=ROUNDED, parts=WHOLE, weight_tolerance=0.0),
    Row("fsdp, weights in bf16", 2, case=ROUNDED, parts=HALVES, compared_steps=6, weight_tolerance=0.02),
]
REFUSED = [
    Refused("weights in bf16 in fp32", 1, ("precision.compute=fp32",), "master must be fp32 unless compute", ROUNDED),
    Refused("weights in bf16 under ddp", 2, ("parallel.strategy=ddp",), "one process, or fsdp along shard", ROUNDED),
    Refused("weights in bf16 with tensor", 2, ("parallel.tensor=2",), "one process, or fsdp along shard", ROUNDED),
    Refused("weights in bf16 with sgd", 1, ("optimizer.kind=sgd",), "sgd does not round its updates", ROUNDED),
]


def trained_by(pools, row):
    answers = pools.run(row.processes, parity_rank.train, row.job)
    assert {answer.kind for answer in answers} == {"done"}, answers
    return answers[0].value


def check(row, trained):
    """Against the curve of the bare loop."""
    curve = rounding.loop(row.case, Weights(trained.first_weights), row.parts, row.processes)
    for name, expected in (("loss", curve.losses), ("gradient_norm", curve.norms)):
        mine = [point[name] for point in trained.history][: row.compared_steps]
        np.testing.assert_allclose(mine, expected[: row.compared_steps], rtol=1e-5, err_msg=name)
    for name, expected in curve.weights.items():
        np.testing.assert_allclose(
            trained.weights[name], expected.float().numpy(), rtol=0, atol=row.weight_tolerance, err_msg=name
        )


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    check(row, trained_by(pools, row))


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_offered_is_refused_in_one_line(pools, row):
    parity.check_refusal(pools, row)


def test_coins_that_are_the_same_in_every_step_fail_the_row(pools):
    row = TABLE[0]
    (answer,) = pools.run(1, parity_rank.train, replace(row.job, defect=rounding.same_coins))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(row, answer.value)


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(pools, tmp_path, row):
    whole = trained_by(pools, row)
    for num_steps in (7, STEPS):
        answers = pools.run(row.processes, resume.attempt, row.job, str(tmp_path), num_steps)
        assert {answer.kind for answer in answers} == {"done"}, answers
    stopped = answers[0].value
    for name in ("loss", "gradient_norm"):
        assert [point[name] for point in stopped.history] == [point[name] for point in whole.history]
    for name, expected in whole.weights.items():
        np.testing.assert_array_equal(stopped.weights[name], expected)


def test_a_run_goes_on_in_another_layout_near_the_same_curve(pools, tmp_path):
    for row, num_steps in zip(TABLE, (7, STEPS), strict=True):
        answers = pools.run(row.processes, resume.attempt, row.job, str(tmp_path), num_steps)
        assert {answer.kind for answer in answers} == {"done"}, answers
    last = [history[-1]["loss"] for history in (trained_by(pools, TABLE[0]).history, answers[0].value.history)]
    np.testing.assert_allclose(last[1], last[0], rtol=0.02)
