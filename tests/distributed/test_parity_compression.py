"""Gradients that travel compressed, against a bare loop of the same formulas."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from helpers.parity import compression
from helpers.parity import rank as parity_rank
from helpers.parity import resume as parity_resume
from helpers.parity import table as parity
from helpers.parity.compression import Stage
from helpers.parity.oracle import STEPS
from helpers.parity.table import Refused, Row

DDP = ("parallel.strategy=ddp",)
ZERO1 = ("parallel.strategy=zero1",)
ZERO2 = ("parallel.strategy=zero2",)


def row(name, case, processes, layout=DDP, **others):
    return Row(name, processes, layout, case, **others)


def sign_row(size):
    """A number whose momentum is 0 but for a rounding has either sign, by the processor. There are 7,200 numbers."""
    made = row(f"sign, ddp, {size}", compression.by_sgd("sign", (Stage(size),)), size)
    return replace(made, tolerance=3e-4, weight_tolerance=2e-3)


ROWS = [
    *(row(f"{kind}, ddp, 2", compression.on(kind, 2), 2) for kind in ("int8", "bf16", "fp16")),
    row("int8, ddp, 4", compression.on("int8", 4), 4),
    row("int8, ddp, small buckets", compression.on("int8", 2, bucket_bytes=4096), 2),
    row("int8, ddp, no feedback", compression.on("int8", 2, feedback=False), 2),
    row("int8, ddp, micro batches", compression.on("int8", 2, micro=1), 2),
    *(row(f"{kind}, fsdp", compression.on(kind, 2, "fsdp"), 2, ()) for kind in ("int8", "bf16")),
    row("int8, zero1", compression.on("int8", 2, "zero1", micro=1), 2, ZERO1),
    row("int8, zero2", compression.on("int8", 2, "zero2", micro=1, exchanged_each=True), 2, ZERO2),
    row("int8, fsdp, no feedback", compression.on("int8", 2, "fsdp", feedback=False), 2, ()),
    # A sum of three that is off by a bit flips a code: one weight of 5,120 is off by 2.1e-5, a norm by 1.001e-5.
    replace(row("int8, uneven fsdp", compression.on("int8", 3, "fsdp"), 3, ()), tolerance=2e-5, weight_tolerance=1e-4),
    row("int8, fsdp, 4", compression.on("int8", 4, "fsdp"), 4, ()),
    *(row(f"topk, ddp, {size}", compression.sparse((Stage(size),)), size) for size in (2, 4)),
    row("topk, ddp, small buckets", compression.sparse((Stage(2),), bucket_bytes=4096), 2),
    row("topk, ddp, warm-up", compression.sparse((Stage(2),), density=0.005, warmup_steps=8, clip=0.0), 2),
    *(sign_row(size) for size in (2, 4)),
    *(row(f"powersgd, ddp, {size}", compression.by_sgd("powersgd", (Stage(size),)), size) for size in (2, 4)),
    row("powersgd, ddp, small buckets", compression.by_sgd("powersgd", (Stage(2),), bucket_bytes=4096), 2),
    row("int8, one process", compression.on("int8", 1), 1),
]

QUICK = {"int8, ddp, 2", "bf16, ddp, 2", "int8, fsdp", "int8, one process", "topk, ddp, 2", "sign, ddp, 2"}
TABLE = parity.keep_quick(ROWS, QUICK | {"powersgd, ddp, 2"})


def slow(*arguments):
    """A long proof, which `make test` leaves out."""
    return pytest.param(*arguments, marks=pytest.mark.slow)


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    parity.check_row(pools, row)


LAYOUTS = {
    "ddp": (2, "ddp", DDP),
    "fsdp": (2, "fsdp", ()),
    "uneven fsdp": (3, "fsdp", ()),
    "three of ddp": (3, "ddp", DDP),
    "one process": (1, "ddp", ()),
}
CHANGES = [
    slow("ddp", "three of ddp"),
    ("ddp", "fsdp"),
    slow("fsdp", "uneven fsdp"),
    slow("uneven fsdp", "ddp"),
    slow("fsdp", "one process"),
]


def go_on(pools, folder, case, first, second, defect=compression.feedback_is_conserved):
    for name, num_steps in ((first, compression.NUM_BEFORE), (second, STEPS)):
        size, _, layout = LAYOUTS[name]
        row = Row(f"{first} - {second}", size, layout, case)
        answers = pools.run(size, parity_resume.attempt, replace(row.job, defect=defect), folder, num_steps)
        assert [answer.kind for answer in answers] == ["done"] * size, answers
    return row, answers


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_feedback_goes_on_in_another_layout(pools, tmp_path, first, second):
    # Of three processes sums are off by a bit, which flips a code of int8 soon, and a rounding to bf16 later.
    kind, flips = ("bf16", {"tolerance": 1e-4, "weight_tolerance": 2e-4}) if "uneven" in first else ("int8", {})
    case = compression.going_on(kind, LAYOUTS[first][:2], LAYOUTS[second][:2])
    row, answers = go_on(pools, str(tmp_path), case, first, second)
    trained = replace(answers[0].value, first_weights=first_weights_of(pools, case))
    parity.compare(replace(row, **flips), trained, case.loop(case, trained.first_weights, None))


@pytest.mark.parametrize("layout", [slow("ddp"), "fsdp"])
@pytest.mark.parametrize("defect", [compression.feedback_dropped, compression.feedback_counted_twice])
def test_feedback_that_a_resume_loses_or_counts_twice_fails_its_row(pools, tmp_path, layout, defect):
    case = compression.going_on("int8", LAYOUTS[layout][:2], LAYOUTS[layout][:2])
    row, answers = go_on(pools, str(tmp_path), case, layout, layout, defect)
    trained = replace(answers[0].value, first_weights=first_weights_of(pools, case))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        parity.compare(row, trained, case.loop(case, trained.first_weights, None))


@pytest.mark.parametrize(
    "make", [compression.sparse, functools.partial(compression.by_sgd, "powersgd")], ids=["topk", "powersgd"]
)
@pytest.mark.parametrize(("first", "second"), [slow(2, 3), slow(3, 1)])
def test_what_was_not_applied_goes_on_on_another_number_of_processes(pools, tmp_path, make, first, second):
    stages = Stage(first, compression.NUM_BEFORE), Stage(second, STEPS - compression.NUM_BEFORE)
    case = make(stages)
    answers = go_on_with(pools, str(tmp_path), case, (first, second), compression.feedback_is_conserved)
    trained = replace(answers[0].value, first_weights=first_weights_of(pools, case))
    parity.compare(Row(f"{first} - {second}", second), trained, case.loop(case, trained.first_weights, None))


def go_on_with(pools, folder, case, sizes, defect):
    for size, num_steps in zip(sizes, (compression.NUM_BEFORE, STEPS), strict=True):
        job = replace(Row("", size, DDP, case).job, defect=defect)
        answers = pools.run(size, parity_resume.attempt, job, folder, num_steps)
        assert [answer.kind for answer in answers] == ["done"] * size, answers
    return answers


FIRST = {}


def first_weights_of(pools, case):
    """Those of a model that nobody has trained."""
    if "weights" not in FIRST:
        (answer,) = pools.run(1, parity_rank.train, Row("", 1, DDP, case).job)
        assert answer.kind == "done", answer.value
        FIRST["weights"] = answer.value.first_weights
    return FIRST["weights"]


@pytest.mark.parametrize(
    "defect",
    [
        slow(compression.compressed_after_clipping),
        slow(compression.scale_of_two_blocks),
        slow(compression.scales_of_another_rank),
    ],
)
def test_an_exchange_that_is_broken_on_purpose_fails_its_row(pools, defect):
    parity.check_defect(pools, row("", compression.on("int8", 2), 2), defect)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("int8", layout) for layout in LAYOUTS),
        *(("bf16", layout) for layout in ("ddp", "fsdp")),
        *((kind, layout) for kind in ("topk", "powersgd") for layout in ("ddp", "three of ddp", "one process")),
    ],
)
def test_what_was_applied_and_what_is_kept_are_all_gradients(pools, kind, layout):
    size, strategy, overrides = LAYOUTS[layout]
    more = () if strategy == "fsdp" else ("parallel.strategy=ddp", "optimizer.kind=sgd")
    more += ("parallel.compression.rank=4",) if kind == "powersgd" else ()
    overrides = (f"parallel.compression.kind={kind}", *overrides, *more)
    for answer in pools.run(size, compression.count_all, overrides, (2, 5)):
        assert answer.kind == "done", answer.value
        sums, left_out = answer.value
        assert left_out == [(2, "rare"), (5, "rare")]
        for name, (applied, kept, brought) in sums.items():
            np.testing.assert_allclose(applied + kept, brought, atol=2e-5, err_msg=name)
            assert size == 1 or kept.abs().max() > 1e-3, "nothing was lost"


@pytest.mark.slow
def test_what_is_sent_with_its_momentum_fails_its_row(pools):
    case = compression.sparse((Stage(2),))
    parity.check_defect(pools, row("", case, 2), compression.momentum_of_what_is_sent)


SKIPPED = (5, 11)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", slow("topk"), slow("powersgd"), slow("sign")])
def test_a_step_that_is_not_finite_on_one_process_is_skipped_by_all_and_leaves_the_feedback(pools, layout):
    size, kind, overrides = LAYOUTS.get(layout, LAYOUTS["ddp"])
    if layout == "topk":
        case = compression.sparse((Stage(size),), skipped=SKIPPED)
    elif layout in ("powersgd", "sign"):
        case = compression.by_sgd(layout, (Stage(size),), skipped=SKIPPED)
    else:
        case = compression.on("int8", size, kind, skipped=SKIPPED)
    job = replace(Row("", size, overrides, case).job, defect=functools.partial(compression.not_finite, SKIPPED, 1))
    answers = pools.run(size, parity_rank.train, job)
    assert [answer.kind for answer in answers] == ["done"] * size, answers
    trained = answers[0].value
    curve = case.loop(case, trained.first_weights, None)
    found = [point.get("gradient_norm", np.inf) for point in trained.history]
    np.testing.assert_allclose(found, curve.norms, rtol=1e-5)
    assert [step for step, norm in enumerate(found) if not np.isfinite(norm)] == list(SKIPPED)
    for name, value in curve.weights.items():
        np.testing.assert_allclose(trained.weights[name], value.numpy(), rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("overrides", "count"), [((), 1), (("parallel.bucket_bytes=8192",), 2)])
def test_gradients_that_are_not_compressed_travel_in_buckets_of_the_configured_size(pools, overrides, count):
    for answer in pools.run(2, compression.count_buckets, overrides):
        assert (answer.kind, answer.value) == ("done", count)


TOPK = "parallel.compression.kind=topk"
INT8 = ("parallel.compression.kind=int8",)

POWERSGD = "parallel.compression.kind=powersgd"

REFUSED = [
    Refused("compression with tensor", 2, (*INT8, "parallel.tensor=2"), "compression.kind must be none with tensor"),
    Refused("compression with context", 2, (*INT8, "parallel.context=2"), "compression.kind must be none with context"),
    Refused("compression of copies that shard", 4, (*INT8, "parallel.replicate=2"), "replicate must be 1 with comp"),
    Refused("topk under fsdp", 2, (TOPK, "optimizer.kind=sgd"), "strategy must be ddp with compression.kind topk"),
    Refused("sign under zero1", 2, ("parallel.compression.kind=sign", *ZERO1), "strategy must be ddp with comp"),
    Refused(
        "powersgd under zero1", 2, ("parallel.compression.kind=powersgd", *ZERO1), "strategy must be ddp with comp"
    ),
    Refused("powersgd that forgets", 2, (POWERSGD, "parallel.compression.feedback=false", *DDP), "must be true with p"),
    Refused("rank of another kind", 2, (*INT8, "parallel.compression.rank=4"), "rank is of kind powersgd, not of int8"),
    Refused("compression with pipeline", 2, (*INT8, "parallel.pipeline=2"), "kind must be none with pipeline"),
    Refused("compression with expert", 2, (*INT8, "parallel.expert=2"), "kind must be none with expert"),
    Refused("compression with offload", 2, (*INT8, "parallel.offload=true"), "offload must be false with compression"),
    Refused("topk with AdamW", 2, (TOPK, *DDP), "optimizer.kind must be sgd"),
    Refused("sign with AdamW", 2, ("parallel.compression.kind=sign", *DDP), "optimizer.kind must be sgd"),
    Refused("compression in fp16", 2, (*INT8, "precision.compute=fp16"), "must not be fp16 with parallel.compression"),
    Refused("compression of sums in bf16", 2, (*INT8, "precision.compute=bf16", "precision.reduce=bf16"), "be fp32"),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_compressed_is_refused_in_one_line(pools, row):
    parity.check_refusal(pools, row)
