"""Bytes on the wire of layouts with `expert`, by the kernel's own counters, against the formula of the routing table.

What is no expert's is sharded over `shard` x `expert`, the experts of a process over `shard` alone, by the formulas of
`helpers.wire`. A row that a process sends to another one's expert travels there and back, and so does its gradient;
where blocks are recomputed it travels there and back once more.
"""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.parity.defects import patched
from helpers.wire import Step, bytes_sent
from helpers.wire_counts import COUNTED_STEPS, TOLERANCE, count_step_bytes, measure_table

from kftrain.models import build_model
from kftrain.models.mixture_of_experts import Router
from kftrain.parallel.shape import Shape

pytestmark = pytest.mark.slow

DIM, EXPERTS = 128, 8

TEXT = """
task: {kind: language_modeling, sequence_length: 128, tokenizer: bytes}
model: {kind: mixture_of_experts, dim: 128, num_layers: 2, num_heads: 2, num_experts: 8, expert_dim: 64}
train: {global_batch_size: 8}
"""


@dataclass(frozen=True)
class Row:
    processes: int
    expert: int
    num_micro: int = 1
    replicate: int = 1
    more: tuple[str, ...] = ()

    @property
    def overrides(self):
        rows = 8 // self.processes // self.num_micro
        sizes = (f"parallel.expert={self.expert}", f"parallel.replicate={self.replicate}")
        return [f"train.micro_batch_size={rows}", *sizes, *self.more]

    @property
    def is_recomputed(self):
        return "train.activation_checkpointing=blocks" in self.more

    @property
    def width(self):
        return 2 if "precision.compute=bf16" in self.more else 4

    def __str__(self):
        return f"{self.processes} expert {self.expert}, x{self.replicate}, {self.num_micro} micro {self.more}"


TABLE = [
    Row(2, 2),
    Row(2, 2, 2),
    Row(2, 2, more=("train.activation_checkpointing=blocks",)),
    Row(2, 2, more=("precision.compute=bf16",)),
    Row(4, 4),
    Row(4, 2, 2),
    Row(4, 2, replicate=2),
]


def data():
    return {"tokens": np.random.default_rng(0).integers(0, 256, size=(64, 129)).astype(np.uint16)}


def measure(world, row):
    chosen = []

    def note(router, rows, choose=Router.forward):
        answer = choose(router, rows)
        chosen.append(answer[0])
        return answer

    watch = functools.partial(patched, Router, "forward", note)
    sent, resolved, engine, task = count_step_bytes(world, TEXT, row.overrides, data(), watch)
    own = engine.mesh.shape.coordinates(world.rank)["expert"]
    share = EXPERTS // row.expert
    num_rows = sum(int((choices // share != own).sum()) for choices in chosen)
    (num_rows,) = world.sum([num_rows / world.size])
    return sent, formula(row, resolved, task, num_rows / COUNTED_STEPS)


def formula(row, resolved, task, num_rows):
    """`num_rows`: that a process sends to others, in the forward passes of a step, also those that are recomputed."""
    model = build_model(resolved.model, task.model_arguments())
    sizes = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        sizes[".mlp.experts." in name] += parameter.numel()
    shard = row.processes // row.replicate // row.expert
    parts = [
        (Shape(row.replicate, shard * row.expert), sizes[False]),
        (Shape(row.replicate, shard), sizes[True] / row.expert),
    ]
    sharded = 0.0
    for shape, size in parts:
        step = Step(row.width * size, 4 * size, row.num_micro)
        sharded += sum(bytes_sent(shape, "fsdp", "step", step).values())
    times = 2 + 2 / (2 if row.is_recomputed else 1)  # there and back in each forward pass, and once as gradients
    return sharded + times * num_rows * DIM * row.width


@pytest.fixture(scope="module")
def measured():
    return measure_table(TABLE, measure)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_layout_sends_the_bytes_of_its_routing_table(measured, row):
    sent, expected = measured[row]
    print(f"\n| {row} | {expected:,.0f} | {sent:,.0f} | {sent / expected - 1:+.2%} |", end="")
    assert abs(sent / expected - 1) <= TOLERANCE
