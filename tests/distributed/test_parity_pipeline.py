"""Models that are cut into stages against the bare loop, row by row, in each of torch's schedules."""

from dataclasses import replace

import pytest
from helpers.parity import hooks, models, optimizers, pipeline
from helpers.parity import rank as parity_rank
from helpers.parity import table as parity
from helpers.parity.oracle import Case, same_llama, tied_llama
from helpers.parity.table import Refused, Row
from helpers.parity.vision import IMAGES

TIED = Case("tied", ("model.tie_embeddings=true",), tied_llama)
BF16 = Case("bf16", ("precision.compute=bf16",), same_llama, bf16=True)
ONE_BY_ONE = tuple((place,) for place in range(6))

PIPELINE = ("parallel.pipeline=2", "train.micro_batch_size=1")
THREE = ("parallel.pipeline=3", "train.micro_batch_size=1")
SCHEDULES = {
    name: (*PIPELINE, f"parallel.schedule={name}")
    for name in ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")
}
ZBV, INTERLEAVED = SCHEDULES["zbv"], SCHEDULES["interleaved"]
TENSOR = ("parallel.tensor=2",)
HYBRID = ("parallel.replicate=2",)
DDP = ("parallel.strategy=ddp",)
ZERO1 = ("parallel.strategy=zero1",)
RECOMPUTED = ("train.activation_checkpointing=blocks",)

QUICK = {
    "pipeline, gpipe",
    "pipeline, 1f1b",
    "pipeline, interleaved",
    "pipeline, interleaved_zero_bubble",
    "pipeline, zbv",
    "pipeline, dualpipev",
    "pipeline, 1f1b, own pieces",
    "pipeline, zbv, two tensors",
    "pipeline, interleaved, tied",
    "pipeline, zbv, tied",
    "zbv, dropout",
    "1f1b, dropout",
    "one process, dropout",
    "three stages, tied",
    "uneven last micro batch",
    "pipeline, bf16",
    "pipeline, muon",
    "pipeline, adafactor",
    "pipeline, hooks and attributes",
    "zbv, own tallies",
    "fsdp x pipeline",
    "tensor x pipeline",
    "zero1 x pipeline, zbv",
}
"""Rows that `make test` runs."""

ROWS = [
    *(Row(f"pipeline, {name}", 2, layout) for name, layout in SCHEDULES.items()),
    *(Row(f"pipeline, {name}, own pieces", 2, layout, pipeline.STAGED) for name, layout in SCHEDULES.items()),
    *(Row(f"pipeline, {name}, two tensors", 2, SCHEDULES[name], pipeline.PAIRS) for name in ("1f1b", "zbv")),
    *(Row(f"pipeline, {name}, tied", 2, SCHEDULES[name], TIED) for name in ("1f1b", "interleaved", "zbv")),
    *(
        Row(f"{name}, dropout", size, layout, pipeline.DROPPED, parts=ONE_BY_ONE)
        for size, name, layout in (
            (1, "one process", ("train.micro_batch_size=1",)),
            (1, "one process, recomputed", ("train.micro_batch_size=1", *RECOMPUTED)),
            *((2, name, SCHEDULES[name]) for name in ("1f1b", "interleaved", "zbv")),
            (2, "1f1b, recomputed", (*PIPELINE, *RECOMPUTED)),
        )
    ),
    *(
        Row(f"pipeline, {case.name}, {name}", 2, SCHEDULES[name], case)
        for case in (pipeline.FROZEN_START, pipeline.FROZEN_END)
        for name in ("1f1b", "interleaved")
    ),
    Row("pipeline, frozen end, zbv", 2, ZBV, pipeline.FROZEN_END),
    Row("fsdp x pipeline, frozen start", 4, PIPELINE, pipeline.FROZEN_START),
    Row("fsdp x pipeline, frozen end", 4, PIPELINE, pipeline.FROZEN_END),
    Row("pipeline, hooks and attributes", 2, PIPELINE, hooks.HOOKED_TEXT),
    Row("fsdp x pipeline, hooks and attributes", 4, PIPELINE, hooks.HOOKED_TEXT),
    Row("three stages of unequal cost", 3, THREE, pipeline.STAGED),
    Row("three stages, tied", 3, THREE, TIED),
    Row("three stages, tied by two names", 3, THREE, pipeline.TIED_ENDS),
    Row("uneven last micro batch", 2, ("parallel.pipeline=2", "train.micro_batch_size=4")),
    Row(
        "uneven micro batches, three stages",
        3,
        ("parallel.pipeline=3", "train.micro_batch_size=2"),
        pipeline.EIGHT,
    ),
    Row("pipeline, bf16", 2, PIPELINE, BF16, parts=ONE_BY_ONE),
    Row("pipeline, recomputed", 2, PIPELINE + RECOMPUTED),
    Row("pipeline, images", 2, PIPELINE, IMAGES),
    *(Row(f"{name}, own tallies", 2, SCHEDULES[name], pipeline.TALLYING) for name in ("1f1b", "zbv")),
    Row("fsdp x pipeline, own tallies", 4, PIPELINE, pipeline.TALLYING),
    *(Row(f"pipeline, {case.name}", 2, PIPELINE, case) for case in optimizers.CASES),
    Row("fsdp x pipeline", 4, PIPELINE),
    Row("fsdp x pipeline, interleaved", 4, INTERLEAVED),
    Row("fsdp x pipeline, tied", 4, PIPELINE, TIED),
    Row("fsdp x pipeline, tied by two names", 4, PIPELINE, pipeline.TIED_ENDS),
    Row("fsdp x pipeline, recomputed", 4, PIPELINE + RECOMPUTED),
    Row("fsdp x pipeline, muon", 4, PIPELINE, optimizers.MUON),
    Row("zero1 x pipeline", 4, PIPELINE + ZERO1),
    Row("zero1 x pipeline, zbv", 4, ZBV + ZERO1, pipeline.EIGHT),
    Row("zero1 x pipeline, dualpipev", 4, SCHEDULES["dualpipev"] + ZERO1, pipeline.EIGHT),
    Row("zero1 x pipeline, zero bubble", 4, SCHEDULES["interleaved_zero_bubble"] + ZERO1, pipeline.EIGHT),
    Row("ddp x pipeline", 4, PIPELINE + DDP),
    Row("ddp x pipeline, zbv", 4, ZBV + DDP, pipeline.EIGHT),
    Row("replicas x pipeline", 4, PIPELINE + HYBRID),
    Row("tensor x pipeline", 4, PIPELINE + TENSOR),
    Row("tensor x pipeline, tied, interleaved", 4, INTERLEAVED + TENSOR, TIED),
    Row("tensor x pipeline, images", 4, PIPELINE + TENSOR, IMAGES),
    Row("hsdp x pipeline", 8, PIPELINE + HYBRID, pipeline.EIGHT),
    Row("fsdp x tensor x pipeline", 8, PIPELINE + TENSOR),
    Row("fsdp x pipeline of three, tied", 6, THREE, TIED),
]

TABLE = parity.keep_quick(ROWS, QUICK)
"""Add a row here; its model, if it needs one, stands in `helpers.parity.pipeline`."""

REFUSED = [
    Refused("pipeline for a model without pieces", 2, PIPELINE, "has no pieces", models.FROZEN),
    Refused("pieces that leave a parameter out", 2, PIPELINE, "belongs to no piece", pipeline.LEAVES_OUT),
    Refused("pieces that are not the forward", 2, PIPELINE, "do not compute what forward does", pipeline.OTHER_PIECES),
    Refused("stages that are no pieces", 2, PIPELINE, "does not return pieces of the model", pipeline.NO_PIECES),
    Refused("pieces with names of modules", 2, PIPELINE, "does not return pieces of the model", pipeline.NAMED_PARTS),
    Refused("pieces that return no tensors", 2, PIPELINE, "returns what cannot travel", pipeline.UNTENSORED),
    Refused("more stages than pieces", 4, (*INTERLEAVED, "parallel.pipeline=4"), "too few for 8 stages"),
    Refused("fewer micro batches than stages", 3, ("parallel.pipeline=3", "train.micro_batch_size=3"), "at least 3"),
    Refused("fewer than two of them for each of a V", 2, (*ZBV, "train.micro_batch_size=2"), "at least 4 micro"),
    Refused(
        "interleaved rounds that are not equal",
        2,
        (*INTERLEAVED, "train.global_batch_size=5"),
        "has equal rounds.*there are 6, 8",
    ),
    Refused("batch norm over a pipeline", 2, PIPELINE, "running_mean: .* changes a buffer", pipeline.NORMED),
    Refused("a buffer that a stage changes", 2, PIPELINE, "changes a buffer", pipeline.COUNTING),
    Refused("a buffer of stages that is no sum", 2, PIPELINE, "tallies: .* no sum", pipeline.LARGEST),
    Refused("a buffer that no stage changes", 2, PIPELINE, "tallies: .*do not add to a buffer", pipeline.IN_FORWARD),
    Refused("a buffer that each stage changes", 2, PIPELINE, "tallies: .*do not add to a buffer", pipeline.OF_INPUTS),
    Refused("after_step that uses parameters of stages", 2, PIPELINE, "after_step uses param", pipeline.STEPPING),
    Refused("recomputing with a backward pass in two parts", 2, ZBV + RECOMPUTED, "recomputed blocks would be"),
    Refused("bf16 with a backward pass in two parts", 2, ZBV, "adds up the gradients of weights in bf16", BF16),
    Refused("a frozen first stage with a backward pass in two parts", 2, ZBV, "stage is frozen", pipeline.FROZEN_START),
    Refused("fsdp with a backward pass in two parts", 4, ZBV, "fsdp frees parameters", pipeline.EIGHT),
    Refused(
        "tied ends of a V that is sharded",
        4,
        ZBV + ZERO1,
        "have a parameter in common",
        replace(pipeline.EIGHT, name="tied eight", overrides=(*pipeline.EIGHT.overrides, *TIED.overrides)),
    ),
    Refused("zero2 over a pipeline", 2, (*PIPELINE, "parallel.strategy=zero2"), "gradients travel once a step"),
    Refused("auto over a pipeline", 2, (*PIPELINE, "parallel.strategy=auto"), "auto, which weighs whole models"),
    Refused("offload over a pipeline", 2, (*PIPELINE, "parallel.offload=true"), "no schedule waits"),
]


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_pipeline_is_the_bare_loop(pools, row):
    parity.check_row(pools, row)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_a_pipeline_cannot_do_is_refused_in_one_line(pools, row):
    parity.check_refusal(pools, row)


@pytest.mark.parametrize(
    ("defect", "row"),
    [
        (pipeline.wrong_micro_batch, Row("", 2, PIPELINE)),
        (pipeline.wrong_micro_batch, Row("", 2, ZBV)),
        (pipeline.tied_gradient_counted_twice, Row("", 2, PIPELINE, TIED)),
        (pipeline.tied_gradient_in_the_norm_twice, Row("", 2, PIPELINE, TIED)),
        (pipeline.norm_of_one_stage, Row("", 2, PIPELINE)),
        (pipeline.buffers_of_one_stage, Row("", 2, PIPELINE, pipeline.TALLYING)),
        (pipeline.draws_in_order, Row("", 2, PIPELINE, pipeline.DROPPED, parts=ONE_BY_ONE)),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_pipeline_that_is_broken_on_purpose_fails_its_row(pools, defect, row):
    parity.check_defect(pools, row, defect)


def test_tied_ends_whose_gradients_are_not_summed_do_not_stay_equal(pools):
    row = Row("", 2, PIPELINE, TIED)
    job = replace(row.job, defect=pipeline.tied_gradient_not_summed)
    answers = pools.run(2, parity_rank.train, job)
    assert all("embed_tokens.weight differs from process to process" in str(answer.value) for answer in answers)
