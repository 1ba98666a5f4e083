"""Bytes on the wire of gradients that travel compressed, by the kernel's own counters, as a share of fp32's.

pytest -s -m slow tests/distributed/test_wire_bytes_compression.py      prints the table
"""

from dataclasses import dataclass

import numpy as np
import pytest
from helpers.wire import bytes_of_step
from helpers.wire_counts import TOLERANCE, count_step_bytes, measure_table

from kftrain.data.order import BatchPlan
from kftrain.models import build_model

pytestmark = pytest.mark.slow

TEXT = """
task: {kind: language_modeling, sequence_length: 8, tokenizer: bytes}
model: {kind: transformer, dim: 384, num_layers: 4, num_heads: 2}
train: {global_batch_size: 8}
"""

DENSITY = 0.001

SCALE_SHARE = 4 / 256
"""Bytes of scales for each code of one byte."""


@dataclass(frozen=True)
class Compressed:
    """A layout and a kind, and the share of fp32's bytes that it may send."""

    processes: int
    strategy: str
    kind: str
    limit: float

    @property
    def share(self):
        """A process sends its largest numbers and their places to all others."""
        shares = {"int8": (1 + SCALE_SHARE) / 4, "topk": self.processes * DENSITY}
        return shares.get(self.kind, 0.5)

    @property
    def overrides(self):
        return ["optimizer.kind=sgd"] if self.kind == "topk" else []

    def __str__(self):
        return f"{self.processes} {self.strategy}, {self.kind}"


TABLE = [
    *(Compressed(size, "ddp", "int8", 0.26) for size in (2, 4, 8)),
    *(Compressed(size, strategy, "int8", 0.27) for size in (2, 4) for strategy in ("fsdp", "zero1")),
    *(Compressed(size, "ddp", "topk", size * 0.0013) for size in (2, 4, 8)),
    *(Compressed(2, strategy, kind, 0.51) for strategy in ("ddp", "fsdp") for kind in ("bf16", "fp16")),
]


def measure(world, row):
    """Bytes that a process sends in a step, on average; and those of fp32 by the formula."""
    tokens = np.random.default_rng(0).integers(0, 256, size=(64, 9)).astype(np.uint16)
    overrides = [f"parallel.strategy={row.strategy}", f"parallel.compression.kind={row.kind}", *row.overrides]
    sent, resolved, _, task = count_step_bytes(world, TEXT, overrides, {"tokens": tokens})
    model, shape = build_model(resolved.model, task.model_arguments()), resolved.parallel.shape(row.processes)
    plan = BatchPlan(8, row.processes)
    return sent, sum(bytes_of_step(shape, resolved.parallel, resolved.precision, model, plan, False).values())


@pytest.fixture(scope="module")
def measured():
    return measure_table(TABLE, measure)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_compression_sends_its_share_of_the_bytes(measured, row):
    sent, dense = measured[row]
    print(f"\n| {row} | {row.share:.4f} | {sent / dense:.4f} | {sent / dense / row.share - 1:+.1%} |", end="")
    assert sent / dense <= row.limit
    if row.kind != "topk":  # of whose few bytes headers and what the loop agrees on are more
        assert abs(sent / dense / row.share - 1) <= TOLERANCE
