"""Sequences that several processes share against the bare loop, whose mask is a plain one of places x places."""

import numpy as np
import pytest
from helpers.parity import context, defects, models, optimizers
from helpers.parity import table as parity
from helpers.parity.oracle import Case, same_llama, tied_llama
from helpers.parity.table import Refused, Row
from helpers.parity.vision import IMAGES

CONTEXT = ("parallel.context=2",)
BY_FOUR = ("parallel.context=4",)
HYBRID = (*CONTEXT, "parallel.replicate=2")
TENSOR = (*CONTEXT, "parallel.tensor=2")
WHOLE = "parallel.sequence_parallel=false"
ACCUMULATED = "train.micro_batch_size=2"
RECOMPUTED = "train.activation_checkpointing=blocks"
TIED = Case("tied", ("model.tie_embeddings=true",), tied_llama)
BF16 = Case("bf16", ("precision.compute=bf16",), same_llama, bf16=True)

SIX = "sequence_length: cannot be cut for 2 processes.*use a multiple of 4 such as 8"
FLAWS = {
    "positions of a part": "model places: with its sequences cut the model computes another",
    "mean over places": "with its sequences cut the model computes another",
    "attention elsewhere": "with its sequences cut the model computes another",
    "dropout": "draws random numbers for each place",
    "auxiliary loss": "auxiliary loss is of whole rows",
    "unknown name": "context_plan: names no module",
    "unknown kind": "context_plan: knows no such kind",
    "a list": "model.context_plan: AttributeError",
}
"""Flaw of `helpers.models.context` -> what is said of it."""

QUICK = {
    "context",
    "context, gathered",
    "context, documents",
    "context, documents, gathered",
    "context, tied embeddings",
    "context, micro batches, recomputed",
    "context, zero2, micro batches",
    "context, bf16",
    "context of four, gathered",
    "fsdp x context",
    "muon, context",
    "context x tensor",
    "context, own model",
}
"""Rows that `make test` runs."""

ROWS = [
    Row("documents on one process", 1, case=context.PACKED),
    Row("context", 2, CONTEXT, context.ROWS),
    Row("context, gathered", 2, CONTEXT, context.ONE),
    Row("context, documents", 2, CONTEXT, context.PACKED),
    Row("context, documents, gathered", 2, CONTEXT, context.PACKED_ONE),
    Row("context, tied embeddings", 2, CONTEXT, TIED),
    Row("context, micro batches, recomputed", 2, (*CONTEXT, ACCUMULATED, RECOMPUTED), context.PACKED_ONE),
    Row("context, zero1, micro batches", 2, (*CONTEXT, "parallel.strategy=zero1", ACCUMULATED)),
    Row("context, zero2, micro batches", 2, (*CONTEXT, "parallel.strategy=zero2", ACCUMULATED)),
    Row("context, auto", 2, (*CONTEXT, "parallel.strategy=auto")),
    # Each process rounds the gradients of its own places, where one process rounds those of whole rows.
    Row("context, bf16", 2, CONTEXT, BF16, tolerance=0.01, weight_tolerance=0.05),
    Row("context of four", 4, BY_FOUR, context.FOUR),
    Row("context of four, gathered", 4, BY_FOUR, context.PACKED),
    Row("fsdp x context", 4, CONTEXT, context.ROWS),
    Row("fsdp x context, documents, recomputed", 4, (*CONTEXT, RECOMPUTED), context.PACKED),
    Row("fsdp x context, documents, gathered", 4, (*CONTEXT, ACCUMULATED), context.PACKED_ONE),
    Row("fsdp x context, exchanged", 4, (*CONTEXT, "parallel.exchange=micro_batch", ACCUMULATED)),
    *(Row(f"{case.name}, context", 2, CONTEXT, case) for case in (optimizers.MUON, optimizers.LAMB)),
    Row("muon, fsdp x context", 4, CONTEXT, optimizers.MUON),
    Row("adafactor, fsdp x context", 4, CONTEXT, optimizers.ADAFACTOR),
    Row("groups, fsdp x context", 4, CONTEXT, optimizers.GROUPED),
    Row("replicas x context", 4, HYBRID, context.PACKED),
    Row("context x tensor", 4, TENSOR, context.ROWS),
    Row("context x tensor, whole sequences", 4, (*TENSOR, WHOLE), context.PACKED),
    Row("context x tensor, documents, recomputed", 4, (*TENSOR, RECOMPUTED), context.PACKED),
    Row("context, own model", 2, CONTEXT, context.OWN),
    Row("hsdp x context", 8, HYBRID, context.PACKED_ONE),
    Row("fsdp x context x tensor", 8, TENSOR, context.PACKED),
]

TABLE = parity.keep_quick(ROWS, QUICK)


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    parity.check_row(pools, row)


REFUSED = [
    Refused("context under ddp", 2, (*CONTEXT, "parallel.strategy=ddp"), "context must be 1: ddp"),
    Refused("context with batch norms", 2, CONTEXT, "batch norms and combined buffers", models.NORMED),
    Refused("context with buffers that are combined", 2, CONTEXT, "batch norms and combined buffers", models.AVERAGES),
    Refused("context for images", 2, CONTEXT, "no sequence that could be cut", IMAGES),
    Refused("context for a length that does not divide", 2, (*CONTEXT, "task.sequence_length=6"), SIX, context.SIX),
    Refused("context for heads that do not divide", 4, (*BY_FOUR, "model.num_heads=2"), "4 equal parts", context.OWN),
    Refused("context for a model without a plan", 2, CONTEXT, "does not say where its attention is", context.PLANLESS),
    *(Refused(f"context with {flaw}", 2, CONTEXT, line, context.flawed(flaw)) for flaw, line in FLAWS.items()),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_offered_is_refused_in_one_line(pools, row):
    parity.check_refusal(pools, row)


@pytest.mark.parametrize(
    ("defect", "row"),
    [
        (defects.norm_of_one_part, Row("", 2, CONTEXT, context.ROWS)),
        (defects.norm_of_one_part, Row("", 4, CONTEXT, context.ROWS)),
        (context.positions_of_a_part, Row("", 2, CONTEXT, context.ROWS)),
        (context.positions_of_a_part, Row("", 2, CONTEXT, context.PACKED_ONE)),
        (context.mask_cut_at_chunks, Row("", 2, CONTEXT, context.PACKED_ONE)),
        (context.mask_of_rows, Row("", 2, CONTEXT, context.PACKED_ONE)),
        (context.mask_of_rows, Row("", 2, CONTEXT, context.PACKED)),
        (context.mask_of_other_chunks, Row("", 2, CONTEXT, context.ONE)),
        (context.places_in_the_order_of_processes, Row("", 2, CONTEXT, context.ROWS)),
        (context.places_in_the_order_of_processes, Row("", 2, CONTEXT, context.PACKED_ONE)),
        (context.rows_counted_twice, Row("", 2, CONTEXT, context.ROWS)),
        (context.loss_of_one_part, Row("", 2, CONTEXT, context.ROWS)),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_an_engine_that_is_broken_on_purpose_fails_its_row(pools, defect, row):
    parity.check_defect(pools, row, defect)


@pytest.mark.parametrize("case", [context.ROWS, context.PACKED, context.PACKED_ONE], ids=lambda case: case.name)
@pytest.mark.parametrize("processes", [2, 4])
def test_an_evaluation_measures_each_row_as_one_process_does(pools, processes, case):
    (alone,) = pools.run(1, context.evaluate, Row("", 1, case=case).job)
    shared, *_ = pools.run(processes, context.evaluate, Row("", processes, CONTEXT, case).job)
    assert shared.kind == alone.kind == "done", (shared.value, alone.value)
    for name, values in alone.value.statistics.items():
        np.testing.assert_allclose(shared.value.statistics[name], values, rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(shared.value.clusters, alone.value.clusters)
    assert set(alone.value.clusters) == set(-np.arange(29)) and alone.value.statistics["tokens"].sum() > 100
