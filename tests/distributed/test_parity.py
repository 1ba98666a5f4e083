"""Each strategy, optimizer and combination that is offered against a bare loop on one process, row by row."""

import time

import pytest
from helpers import parity, parity_rank
from helpers import parity_optimizers as optimizers
from helpers.parity import Row
from helpers.parity_oracle import Case, odd_llama, same_llama, tied_llama
from helpers.parity_pool import Pools
from helpers.parity_vision import IMAGES

TIED = Case("tied", ("model.tie_embeddings=true",), tied_llama)
ODD = Case("odd", ("model.ffn_dim=30",), odd_llama)
BF16 = Case("bf16", ("precision.compute=bf16",), same_llama, bf16=True)

DDP = ("parallel.strategy=ddp",)
HYBRID = ("parallel.replicate=2",)
TENSOR = ("parallel.tensor=2",)

HALVES = (0, 1, 2), (3, 4, 5)

TABLE = [
    Row("one process", 1),
    Row("odd sizes", 1, case=ODD),
    Row("micro batches", 1, ("train.micro_batch_size=2",)),
    Row("images", 1, case=IMAGES),
    Row("tied embeddings", 1, case=TIED),
    Row("bf16", 1, case=BF16, compared_steps=12, weight_tolerance=0.02),
    Row("fsdp", 2),
    Row("fsdp, tied embeddings", 2, case=TIED),
    Row("fsdp, micro batches", 2, ("train.micro_batch_size=1",)),
    Row("fsdp, recomputed", 2, ("train.activation_checkpointing=blocks",)),
    Row("fsdp, exchanged each micro batch", 2, ("parallel.exchange=micro_batch", "train.micro_batch_size=1")),
    Row("zero1, written in the older way", 2, ("parallel.reshard_after_forward=false", "train.micro_batch_size=1")),
    Row("zero1", 2, ("parallel.strategy=zero1",)),
    Row("zero1, micro batches", 2, ("parallel.strategy=zero1", "train.micro_batch_size=1")),
    Row("zero1, bf16", 2, ("parallel.strategy=zero1",), BF16, parts=HALVES, compared_steps=12, weight_tolerance=0.02),
    Row("zero2", 2, ("parallel.strategy=zero2",)),
    Row("zero2, micro batches", 2, ("parallel.strategy=zero2", "train.micro_batch_size=1")),
    Row("zero2, tied embeddings", 2, ("parallel.strategy=zero2", "train.micro_batch_size=2"), TIED),
    Row("auto", 2, ("parallel.strategy=auto", "train.micro_batch_size=1")),
    Row("ddp", 2, DDP),
    Row("ddp, uneven micro batches", 2, (*DDP, "train.micro_batch_size=2")),
    Row("ddp, tied embeddings, recomputed", 2, (*DDP, "train.activation_checkpointing=blocks"), TIED),
    Row("ddp, bf16", 2, DDP, BF16, parts=HALVES, compared_steps=12, weight_tolerance=0.02),
    Row("fsdp, bf16", 2, case=BF16, parts=HALVES, compared_steps=12, weight_tolerance=0.02),
    Row("fsdp, uneven", 4),
    Row("tensor", 2, TENSOR),
    Row("tensor, whole sequences", 2, (*TENSOR, "parallel.sequence_parallel=false")),
    Row("tensor, micro batches", 2, (*TENSOR, "train.micro_batch_size=2")),
    Row("tensor, recomputed", 2, (*TENSOR, "train.activation_checkpointing=blocks")),
    Row("tensor, tied embeddings", 2, TENSOR, case=TIED),
    # Sums of the parts of a row are rounded to bf16 once more than on one process.
    Row("tensor, bf16", 2, TENSOR, case=BF16, compared_steps=8, tolerance=0.01, weight_tolerance=0.05),
    Row("tensor, images", 2, TENSOR, case=IMAGES),
    Row("tensor, images, whole sequences", 2, (*TENSOR, "parallel.sequence_parallel=false"), case=IMAGES),
    Row("fsdp x tensor", 4, TENSOR),
    Row("fsdp x tensor, tied embeddings", 4, TENSOR, case=TIED),
    Row("fsdp x tensor, micro batches", 4, (*TENSOR, "train.micro_batch_size=2")),
    Row("fsdp x tensor, recomputed", 4, (*TENSOR, "train.activation_checkpointing=blocks")),
    Row("fsdp x tensor, images", 4, TENSOR, case=IMAGES),
    Row("fsdp x tensor, uneven", 4, TENSOR, case=ODD),
    Row("zero2 x tensor, micro batches", 4, (*TENSOR, "parallel.strategy=zero2", "train.micro_batch_size=2")),
    Row("ddp x tensor", 4, (*TENSOR, "parallel.strategy=ddp")),
    Row("hsdp x tensor", 4, (*TENSOR, "parallel.replicate=2")),
    Row("hsdp", 4, ("parallel.replicate=2",)),
    Row("hsdp, micro batches", 4, ("parallel.replicate=2", "train.micro_batch_size=1")),
    Row("hsdp, exchanged each micro batch", 4, (*HYBRID, "parallel.exchange=micro_batch", "train.micro_batch_size=1")),
    Row("hybrid zero1, micro batches", 4, (*HYBRID, "parallel.strategy=zero1", "train.micro_batch_size=1")),
    Row("hybrid zero2, micro batches", 4, (*HYBRID, "parallel.strategy=zero2", "train.micro_batch_size=1")),
    *(Row(case.name, size, case=case) for case in optimizers.CASES for size in (1, 2, 3)),
    Row("muon, hsdp", 4, ("parallel.replicate=2",), optimizers.MUON),
    Row("adafactor, hsdp", 4, ("parallel.replicate=2",), optimizers.ADAFACTOR),
    Row("muon, fsdp x tensor", 4, TENSOR, optimizers.MUON),
    Row("muon, tensor", 2, TENSOR, optimizers.MUON),
    Row("adafactor, fsdp x tensor", 4, TENSOR, optimizers.ADAFACTOR),
    Row("adafactor, tensor", 2, TENSOR, optimizers.ADAFACTOR),
]
"""Add a row here. A case of its own stands beside `TIED`, or, where it needs a network, in `helpers.parity_oracle`."""


@pytest.fixture(scope="session")
def pools():
    found = Pools()
    yield found
    found.close()


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    parity.check(row, pools.run(row.processes, parity_rank.train, row.job))


def hang(world):
    time.sleep(600 if world.rank == 1 else 0)


def fail(world):
    assert world.rank != 1, "scripted"
    world.barrier()


def test_a_job_that_hangs_or_fails_on_one_process_ends_and_the_next_one_has_new_processes(pools):
    done, silent = pools.run(2, hang, seconds=3)
    assert (done.kind, silent.kind) == ("done", "silent")
    waits, failed = pools.run(2, fail)
    assert (waits.kind, failed.kind) == ("silent", "failed") and "scripted" in failed.value
    assert [answer.value for answer in pools.run(2, sum_of_ranks)] == [1.0, 1.0]


def sum_of_ranks(world):
    return world.sum([world.rank])[0]
