"""The gradient noise scale against a bare loop that makes the gradients of all parts one by one."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.parity import noise
from helpers.parity import rank as parity_rank
from helpers.parity import table as parity
from helpers.parity.defects import patched
from helpers.parity.table import Refused, Row

from kftrain.train import noise_scale

DDP = (*noise.NOISE, "parallel.strategy=ddp")
MICRO = ("train.micro_batch_size=2",)
HALVES = (0, 1, 2), (3, 4, 5)
THIRDS = (0, 1), (2, 3), (4, 5)

TABLE = [
    Row("micro batches", 1, (*noise.NOISE, *MICRO), noise.case_of(1), parts=THIRDS),
    Row("micro batches, bf16", 1, (*noise.NOISE, *MICRO), noise.bf16(1), parts=THIRDS),
    Row("ddp", 2, DDP, noise.case_of(2), parts=HALVES),
    Row("ddp, micro batches", 2, (*DDP, "train.micro_batch_size=1"), noise.case_of(2), parts=HALVES),
    Row("ddp, bf16", 2, DDP, noise.bf16(2), parts=HALVES),
]

REFUSED = [
    Refused("fsdp", 2, noise.NOISE, "takes gradients of parts of a batch"),
    Refused("one micro batch of one process", 1, noise.NOISE, "takes gradients of parts of a batch"),
    Refused("shares that are not equal", 4, DDP, "must have equally many samples"),
    Refused("fp16", 2, (*DDP, "precision.compute=fp16"), "in fp32 or bf16"),
    Refused(
        "growing batches", 2, (*DDP, "train.batch_warmup=[{steps: 2, batch_size: 2}]"), "must have equally many samples"
    ),
]


def check(row, answers):
    parity.check(row, answers)
    trained = answers[0].value
    curve = parity.follow(row, trained)
    mine = [point.get("noise_scale", np.nan) for point in trained.history]
    assert np.isfinite(mine).any()
    np.testing.assert_allclose(mine, curve.noise_scales, rtol=1e-3, err_msg=row.name)


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    check(row, pools.run(row.processes, parity_rank.train, row.job))


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_offered_is_refused_in_one_line(pools, row):
    parity.check_refusal(pools, row)


def no_average():
    """The estimates of single steps are divided."""
    return patched(noise_scale, "DECAY", 0.0)


def test_estimates_that_are_not_averaged_fail_the_row(pools):
    answers = pools.run(1, parity_rank.train, replace(TABLE[0].job, defect=no_average))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(TABLE[0], answers)
