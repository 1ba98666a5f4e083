"""Bytes that the stages of a pipeline send each other, by the kernel's own counters, against the closed formula.

What b borders between processes are crossed by is an activation forward and a gradient back, of each micro batch: with
m of them, n places in each, dim d and c bytes a number, 2 b m n d c in a step. Tied ends on two processes add up their
gradients, of g bytes: each sends g.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from helpers.wire_counts import TOLERANCE, count_step_bytes, measure_table

pytestmark = pytest.mark.slow

TEXT = """
task: {kind: language_modeling, sequence_length: 128, tokenizer: bytes}
model: {kind: transformer, dim: 256, num_layers: 6, num_heads: 2}
train: {global_batch_size: 8, micro_batch_size: 2}
"""
PLACES, DIM, NUM_MICRO, VOCABULARY = 2 * 128, 256, 4, 320


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


def measure(world, row):
    tokens = np.random.default_rng(0).integers(0, 256, size=(64, 129)).astype(np.uint16)
    return count_step_bytes(world, TEXT, row.overrides, {"tokens": tokens})[0]


@pytest.fixture(scope="module")
def measured():
    return measure_table(TABLE, measure)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.processes} {row.schedule} {' '.join(row.more)}")
def test_stages_send_the_bytes_of_the_formula(measured, row):
    print(f"\n| {row} | {row.expected:.0f} | {measured[row]:.0f} | {measured[row] / row.expected - 1:+.1%} |", end="")
    assert abs(measured[row] / row.expected - 1) <= TOLERANCE
