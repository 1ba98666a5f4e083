"""What a constructor says about parameters (hooks, attributes, types) is kept in each layout, or refused by name."""

import pytest
from helpers.parity import hooks as parity_hooks
from helpers.parity import rank as parity_rank
from helpers.parity import table as parity
from helpers.parity.table import Refused, Row

DDP, ZERO2, TENSOR = ("parallel.strategy=ddp",), ("parallel.strategy=zero2",), ("parallel.tensor=2",)
HALVES = ((0, 1, 2), (3, 4, 5))
BF16, HYBRID = ("precision.compute=bf16",), ("parallel.replicate=2",)

TABLE = [
    Row("one process", 1, case=parity_hooks.HOOKED),
    Row("micro batches", 1, ("train.micro_batch_size=2",), parity_hooks.HOOKED),
    Row("ddp", 2, DDP, parity_hooks.HOOKED),
    Row("zero2, micro batches", 2, (*ZERO2, "train.micro_batch_size=1"), parity_hooks.HOOKED),
    Row("fsdp", 2, case=parity_hooks.HOOKED),
    Row("uneven fsdp", 3, case=parity_hooks.HOOKED),
    Row("hsdp, recomputed", 4, (*HYBRID, "train.activation_checkpointing=blocks"), parity_hooks.HOOKED),
    Row("hooks and attributes, tensor", 2, TENSOR, parity_hooks.HOOKED_TEXT),
    Row("hooks and attributes, fsdp x tensor", 4, TENSOR, parity_hooks.HOOKED_TEXT),
    Row("after accumulation", 1, case=parity_hooks.CLAMPED),
    Row("after accumulation, ddp", 2, DDP, parity_hooks.CLAMPED),
    *(
        Row(f"attributes, {size} {layout}", size, layout, parity_hooks.GAINED)
        for size, layout in ((1, ()), (2, DDP), (2, ZERO2), (2, ()))
    ),
    *(
        Row(f"frozen for some steps, {size} {layout}", size, layout, parity_hooks.FREEZES)
        for size, layout in ((1, ()), (2, DDP), (2, ZERO2), (2, ()), (4, HYBRID))
    ),
    Row("a single number, ddp", 2, DDP, parity_hooks.LONELY),
    *(Row(f"recurrent, {layout}", 2, layout, parity_hooks.RECURRENT) for layout in (DDP, ZERO2, ())),
    Row("recurrent, bf16", 2, DDP, parity_hooks.RECURRENT_BF16, parts=HALVES),
    *(Row(f"strided, {size} {layout}", size, layout, parity_hooks.STRIDED) for size, layout in ((1, ()), (2, DDP))),
    Row("a type of its own", 1, case=parity_hooks.TYPED),
    Row("a type of its own, ddp", 2, DDP, parity_hooks.TYPED),
]

REFUSED = [
    Refused("after accumulation, fsdp", 2, (), "model leave.weight: .* not spread .*a hook", parity_hooks.CLAMPED),
    *(
        Refused(f"thawed, {size} {layout}", size, layout, "model layers.0.weight: .* is thawed", parity_hooks.THAWS)
        for size, layout in ((1, ()), (1, BF16), (2, DDP), (2, (*DDP, *BF16)), (2, ZERO2), (2, ()), (2, BF16))
    ),
    *(
        Refused(
            f"thawed in the root, {size} {layout}",
            size,
            (*layout, "model.part=leave"),
            "model leave.weight: .* is thawed",
            parity_hooks.THAWS,
        )
        for size, layout in ((2, ZERO2), (2, ()), (2, BF16))
    ),
    Refused("thawed between steps", 1, BF16, "model leave.bias: .* is thawed", parity_hooks.IN_STEP),
    Refused("thawed between steps, fsdp", 2, (), "model leave.bias: .* is thawed", parity_hooks.IN_STEP),
    Refused("thawed, tensor", 2, TENSOR, "model model.norm.weight: .* is thawed", parity_hooks.THAWS_TEXT),
    Refused("thawed, fsdp x tensor", 4, TENSOR, "model model.norm.weight: .* is thawed", parity_hooks.THAWS_TEXT),
    Refused("a single number, fsdp", 2, (), "model scale: .* without dims", parity_hooks.LONELY),
    *(
        Refused(f"strided, {layout}", 2, layout, "model turned: .* order of memory", parity_hooks.STRIDED)
        for layout in (ZERO2, ())
    ),
    Refused("replaced after a step", 1, (), "after_step: puts another .*'leave.bias'", parity_hooks.REPLACES),
    Refused("replaced after a step, fsdp", 2, (), "after_step: puts another .*'leave.bias'", parity_hooks.REPLACES),
    *(
        Refused(
            f"hooks in forward, {size} {layout}", size, layout, "model enter.weight: a hook", parity_hooks.IN_FORWARD
        )
        for size, layout in ((1, ()), (1, BF16), (2, DDP), (2, (*DDP, *BF16)), (2, ZERO2), (2, ()), (2, BF16))
    ),
    Refused(
        "hooks in forward, of a block",
        2,
        ("model.part=layers.1",),
        "model layers.1.weight: a hook",
        parity_hooks.IN_FORWARD,
    ),
    *(
        Refused(f"hooks between steps, {layout}", 2, layout, "model leave.weight: a hook", case)
        for layout in (DDP, ())
        for case in (parity_hooks.HOOKS_IN_STEP, parity_hooks.LIMITS_IN_STEP)
    ),
    *(
        Refused(
            f"hooks in forward, {size} tensor",
            size,
            TENSOR,
            "model model.norm.weight: a hook",
            parity_hooks.IN_FORWARD_TEXT,
        )
        for size in (2, 4)
    ),
    Refused("sparse gradients", 1, (), "model table: sparse gradients", parity_hooks.SPARSE),
    Refused("a type of its own, zero2", 2, ZERO2, "model scale: .* not spread .*Scaled", parity_hooks.TYPED),
]


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_what_is_said_about_parameters_is_heard(pools, row):
    parity.check_row(pools, row)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_cannot_be_heard_is_refused(pools, row):
    parity.check_refusal(pools, row)


@pytest.mark.parametrize(("size", "layout"), [(1, ()), (2, DDP), (2, ZERO2), (2, ())])
def test_attributes_and_types_are_there_in_bf16_too_and_rows_that_a_hook_freezes_stay(pools, size, layout):
    own_types = [(parity_hooks.TYPED, 0)] if layout == DDP or size == 1 else []
    for case, frozen in ((parity_hooks.GAINED, 0), (parity_hooks.HOOKED, 4), *own_types):
        row = Row("bf16", size, (*layout, *BF16, "optimizer.weight_decay=0"), case)
        answer, *_ = pools.run(size, parity_rank.train, row.job)
        assert answer.kind == "done", answer.value
        moved = answer.value.weights["enter.weight"] != answer.value.first_weights["enter.weight"]
        assert moved[: len(moved) - frozen].all() and not moved[len(moved) - frozen :].any()


@pytest.mark.parametrize(("size", "layout"), [(1, ()), (2, ZERO2), (2, ())])
def test_what_is_frozen_in_a_forward_in_bf16_stays(pools, size, layout):
    answer, *_ = pools.run(size, parity_rank.train, Row("", size, (*layout, *BF16), parity_hooks.AT_ONCE).job)
    before, after = answer.value.first_weights, answer.value.weights
    moves = {name for name in before if (before[name] != after[name]).any()}
    assert moves == {name for name in before if not name.startswith(("enter", "layers.0"))}
