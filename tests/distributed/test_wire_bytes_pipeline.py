"""Bytes that the stages of a pipeline send each other, by the kernel's own counters, against the closed formula.

What b borders between processes are crossed by is an activation forward and a gradient back, of each micro batch: with
m of them, n places in each, dim d and c bytes a number, 2 b m n d c in a step. Tied ends on two processes add up their
gradients, of g bytes: each sends g.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from helpers import ranks
from helpers.fakes import private_network
from helpers.parity.rank import new_loader

from kftrain import config
from kftrain.parallel.mesh import Mesh
from kftrain.tasks import build_task
from kftrain.train import session

pytestmark = pytest.mark.slow

TEXT = """
task: {kind: language_modeling, sequence_length: 128, tokenizer: bytes}
model: {kind: transformer, dim: 256, num_layers: 6, num_heads: 2}
train: {global_batch_size: 8, micro_batch_size: 2}
"""
PLACES, DIM, NUM_MICRO, VOCABULARY = 2 * 128, 256, 4, 320
WARM_STEPS, COUNTED_STEPS = 2, 4
TOLERANCE = 0.02


@dataclass(frozen=True)
class Row:
    """A layout, and how many borders of stages lie between processes."""

    processes: int
    num_borders: int
    schedule: str = "1f1b"
    more: tuple[str, ...] = ()

    @property
    def overrides(self):
        return [f"parallel.pipeline={self.processes}", f"parallel.schedule={self.schedule}", *self.more]

    @property
    def expected(self):
        """By a process, on average."""
        width = 2 if "precision.compute=bf16" in self.more else 4
        tied = 2 * 4 * VOCABULARY * DIM if "model.tie_embeddings=true" in self.more else 0
        return (2 * self.num_borders * NUM_MICRO * PLACES * DIM * width + tied) / self.processes


TABLE = [
    Row(2, 1),
    Row(2, 1, "gpipe"),
    Row(2, 3, "interleaved"),
    Row(2, 3, "interleaved_zero_bubble"),
    Row(2, 2, "zbv"),
    Row(2, 2, "dualpipev"),
    Row(2, 1, more=("precision.compute=bf16",)),
    Row(2, 1, more=("model.tie_embeddings=true",)),
    Row(3, 2),
    Row(3, 2, more=("model.tie_embeddings=true",)),
]


def sent_in_a_step(world, rows):
    return [measure(world, row) for row in rows]


def measure(world, row):
    resolved = config.parse(TEXT, row.overrides)
    mesh, task = Mesh(resolved.parallel.shape(world.size), world), build_task(resolved.task)
    tokens = np.random.default_rng(0).integers(0, 256, size=(64, 129)).astype(np.uint16)
    loader = new_loader(resolved, task, mesh, {"tokens": tokens})
    engine, _ = session.build(resolved, task, loader, mesh)
    batches = list(loader.steps(0, WARM_STEPS + COUNTED_STEPS))
    for batch in batches[:WARM_STEPS]:
        engine.step(batch, 64, world.sum)
    before = counted(world)
    for batch in batches[WARM_STEPS:]:
        engine.step(batch, 64, world.sum)
    return (counted(world) - before) / COUNTED_STEPS / world.size


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


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.processes} {row.schedule} {' '.join(row.more)}")
def test_stages_send_the_bytes_of_the_formula(measured, row):
    print(f"\n| {row} | {row.expected:.0f} | {measured[row]:.0f} | {measured[row] / row.expected - 1:+.1%} |", end="")
    assert abs(measured[row] / row.expected - 1) <= TOLERANCE
