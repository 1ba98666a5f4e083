"""Bytes on the wire, by the kernel's own counters, against the closed formula of each strategy.

    pytest -s -m slow tests/distributed/test_wire_bytes.py      prints the table

All processes of a row are in a network of their own, whose loopback device counts what they send, headers included.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from helpers import private_network, ranks
from helpers.parity_rank import new_loader

from kftrain import config
from kftrain.parallel import wire
from kftrain.parallel.mesh import Mesh
from kftrain.tasks import build_task
from kftrain.train import session

pytestmark = pytest.mark.slow

TEXT = """
task: {kind: language_modeling, sequence_length: 8, tokenizer: bytes}
model: {kind: transformer, dim: 256, num_layers: 2, num_heads: 2}
train: {global_batch_size: 8}
"""
ROWS = 8
WARM_STEPS, COUNTED_STEPS = 2, 4
TOLERANCE = 0.02


@dataclass(frozen=True)
class Row:
    """A layout, and in how many micro batches a process takes its share."""

    processes: int
    strategy: str
    num_micro: int = 1
    replicate: int = 1
    exchange: str = "step"

    @property
    def overrides(self):
        micro = ROWS // self.processes // self.num_micro
        layout = {"strategy": self.strategy, "replicate": self.replicate, "exchange": self.exchange}
        return [f"train.micro_batch_size={micro}", *(f"parallel.{key}={value}" for key, value in layout.items())]

    def __str__(self):
        copies = f" x{self.replicate}" if self.replicate > 1 else ""
        each = ", exchanged each micro batch" if self.exchange == "micro_batch" else ""
        return f"{self.processes} {self.strategy}{copies}, {self.num_micro} micro{each}"


SPLIT = ("zero1", "zero2", "fsdp")

TABLE = [
    *(Row(size, strategy, num_micro) for size in (2, 4) for strategy in ("ddp", *SPLIT) for num_micro in (1, 2)),
    *(Row(size, "fsdp", 2, exchange="micro_batch") for size in (2, 4)),
    *(Row(4, strategy, num_micro, replicate=2) for strategy in SPLIT for num_micro in (1, 2)),
    Row(4, "fsdp", 2, replicate=2, exchange="micro_batch"),
]


def data():
    return {"tokens": np.random.default_rng(0).integers(0, 256, size=(64, 9)).astype(np.uint16)}


def sent_in_a_step(world, rows):
    """By a process, on average, of each row; and the bytes of the model's parameters."""
    return [measure(world, config.parse(TEXT, row.overrides)) for row in rows]


def measure(world, resolved):
    mesh, task = Mesh(resolved.parallel.shape(world.size), world), build_task(resolved.task)
    loader = new_loader(resolved, task, mesh, data())
    engine, _ = session.build(resolved, task, loader, mesh)
    batches = list(loader.steps(0, WARM_STEPS + COUNTED_STEPS))
    for batch in batches[:WARM_STEPS]:
        engine.step(batch, 64, world.sum)
    before = counted(world)
    for batch in batches[WARM_STEPS:]:
        engine.step(batch, 64, world.sum)
    sent = counted(world) - before
    return sent / COUNTED_STEPS / world.size, 4 * sum(each.numel() for each in engine.model.parameters())


def counted(world):
    """What all have sent, at a moment when all are here."""
    world.barrier()
    found = private_network.sent_bytes()
    world.barrier()
    return found


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
def test_a_strategy_sends_the_bytes_of_its_formula(measured, row):
    sent, size = measured[row]
    shape = config.parse(TEXT, row.overrides).parallel.shape(row.processes)
    by_axis = wire.bytes_sent(shape, row.strategy, row.exchange, wire.Step(size, size, row.num_micro))
    expected = sum(by_axis.values())
    print(f"\n| {row} | {expected / size:.3f} | {sent / size:.3f} | {sent / expected - 1:+.1%} |", end="")
    assert abs(sent / expected - 1) <= TOLERANCE
