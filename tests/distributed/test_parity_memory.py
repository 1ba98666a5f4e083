"""Everything that saves memory against the bare loop: recomputed and offloaded activations, losses by chunks."""

from dataclasses import replace

import pytest
from helpers import jobs
from helpers.parity import defects, experts, models, pipeline
from helpers.parity import rank as parity_rank
from helpers.parity import table as parity
from helpers.parity.oracle import Case, same_llama, tied_llama
from helpers.parity.table import Refused, Row

from kftrain.parallel.chunked_logits import ChunkedLogits
from kftrain.train import step

SELECTIVE = ("train.activation_checkpointing=selective",)
OFFLOAD = ("train.activation_checkpointing=offload",)
BLOCKS = ("train.activation_checkpointing=blocks",)
SECOND = ("train.checkpointed_blocks=2",)
LISTED = ('train.checkpointed_blocks=["model.layers.1"]',)
EXPERT = ("parallel.expert=2",)
DDP = ("parallel.strategy=ddp",)
TENSOR = ("parallel.tensor=2",)
WHOLE = ("parallel.sequence_parallel=false",)
PIPELINE = ("parallel.pipeline=2", "train.micro_batch_size=2")
CONTEXT = ("parallel.context=2",)
ZERO_BUBBLE = ("parallel.pipeline=2", "parallel.schedule=zbv", "train.micro_batch_size=1", "model.num_layers=4")
SPLIT = ("parallel.pipeline=2", "train.micro_batch_size=1")
ZERO1 = ("parallel.strategy=zero1",)
HYBRID = ("parallel.replicate=2",)
AUTO = ("train.micro_batch_size=auto",)
CHUNKED = ("train.loss_chunk_tokens=5",)
"""Of the 48 tokens of a batch: chunks end within rows, and the last one is smaller."""
ACCUMULATED = ("train.micro_batch_size=1",)
ONE_BY_ONE = tuple((place,) for place in range(6))
TIED = Case("tied", ("model.tie_embeddings=true",), tied_llama)
BF16 = Case("bf16", ("precision.compute=bf16",), same_llama, bf16=True)

ROWS = [
    Row("selective", 1, SELECTIVE),
    Row("offload", 1, OFFLOAD),
    Row("every second block", 1, (*BLOCKS, *SECOND)),
    Row("listed blocks", 1, (*SELECTIVE, *LISTED)),
    Row("fsdp, selective", 2, SELECTIVE),
    Row("fsdp, offload", 2, OFFLOAD),
    Row("fsdp, every second block", 2, (*BLOCKS, *SECOND)),
    Row("ddp, selective", 2, (*DDP, *SELECTIVE)),
    Row("ddp, offload", 2, (*DDP, *OFFLOAD)),
    Row("tensor, selective", 2, (*TENSOR, *SELECTIVE)),
    Row("tensor, selective, whole sequences", 2, (*TENSOR, *WHOLE, *SELECTIVE)),
    Row("tensor, offload", 2, (*TENSOR, *OFFLOAD)),
    Row("dropout, selective", 1, (*SELECTIVE, *ACCUMULATED), pipeline.DROPPED, parts=ONE_BY_ONE),
    Row("pipeline, dropout, selective", 2, (*PIPELINE, *ACCUMULATED, *SELECTIVE), pipeline.DROPPED, parts=ONE_BY_ONE),
    Row("pipeline, dropout, offload", 2, (*PIPELINE, *ACCUMULATED, *OFFLOAD), pipeline.DROPPED, parts=ONE_BY_ONE),
    Row("context, selective", 2, (*CONTEXT, *SELECTIVE)),
    Row("context, offload", 2, (*CONTEXT, *OFFLOAD)),
    Row("pipeline, selective", 2, (*PIPELINE, *SELECTIVE)),
    Row("pipeline, offload", 2, (*PIPELINE, *OFFLOAD)),
    *(
        Row(
            f"{name}, {case.name}, offload",
            2,
            ("parallel.pipeline=2", *ACCUMULATED, f"parallel.schedule={name}", *OFFLOAD),
            case,
        )
        for name in ("interleaved_zero_bubble", "zbv", "dualpipev")
        for case in (Case(), pipeline.STAGED)
    ),
    Row("pipeline, listed blocks", 2, (*PIPELINE, *BLOCKS, *LISTED)),
    Row("auto", 1, AUTO),
    Row("fsdp, auto", 2, AUTO),
    Row("ddp, auto", 2, (*DDP, *AUTO)),
    Row("chunked", 1, CHUNKED),
    Row("chunked, tied", 1, CHUNKED, TIED),
    Row("chunked, bf16", 1, CHUNKED, BF16, 1e-2, 0.02),
    Row("fsdp, chunked", 2, CHUNKED),
    Row("fsdp, chunked, tied", 2, CHUNKED, TIED),
    Row("fsdp, chunked, micro batches", 2, (*CHUNKED, *ACCUMULATED)),
    Row("zero1, chunked, micro batches", 2, (*ZERO1, *CHUNKED, *ACCUMULATED)),
    Row("ddp, chunked", 2, (*DDP, *CHUNKED)),
    Row("hybrid, chunked", 4, (*HYBRID, *CHUNKED), slow=True),
    Row("tensor, chunked", 2, (*TENSOR, *CHUNKED)),
    Row("tensor, chunked, tied", 2, (*TENSOR, *WHOLE, *CHUNKED), TIED),
    Row("fsdp x tensor, chunked", 4, (*TENSOR, *CHUNKED), slow=True),
    Row("context, chunked", 2, (*CONTEXT, *CHUNKED)),
    Row("pipeline, chunked", 2, (*PIPELINE, *CHUNKED)),
    Row("pipeline, chunked, tied", 2, (*PIPELINE, *CHUNKED), TIED),
    Row("fsdp x pipeline, chunked", 4, (*PIPELINE, *CHUNKED), slow=True),
    Row("expert, selective", 2, (*EXPERT, *SELECTIVE), experts.MIXTURE),
    Row("expert, offload", 2, (*EXPERT, *OFFLOAD), experts.MIXTURE),
    Row("expert, chunked", 2, (*EXPERT, *CHUNKED), experts.MIXTURE),
    *(Row(f"{case.name}, selective", 1, SELECTIVE, case) for case in (experts.BALANCED, experts.BIASED)),
    Row("expert, biases, every second block", 2, (*EXPERT, *BLOCKS, *SECOND), experts.BIASED),
]
QUICK = {
    *("selective", "offload", "listed blocks", "fsdp, selective", "ddp, selective", "tensor, selective"),
    *("pipeline, offload", "chunked", "fsdp, chunked", "tensor, chunked", "pipeline, chunked", "expert, chunked"),
    *("zbv, llama, offload", "auto", "fsdp, auto"),
}
TABLE = parity.keep_quick(ROWS, QUICK)


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    parity.check_row(pools, row)


REFUSED = [
    Refused("chunks of a loss of whole logits", 1, CHUNKED, "from whole logits", models.TIED),
    Refused("batch norm that is recomputed in parts", 2, SELECTIVE, "counts its samples twice", models.NORMED),
    Refused("selective with a backward pass in two parts", 2, (*ZERO_BUBBLE, *SELECTIVE), "recomputed blocks would be"),
    Refused("chunks with a backward pass in two parts", 2, (*ZERO_BUBBLE, *CHUNKED), "losses by chunks have one"),
    Refused(
        "a block that there is not", 1, (*BLOCKS, "train.checkpointed_blocks=[7]"), "there is no such block.*0 to 1"
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_offered_is_refused_in_one_line(pools, row):
    parity.check_refusal(pools, row)


def padding_counts():
    """Terms of padding are not left out of sums by chunks."""
    return defects.patched(
        ChunkedLogits, "sum_cross_entropy", lambda logits, targets, _: logits.cross_entropy(targets).sum()
    )


def loss_after_the_forward():
    """The loss is computed when the model's forward has ended, and its matrix may be gone."""
    within = step.compute_within

    def compute_after(model, arguments, finish):
        return finish(within(model, arguments, lambda returned: returned))

    return defects.patched(step, "compute_within", compute_after)


@pytest.mark.parametrize(
    ("defect", "row"),
    [
        (padding_counts, Row("", 1, CHUNKED)),
        (padding_counts, Row("", 2, (*TENSOR, *CHUNKED))),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_is_broken_on_purpose_fails_its_row(pools, defect, row):
    parity.check_defect(pools, row, defect)


def test_a_loss_after_the_forward_finds_no_matrix(pools):
    job = replace(Row("", 2, CHUNKED).job, defect=loss_after_the_forward)
    assert {answer.kind for answer in pools.run(2, parity_rank.train, job)} != {"done"}


def test_metrics_of_evaluations_between_steps_are_those_of_whole_logits(tmp_path):
    lines = []
    for name, chunk in (("whole", 0), ("chunked", 7)):
        settings = ["train.steps=2", "evaluate.interval_steps=2", f"train.loss_chunk_tokens={chunk}"]
        done = jobs.run_worker(*jobs.make_run(tmp_path, settings, name), processes=2)
        assert done.returncode == 0, done.stdout + done.stderr
        lines.append([line for line in done.stdout.splitlines() if "validation/bits_per_byte" in line])
    assert lines[0] == lines[1] and len(lines[0]) == 1
