"""Bytes on the wire of layouts with `expert`, by the kernel's own counters, against the formula of the routing table.

What is no expert's is sharded over `shard` x `expert`, the experts of a process over `shard` alone, by the formulas of
`helpers.wire`. A row that a process sends to another one's expert travels there and back, and so does its gradient;
where blocks are recomputed it travels there and back once more.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from helpers import ranks
from helpers.fakes import private_network
from helpers.parity.defects import patched
from helpers.parity.rank import new_loader
from helpers.wire import Step, bytes_sent

from kftrain import config
from kftrain.models import build_model
from kftrain.models.mixture_of_experts import Router
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.shape import Shape
from kftrain.tasks import build_task
from kftrain.train import session

pytestmark = pytest.mark.slow

DIM, EXPERTS = 128, 8

TEXT = """
task: {kind: language_modeling, sequence_length: 128, tokenizer: bytes}
model: {kind: mixture_of_experts, dim: 128, num_layers: 2, num_heads: 2, num_experts: 8, expert_dim: 64}
train: {global_batch_size: 8}
"""
WARM_STEPS, COUNTED_STEPS, TOLERANCE = 2, 4, 0.02


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
    resolved = config.parse(TEXT, row.overrides)
    mesh, task = Mesh(resolved.parallel.shape(world.size), world), build_task(resolved.task)
    loader = new_loader(resolved, task, mesh, data())
    engine, _ = session.build(resolved, task, loader, mesh)
    batches = list(loader.steps(0, WARM_STEPS + COUNTED_STEPS))
    for batch in batches[:WARM_STEPS]:
        engine.step(batch, 64, world.sum)
    chosen = []

    def note(router, rows, choose=Router.forward):
        answer = choose(router, rows)
        chosen.append(answer[0])
        return answer

    before = counted(world)
    with patched(Router, "forward", note):
        for batch in batches[WARM_STEPS:]:
            engine.step(batch, 64, world.sum)
    sent = counted(world) - before
    own = mesh.shape.coordinates(world.rank)["expert"]
    share = EXPERTS // row.expert
    num_rows = sum(int((choices // share != own).sum()) for choices in chosen)
    (num_rows,) = world.sum([num_rows / world.size])
    return sent / COUNTED_STEPS / world.size, formula(row, resolved, task, num_rows / COUNTED_STEPS)


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


def counted(world):
    world.barrier()
    found = private_network.sent_bytes()
    world.barrier()
    return found


def sent_in_a_step(world, rows):
    return [measure(world, row) for row in rows]


def on_all(rows):
    return ranks.on(rows[0].processes, sent_in_a_step, rows, seconds=900)[0]


@pytest.fixture(scope="module")
def measured():
    problem = private_network.problem()
    if problem:
        pytest.skip(f"needs a network of its own: {problem}")
    found = {}
    for size in sorted({row.processes for row in TABLE}):
        rows = [row for row in TABLE if row.processes == size]
        answers = private_network.run(on_all, rows)
        assert isinstance(answers, list), answers
        found.update(zip(rows, answers, strict=True))
    return found


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_layout_sends_the_bytes_of_its_routing_table(measured, row):
    sent, expected = measured[row]
    print(f"\n| {row} | {expected:,.0f} | {sent:,.0f} | {sent / expected - 1:+.2%} |", end="")
    assert abs(sent / expected - 1) <= TOLERANCE
