"""Mixtures of experts against a bare loop on one process that runs its experts one by one, row by row."""

from dataclasses import replace

import pytest
from helpers.parity import defects, experts, pipeline
from helpers.parity import oracle as parity_oracle
from helpers.parity import rank as parity_rank
from helpers.parity import table as parity
from helpers.parity.table import Refused, Row

EXPERT = ("parallel.expert=2",)
FOUR = ("parallel.expert=4",)
HYBRID = ("parallel.replicate=2",)
ZERO1 = ("parallel.strategy=zero1",)
PIPELINE = ("parallel.pipeline=2", "train.micro_batch_size=1")
CONTEXT = ("parallel.context=2",)
IN_STAGES = (*PIPELINE, *EXPERT)
ACCUMULATED = ("train.micro_batch_size=1",)
RECOMPUTED = ("train.activation_checkpointing=blocks",)
HALVES = (0, 1, 2), (3, 4, 5)
OPTIMIZERS = (experts.MUON, experts.LAMB, experts.ADAFACTOR)
CASES = (experts.BIASED, experts.BALANCED, experts.CROWDED)

ALL = (0, 1, 2, 3, 4, 5)
ONE_BY_ONE = tuple((place,) for place in ALL)
PAIRS = (0, 3), (1, 4), (2, 5)
"""Rows of two processes that are in their micro batches of the same number."""


def in_bf16(name, processes, layout, parts, parts_of_stacks, case=experts.BF16):
    return Row(
        f"{name}, {case.name}",
        processes,
        layout,
        case,
        parts=parts,
        parts_of_stacks=parts_of_stacks,
    )


QUICK = {
    "experts",
    "expert",
    "expert, recomputed",
    "fsdp x expert",
    "fsdp x expert, six experts, muon",
    "context x expert",
    "expert, experts, bf16",
    "pipeline x expert, auxiliary loss, bf16",
    "expert, biases, groups, shared experts",
    "expert, auxiliary loss",
    "expert, capacity",
    "experts, muon",
    "pipeline, biases, groups, shared experts",
    "pipeline x expert, recomputed",
}
"""Rows that `make test` runs."""

ROWS = [
    Row("experts", 1, case=experts.MIXTURE),
    Row("experts, fsdp", 2, case=experts.MIXTURE),
    Row("expert", 2, EXPERT, experts.MIXTURE),
    Row("expert, micro batches", 2, (*EXPERT, *ACCUMULATED), experts.MIXTURE),
    Row("expert, recomputed", 2, (*EXPERT, *RECOMPUTED), experts.MIXTURE),
    Row("fsdp x expert", 4, EXPERT, experts.MIXTURE),
    Row("expert of four", 4, FOUR, experts.MIXTURE),
    Row("hsdp x expert", 4, (*EXPERT, *HYBRID), experts.MIXTURE),
    *(Row(f"{case.name}", 1, case=case) for case in CASES),
    *(Row(f"expert, {case.name}", 2, EXPERT, case) for case in CASES),
    *(Row(f"fsdp x expert, {case.name}", 4, EXPERT, case) for case in CASES),
    *(Row(f"{case.name}", size, layout, case) for case in OPTIMIZERS for size, layout in ((1, ()), (2, EXPERT))),
    *(Row(f"fsdp x expert, {case.name}", 4, EXPERT, case) for case in OPTIMIZERS),
    *(Row(f"fsdp x expert, {case.name}", 4, EXPERT, case) for case in (experts.SIX, experts.SIX_MUON)),
    Row("expert, zero1", 2, (*EXPERT, "parallel.strategy=zero1"), experts.MIXTURE),
    Row("zero2 x expert, micro batches", 4, (*EXPERT, *ACCUMULATED, "parallel.strategy=zero2"), experts.MIXTURE),
    Row(
        "expert, exchanged each micro batch",
        2,
        (*EXPERT, *ACCUMULATED, "parallel.exchange=micro_batch"),
        experts.MIXTURE,
    ),
    Row("experts, bf16", 1, case=experts.BF16),
    # The rows of an expert that come from several processes are one product, whose gradients are rounded once.
    in_bf16("expert", 2, EXPERT, HALVES, (ALL,)),
    *(
        in_bf16(f"pipeline{name}", size, (*PIPELINE, *more), ONE_BY_ONE, stacks, case)
        for size, name, more, stacks in ((2, "", (), None), (4, " x expert", EXPERT, PAIRS))
        for case in (experts.BF16, experts.BALANCED_BF16)
    ),
    Row("fsdp x expert, recomputed, biases", 4, (*EXPERT, *RECOMPUTED), experts.BIASED),
    Row("context x expert", 4, (*EXPERT, *CONTEXT), experts.BIASED),
    Row("context x expert, muon, recomputed", 4, (*EXPERT, *CONTEXT, *RECOMPUTED), experts.MUON),
    Row("fsdp x context x expert", 8, (*EXPERT, *CONTEXT), experts.SIX_MUON),
    Row("hsdp x expert", 8, (*EXPERT, *HYBRID), experts.EIGHT),
    *(Row(f"pipeline, {case.name}", 2, PIPELINE, case) for case in (experts.MIXTURE, *CASES)),
    Row("pipeline, zbv, biases", 2, (*PIPELINE, "parallel.schedule=zbv"), experts.BIASED),
    *(Row(f"pipeline x expert, {case.name}", 4, IN_STAGES, case) for case in (*CASES, experts.MUON)),
    Row("pipeline x expert, interleaved", 4, (*IN_STAGES, "parallel.schedule=interleaved"), experts.BIASED),
    Row("pipeline x expert, recomputed", 4, (*IN_STAGES, *RECOMPUTED), experts.BIASED),
    *(
        Row(f"zero1 x pipeline x expert, {name}", 4, (*IN_STAGES, *ZERO1, f"parallel.schedule={name}"), case)
        for name, case in (("zbv", experts.EIGHT), ("interleaved_zero_bubble", experts.BIASED))
    ),
    Row("fsdp x pipeline x expert", 8, IN_STAGES, experts.EIGHT),
    Row("fsdp x pipeline x expert, muon, recomputed", 8, (*IN_STAGES, *RECOMPUTED), experts.MUON),
]

TABLE = parity.keep_quick(ROWS, QUICK)


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    parity.check_row(pools, row)


REFUSED = [
    Refused("expert for a model without experts", 2, EXPERT, "does not say where its experts are"),
    Refused("experts that are named by numbers", 2, EXPERT, "expert_plan: is no plan", experts.NUMBERED),
    Refused(
        "experts that have no equal shares", 2, (*EXPERT, "model.num_experts=5"), "no 2 equal parts", experts.MIXTURE
    ),
    Refused("expert x tensor", 4, (*EXPERT, "parallel.tensor=2"), "expert must be 1 with tensor", experts.MIXTURE),
    Refused(
        "tensor for a mixture of experts", 2, ("parallel.tensor=2",), "has no plan of how to split", experts.MIXTURE
    ),
    Refused("ddp x expert", 2, (*EXPERT, "parallel.strategy=ddp"), "expert must be 1 under ddp", experts.MIXTURE),
    *(
        Refused(f"{option} with a softmax", 1, (f"model.{option}={value}",), "use scores: sigmoid", experts.MIXTURE)
        for option, value in (("num_groups", 2), ("num_shared_experts", 1), ("balance_rate", 0.1))
    ),
    Refused("sigmoids without shared experts", 1, ("model.scores=sigmoid",), "Dots1, the layout", experts.MIXTURE),
    Refused("a capacity with context", 2, CONTEXT, "limit is of whole rows", experts.CROWDED),
    Refused("an auxiliary loss with context", 2, CONTEXT, "auxiliary loss is of whole rows", experts.BALANCED),
    Refused("experts of an odd width", 1, ("model.expert_dim=12",), "use 8 or 16", experts.MIXTURE),
]
"""What is refused before the first step, by all processes, in one line."""


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_offered_is_refused_in_one_line(pools, row):
    parity.check_refusal(pools, row)


@pytest.mark.parametrize(
    ("defect", "row"),
    [
        (experts.gradients_of_rows_doubled, Row("", 2, EXPERT, experts.MIXTURE)),
        (defects.norm_of_one_part, Row("", 2, EXPERT, experts.MIXTURE)),
        (defects.gradient_averaged, Row("", 4, EXPERT, experts.MIXTURE)),
        (experts.biases_by_rank, Row("", 2, EXPERT, experts.BIASED)),
        (pipeline.buffers_of_one_stage, Row("", 2, PIPELINE, experts.BIASED)),
        (pipeline.norm_of_one_stage, Row("", 4, IN_STAGES, experts.MIXTURE)),
        (pipeline.received_in_bf16, in_bf16("", 2, PIPELINE, ONE_BY_ONE, None, experts.BALANCED_BF16)),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_an_engine_that_is_broken_on_purpose_fails_its_row(pools, defect, row):
    parity.check_defect(pools, row, defect)


COUNTED = [
    Row("one process, recomputed", 1, RECOMPUTED, experts.BIASED),
    Row("one process, micro batches", 1, ACCUMULATED, experts.CROWDED),
    Row("expert, recomputed", 2, (*EXPERT, *RECOMPUTED, *ACCUMULATED), experts.BIASED),
    Row("uneven shares", 4, EXPERT, experts.CROWDED),
    Row("pipeline, uneven micro batches", 2, (*PIPELINE, "train.micro_batch_size=2"), experts.FIVE),
    Row("pipeline x expert, recomputed", 4, (*IN_STAGES, *RECOMPUTED), experts.BIASED),
]


@pytest.mark.parametrize("row", COUNTED, ids=lambda row: row.name)
def test_each_process_knows_what_the_tokens_of_the_whole_batch_have_chosen_and_none_is_routed_otherwise(pools, row):
    check_counts(row, pools.run(row.processes, experts.train_and_count, row.job))


@pytest.mark.parametrize(
    ("defect", "row"),
    [
        (experts.counted_where_it_is_recomputed, COUNTED[0]),
        (pipeline.buffers_of_the_shapes_pass, COUNTED[4]),
        (pipeline.rows_of_weight_0_counted, COUNTED[4]),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_counts_that_are_taken_of_too_much_are_seen(pools, defect, row):
    answers = pools.run(row.processes, experts.train_and_count, replace(row.job, defect=defect))
    with pytest.raises(AssertionError, match="counts"):
        check_counts(row, answers)


def test_a_bias_that_differs_from_stage_to_stage_is_seen(pools):
    job = replace(Row("", 2, PIPELINE, experts.BIASED).job, defect=experts.biases_by_rank)
    answers = pools.run(2, parity_rank.train, job)
    assert all("e_score_correction_bias differs from process to process" in str(answer.value) for answer in answers)


def check_counts(row, answers):
    experts.COUNTS.clear(), experts.DROPPED.clear()
    parity_oracle.run(row.case, answers[0].value[0].first_weights)
    for answer in answers:
        _, counts, dropped, metrics = answer.value
        assert counts == experts.COUNTS, "counts"
        assert dropped == experts.DROPPED, "dropped"
        last = experts.COUNTS[-1]
        num_choices, largest = sum(map(sum, last)), max(max(layer) * len(layer) / sum(layer) for layer in last)
        assert metrics["experts/largest_load"] == pytest.approx(largest)
        assert metrics["experts/dropped_share"] == pytest.approx(experts.DROPPED[-1] / num_choices)
        loads = [metrics[f"experts/load_{number}"] for number in range(len(last[0]))]
        assert loads == pytest.approx([sum(each) * len(last[0]) / num_choices for each in zip(*last, strict=True)])
    assert row.case is not experts.CROWDED or sum(experts.DROPPED)
