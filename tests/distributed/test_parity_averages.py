"""Averages of the weights in each layout against torch's beside a bare loop; training goes on as without them."""

import re
from dataclasses import replace

import pytest
from helpers.parity import averages
from helpers.parity import rank as parity_rank
from helpers.parity import resume as parity_resume
from helpers.parity import table as parity
from helpers.parity.oracle import STEPS
from helpers.parity.table import Row

DDP = ("parallel.strategy=ddp",)
ZERO1 = ("parallel.strategy=zero1",)
ZERO2 = ("parallel.strategy=zero2", "train.micro_batch_size=1")
TENSOR = ("parallel.tensor=2",)
HYBRID = ("parallel.replicate=2",)
PIPELINE = ("parallel.pipeline=2", "train.micro_batch_size=1")

QUICK = {"averages", "averages, fsdp", "averages, zero1", "averages, fsdp x tensor", "averages, pipeline"}

ROWS = [
    Row("averages", 1, case=averages.SCORED),
    Row("averages, fsdp", 2, case=averages.SCORED),
    Row("averages, ddp", 2, DDP, averages.SCORED),
    Row("averages, zero1", 2, ZERO1, averages.SCORED),
    Row("averages, zero2", 2, ZERO2, averages.SCORED),
    Row("averages, uneven fsdp", 3, case=averages.SCORED),
    Row("averages, hsdp", 4, HYBRID, averages.SCORED),
    Row("averages, tensor", 2, TENSOR, averages.SCORED),
    Row("averages, fsdp x tensor", 4, TENSOR, averages.SCORED),
    Row("averages, context", 2, ("parallel.context=2",), averages.SCORED),
    Row("averages, pipeline", 2, PIPELINE, averages.SCORED),
    *(
        Row(f"{case.name}, {name}", size, layout, case)
        for case in averages.CASES[1:]
        for size, name, layout in ((1, "one process", ()), (2, "fsdp", ()), (2, "ddp", DDP))
    ),
]


TABLE = parity.keep_quick(ROWS, QUICK)
REFUSED: list[parity.Refused] = []


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_the_averages_are_torchs_and_the_weights_are_those_without(pools, row):
    answers = pools.run(row.processes, parity_rank.train, row.job)
    parity.check(row, answers)
    averages.check(row, answers)


LAYOUTS = {
    "one process": (1, ()),
    "fsdp": (2, ()),
    "ddp": (2, DDP),
    "uneven fsdp": (3, ()),
    "tensor": (2, TENSOR),
    "fsdp x tensor": (4, TENSOR),
}
"""Each goes on in the next one."""


@pytest.mark.parametrize(("first", "second"), zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1], strict=True))
def test_averages_go_on_in_another_layout(pools, tmp_path, first, second):
    for name, num_steps in ((first, 7), (second, STEPS)):
        size, overrides = LAYOUTS[name]
        row = Row(f"{first} - {second}", size, overrides, averages.TEXT)
        answers = pools.run(size, parity_resume.attempt, row.job, str(tmp_path), num_steps)
        assert [answer.kind for answer in answers] == ["done"] * size, answers
    parity.check(row, answers)
    averages.check(row, answers)


@pytest.mark.parametrize(
    ("defect", "row", "message"),
    [
        (averages.gathered_weights_stay, Row("", 2, ZERO1, averages.SCORED), "loss"),
        (averages.weights_stay_replaced, Row("", 2, case=averages.SCORED), "loss"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_an_evaluation_that_leaves_averages_behind_fails_its_row(pools, defect, row, message):
    answers = pools.run(row.processes, parity_rank.train, replace(row.job, defect=defect))
    assert [answer.kind for answer in answers] == ["done"] * row.processes
    with pytest.raises(AssertionError, match=re.escape(message)):
        parity.check(row, answers)
