"""Averages of the weights in each layout against torch's beside a bare loop; training goes on as without them."""

import re
from dataclasses import dataclass, replace

import pytest
from helpers.parity import averages, precision
from helpers.parity import rank as parity_rank
from helpers.parity import resume as parity_resume
from helpers.parity import table as parity
from helpers.parity.oracle import STEPS
from helpers.parity.table import Row
from helpers.pool import Pools

DDP = ("parallel.strategy=ddp",)
ZERO1 = ("parallel.strategy=zero1",)
ZERO2 = ("parallel.strategy=zero2", "train.micro_batch_size=1")
TENSOR = ("parallel.tensor=2",)
HYBRID = ("parallel.replicate=2",)
HALVES = (0, 1, 2), (3, 4, 5)
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
    *(Row(f"{case.name}, pipeline", 2, PIPELINE, case) for case in averages.STAGED),
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


@pytest.mark.parametrize("case", averages.STAGED, ids=lambda case: case.name)
def test_averages_go_on_where_a_stage_has_none(pools, tmp_path, case):
    check_resume(pools, tmp_path, Row("", 2, PIPELINE, case))


def check_resume(pools, folder, row):
    """Stops after seven steps and goes on in the same layout."""
    for num_steps in (7, STEPS):
        answers = pools.run(row.processes, parity_resume.attempt, row.job, str(folder), num_steps)
        assert [answer.kind for answer in answers] == ["done"] * row.processes, answers
    averages.check(row, answers)


def test_a_frozen_stage_that_does_not_count_steps_is_seen(pools, tmp_path):
    frozen_end = Row("", 2, PIPELINE, averages.STAGED[1])  # whose process writes the count into checkpoints
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_resume(Defective(pools, averages.counts_of_frozen_stages_stand_still), tmp_path, frozen_end)


@dataclass(frozen=True)
class Defective:
    """Pools whose jobs are broken on purpose."""

    pools: Pools
    defect: object

    def run(self, size, function, job, *arguments):
        return self.pools.run(size, function, replace(job, defect=self.defect), *arguments)


@pytest.mark.parametrize(
    "row",
    [
        Row("one process", 1, case=averages.FP16).param(),
        Row("fsdp", 2, (), averages.FP16, weight_tolerance=0.02, parts=HALVES, compared_steps=5).param(),
    ],
)
def test_averages_in_fp16_leave_out_skipped_steps(pools, row):
    row = replace(
        row, parts=tuple(tuple(range(first, first + 6 // row.processes)) for first in range(0, 6, 6 // row.processes))
    )
    answers = pools.run(row.processes, precision.train, row.job)
    precision.check(row, answers)
    averages.check(row, [replace(answer, value=answer.value and answer.value[0]) for answer in answers])


@pytest.mark.parametrize(
    "row",
    [
        Row(
            "averages of weights in bf16", 1, case=averages.ROUNDED, parts=(tuple(range(6)),), weight_tolerance=0.0
        ).param(),
        Row(
            "averages of weights in bf16, fsdp",
            2,
            case=averages.ROUNDED,
            parts=((0, 1, 2), (3, 4, 5)),
            weight_tolerance=0.02,
        ).param(),
    ],
)
def test_weights_in_bf16_are_averaged_in_fp32(pools, row):
    answers = pools.run(row.processes, parity_rank.train, row.job)
    assert {answer.kind for answer in answers} == {"done"}, answers
    averages.check_rounded(row, answers[0].value)


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
