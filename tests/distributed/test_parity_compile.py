"""Blocks that torch compiles against the bare loop, which computes in eager torch."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from helpers.parity import batches, compiled, context, models, pipeline, precision
from helpers.parity import rank as parity_rank
from helpers.parity import table as parity
from helpers.parity.oracle import BASE, Case, same_llama
from helpers.parity.table import Refused, Row

from kftrain import config
from kftrain.errors import ConfigError
from kftrain.train.spmd_factory import require_graphs

COMPILED = ("train.compile=true",)
DDP, ZERO1, ZERO2 = ((f"parallel.strategy={name}", *COMPILED) for name in ("ddp", "zero1", "zero2"))
HYBRID = ("parallel.replicate=2", *COMPILED)
MICRO = ("train.micro_batch_size=1",)
HALVES = (0, 1, 2), (3, 4, 5)
ONE_BY_ONE = tuple((place,) for place in range(6))
BLOCKS, SELECTIVE, OFFLOAD = (
    (f"train.activation_checkpointing={name}",) for name in ("blocks", "selective", "offload")
)
BF16 = Case("bf16", ("precision.compute=bf16",), same_llama, bf16=True)
FP16 = precision.fp16()
LOOSE = {"tolerance": 1e-2, "weight_tolerance": 0.05, "compared_steps": 8}
"""In half precision fused operations round less often: 1 % over 8 steps in fp16, over 5 in bf16."""

TRACED = [
    Row("fsdp, traced, recomputed, micro batches", 2, (*COMPILED, *BLOCKS, *MICRO)),
    Row("ddp, traced, documents", 2, DDP, context.PACKED),
    Row("traced, evaluated", 1, (*COMPILED, "evaluate.interval_steps=4", "evaluate.batch_size=5")),
]

TABLE = [
    Row("compiled", 1, COMPILED),
    Row("ddp, compiled", 2, DDP),
    Row("fsdp, compiled", 2, COMPILED),
    Row("zero1, compiled, micro batches", 2, (*ZERO1, *MICRO)),
    Row("zero2, compiled, micro batches", 2, (*ZERO2, *MICRO)),
    Row("hybrid, compiled", 4, HYBRID),
    Row("compiled, recomputed", 1, (*COMPILED, *BLOCKS)),
    Row("compiled, selective", 1, (*COMPILED, *SELECTIVE)),
    Row("compiled, offload", 1, (*COMPILED, *OFFLOAD)),
    Row("ddp, compiled, recomputed", 2, (*DDP, *BLOCKS)),
    Row("ddp, compiled, selective", 2, (*DDP, *SELECTIVE)),
    Row("ddp, compiled, offload", 2, (*DDP, *OFFLOAD)),
    Row("fsdp, compiled, recomputed", 2, (*COMPILED, *BLOCKS)),
    Row("fsdp, compiled, selective", 2, (*COMPILED, *SELECTIVE)),
    Row("fsdp, compiled, offload", 2, (*COMPILED, *OFFLOAD)),
    Row("compiled, every second block", 1, (*COMPILED, *BLOCKS, "train.checkpointed_blocks=2")),
    Row("compiled, chunked", 1, (*COMPILED, "train.loss_chunk_tokens=5")),
    Row("fsdp, compiled, chunked", 2, (*COMPILED, "train.loss_chunk_tokens=5")),
    Row("compiled, dropout", 1, (*COMPILED, *MICRO), pipeline.DROPPED, parts=ONE_BY_ONE),
    Row("compiled, dropout, recomputed", 1, (*COMPILED, *MICRO, *BLOCKS), pipeline.DROPPED, parts=ONE_BY_ONE),
    Row("compiled, dropout, selective", 1, (*COMPILED, *MICRO, *SELECTIVE), pipeline.DROPPED, parts=ONE_BY_ONE),
    Row("compiled, documents", 1, COMPILED, context.PACKED),
    Row("compiled, documents, offload", 1, (*COMPILED, *OFFLOAD), context.PACKED),
    Row("fsdp, compiled, documents", 2, COMPILED, context.PACKED),
    Row("compiled, growing batches", 1, COMPILED, batches.GROWN),
    Row("compiled, blocks of torch's own", 1, COMPILED, models.TIED),
    Row("fsdp, compiled, a frozen block", 2, COMPILED, models.FROZEN),
    Row("compiled, bf16", 1, COMPILED, BF16, **LOOSE),
    Row("ddp, compiled, bf16", 2, DDP, BF16, parts=HALVES, **LOOSE),
    Row("fsdp, compiled, bf16", 2, COMPILED, BF16, parts=HALVES, **LOOSE),
    Row("compiled, fp16", 1, COMPILED, FP16, **LOOSE),
    Row("fsdp, compiled, fp16", 2, COMPILED, FP16, parts=HALVES, **LOOSE),
]


@pytest.mark.parametrize("row", [row.param() for row in TRACED])
def test_a_row_that_is_traced_is_the_bare_loop(pools, row):
    parity.check(row, pools.run(row.processes, parity_rank.train, replace(row.job, defect=compiled.traced)))


@pytest.mark.slow
@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    if not compiled.has_compiler():
        pytest.skip("torch finds no C++ compiler here")
    counted = compiled.counted_in_pieces if "documents" in row.name else compiled.counted
    parity.check(row, pools.run(row.processes, parity_rank.train, replace(row.job, defect=counted)))


GRAPHED = (*COMPILED, "train.cuda_graphs=true")
WATCHED = ("evaluate.interval_steps=2", "evaluate.batch_size=6")


def test_a_row_whose_blocks_repeat_graphs_is_the_bare_loop(pools):
    row = Row("graphs, traced, evaluated", 1, (*GRAPHED, *WATCHED))
    parity.check(row, pools.run(1, parity_rank.train, replace(row.job, defect=compiled.graphed)))


@pytest.mark.slow
def test_a_row_whose_blocks_are_compiled_for_graphs_is_the_bare_loop(pools):
    if not compiled.has_compiler():
        pytest.skip("torch finds no C++ compiler here")
    row = Row("graphs, evaluated", 1, (*GRAPHED, *WATCHED))
    parity.check(row, pools.run(1, parity_rank.train, replace(row.job, defect=compiled.graphed_by_code)))


REFUSED = [
    Refused("a model without blocks", 1, COMPILED, "no blocks to compile", models.WITHOUT_BLOCKS),
    *(
        Refused(name, 1, (*COMPILED, *layout), f"train.compile must be false with {name}")
        for name, layout in {
            "parallel.context": ("parallel.context=2",),
            "parallel.tensor": ("parallel.tensor=2",),
            "parallel.pipeline": ("parallel.pipeline=2", *MICRO),
            "parallel.expert": ("parallel.expert=2",),
            "model.kind: mixture_of_experts": ("model.kind=mixture_of_experts",),
            "parallel.offload": ("parallel.offload=true",),
            "precision.compute: float8": ("precision.compute=float8",),
            "precision.master: bf16": ("precision.compute=bf16", "precision.master=bf16"),
            "train.activation_checkpointing": (*context.DOCUMENTS, *SELECTIVE),
        }.items()
    ),
    Refused("CUDA graphs without a GPU", 1, GRAPHED, "train.cuda_graphs: torch has no GPU here"),
    Refused("CUDA graphs of what is not compiled", 1, GRAPHED[1:], "cuda_graphs is of compiled blocks"),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_offered_is_refused_in_one_line(pools, row):
    for answer in pools.run(row.processes, parity_rank.train, replace(row.job, defect=compiled.without_code)):
        assert answer.kind == "refused", answer
        assert re.search(row.message, answer.value) and "\n" not in answer.value


@dataclass(frozen=True)
class Gpus:
    """As many processes, each with a GPU that nobody asks for anything."""

    size: int = 1
    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("override", "size", "reason"),
    [
        ((), 2, "they are for one process"),
        (("train.micro_batch_size=1",), 1, "gradients of several micro batches would be overwritten"),
        (("train.batch_warmup=[{steps: 1, batch_size: 2}]",), 1, "batches that grow"),
        (("train.activation_checkpointing=offload",), 1, "blocks that keep less"),
        (("train.activation_checkpointing=blocks",), 1, "blocks that keep less"),
    ],
)
def test_what_a_graph_cannot_repeat_is_refused_on_a_gpu(override, size, reason):
    train = config.parse(BASE, (*GRAPHED, *override)).train
    with pytest.raises(ConfigError, match=rf"^train.cuda_graphs: {reason}") as refused:
        require_graphs(train, Gpus(size))
    assert "\n" not in refused.value.line


@pytest.mark.parametrize("override", ["train.micro_batch_size=0", "precision.compute=fp16", "train.average_decay=0.9"])
def test_one_micro_batch_on_a_gpu_may_repeat_graphs(override):
    require_graphs(config.parse(BASE, (*GRAPHED, override)).train, Gpus())


def test_a_missing_compiler_is_refused_before_the_start(pools):
    (answer,) = pools.run(1, parity_rank.train, replace(Row("", 1, COMPILED).job, defect=compiled.without_compiler))
    assert answer.kind == "refused", answer
    assert re.search(r"torch cannot compile here: .*C\+\+ compiler.*put g\+\+ ", answer.value), answer
    assert "\n" not in answer.value
