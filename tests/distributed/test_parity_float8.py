"""Training in float8, emulated on the CPU, against a bare loop over layers that torchao itself has replaced."""

from dataclasses import replace

import pytest

pytest.importorskip("torchao", reason="the extra float8 is not installed")

from helpers.parity import float8, models
from helpers.parity import rank as parity_rank
from helpers.parity import table as parity
from helpers.parity.table import Refused, Row

HALVES = (0, 1, 2), (3, 4, 5)
FP8 = ("precision.compute=float8",)

TABLE = [
    Row("float8", 1, case=float8.FLOAT8, compared_steps=12, weight_tolerance=0.02),
    Row("fsdp, float8", 2, case=float8.FLOAT8, parts=HALVES, compared_steps=6, weight_tolerance=0.05),
]

REFUSED = [
    Refused(f"float8 {name}", 2, layout, "float8 is for one process, or fsdp", float8.FLOAT8)
    for name, layout in {
        "under ddp": ("parallel.strategy=ddp",),
        "under zero1": ("parallel.strategy=zero1",),
        "with tensor": ("parallel.tensor=2",),
        "with context": ("parallel.context=2",),
        "over a pipeline": ("parallel.pipeline=2", "train.micro_batch_size=1"),
    }.items()
]
REFUSED += [
    Refused("float8 for a model of odd sizes", 1, FP8, "no linear layer within .* that 16 divides", models.FROZEN),
    Refused("float8 for a model without blocks", 1, FP8, "no linear layer within", models.WITHOUT_BLOCKS),
]


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    parity.check_row(pools, row)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_offered_is_refused_in_one_line(pools, row):
    parity.check_refusal(pools, row)


def test_products_that_are_not_in_float8_fail_the_row(pools):
    row = replace(TABLE[0], case=float8.BF16)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        parity.check(row, pools.run(1, parity_rank.train, row.job))
