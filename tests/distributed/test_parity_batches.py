"""Batches that grow, and learning rates scaled with them, against the bare loop; a resume begins at the same sample."""

from dataclasses import replace

import pytest
from helpers.parity import batches, models
from helpers.parity import resume as parity_resume
from helpers.parity import table as parity
from helpers.parity.oracle import STEPS
from helpers.parity.table import Refused, Row

DDP = ("parallel.strategy=ddp",)
MICRO = ("train.micro_batch_size=1",)
ZERO2 = ("parallel.strategy=zero2", *MICRO)
TENSOR = ("parallel.tensor=2",)

ROWS = [
    *(Row(case.name, 1, case=case) for case in batches.CASES),
    Row("linear rate, fsdp", 2, case=batches.LINEAR),
    Row("growing batches, micro batches", 1, MICRO, batches.GROWN_LINEAR),
    Row("growing batches, fsdp", 2, case=batches.GROWN_LINEAR),
    Row("growing batches, fsdp, micro batches", 2, MICRO, batches.GROWN_LINEAR),
    Row("growing batches, zero2", 2, ZERO2, batches.GROWN),
    Row("growing batches, ddp", 2, DDP, batches.GROWN_ROOT),
    Row("growing batches, fsdp x tensor", 4, TENSOR, batches.GROWN_LINEAR),
    Row("growing batches, context", 2, ("parallel.context=2",), batches.GROWN_LINEAR),
]
QUICK = {
    "square root rate",
    "growing batches with a linear rate",
    "growing batches, fsdp, micro batches",
    "linear rate",
}
QUICK |= {"growing batches, ddp"}


TABLE = parity.keep_quick(ROWS, QUICK)


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    parity.check_row(pools, row)


def resumed(pools, folder, first, second, at, case, defect=None):
    """The answers of a run that stops after some steps in a layout, and goes on in another one."""
    answers = []
    for (size, layout), num_steps in ((first, at), (second, STEPS)):
        job = Row("", size, layout, case).job
        job = job if defect is None else replace(job, defect=defect)
        answers = pools.run(size, parity_resume.attempt, job, str(folder), num_steps)
        assert [answer.kind for answer in answers] == ["done"] * size, answers
    return answers


@pytest.mark.parametrize(
    ("first", "second", "at"),
    [((1, ()), (2, ()), 2), ((2, ()), (1, MICRO), 6), pytest.param((2, DDP), (2, MICRO), 9, marks=pytest.mark.slow)],
)
def test_a_resume_begins_at_the_same_sample_in_any_layout(pools, tmp_path, first, second, at):
    answers = resumed(pools, tmp_path, first, second, at, batches.GROWN_LINEAR)
    parity.check(Row("resumed", *second, batches.GROWN_LINEAR), answers)


@pytest.mark.parametrize(
    ("case", "defect", "message"),
    [
        (batches.LINEAR, batches.rate_scaled_twice_on_resume, "loss"),
        (batches.GROWN, batches.positions_of_equal_steps, "loss"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_resume_that_is_broken_on_purpose_fails(pools, tmp_path, case, defect, message):
    answers = resumed(pools, tmp_path, (1, ()), (1, ()), 6, case, defect)
    with pytest.raises(AssertionError, match=message):
        parity.check(Row("resumed", 1, case=case), answers)


REFUSED = [
    Refused("growing batches with batch norms", 2, batches.GROWING, "batch norms take all samples", models.NORMED),
    Refused("a first batch smaller than the processes", 3, batches.GROWING, "3 processes cannot share"),
    Refused(
        "growing batches with stages",
        2,
        (*batches.GROWING, "parallel.pipeline=2", *MICRO),
        "batch_warmup must be empty with parallel.pipeline",
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_offered_is_refused_in_one_line(pools, row):
    parity.check_refusal(pools, row)
