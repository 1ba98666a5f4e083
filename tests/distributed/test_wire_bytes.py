"""Bytes on the wire, by the kernel's own counters, against the closed formula of each strategy.

pytest -s -m slow tests/distributed/test_wire_bytes.py      prints the table
"""

from dataclasses import dataclass

import numpy as np
import pytest
from helpers.wire import bytes_of_step
from helpers.wire_counts import TOLERANCE, count_step_bytes, measure_table

from kftrain.core.plain import load_yaml
from kftrain.data.order import BatchPlan
from kftrain.models import build_model
from kftrain.tasks.base import task_reads_parts

pytestmark = pytest.mark.slow

TEXT = """
task: {kind: language_modeling, sequence_length: 8, tokenizer: bytes}
model: {kind: transformer, dim: 256, num_layers: 2, num_heads: 2}
train: {global_batch_size: 8}
"""
LONG = TEXT.replace("sequence_length: 8", "sequence_length: 128")
"""Where activations travel."""
LONGER = TEXT.replace("sequence_length: 8", "sequence_length: 256")

IMAGES = """
task: {kind: image_classification, image_size: 16, num_classes: 10}
model: {kind: vision_transformer, dim: 128, num_layers: 2, num_heads: 2}
train: {global_batch_size: 8}
"""
WIDE_IMAGES = IMAGES.replace("dim: 128", "dim: 256")
"""Beside its numbers a step sends about 32 kB, whatever the width: headers, and what the loop agrees on. So these rows
are off by half as many percent as the narrower ones."""
ROWS = 8


@dataclass(frozen=True)
class Row:
    """A layout, and in how many micro batches a process takes its share."""

    processes: int
    strategy: str
    num_micro: int = 1
    replicate: int = 1
    exchange: str = "step"
    tensor: int = 1
    context: int = 1
    more: tuple[str, ...] = ()
    text: str = TEXT

    @property
    def overrides(self):
        layout = {key: getattr(self, key) for key in ("strategy", "replicate", "exchange", "tensor", "context")}
        settings = (f"parallel.{key}={value}" for key, value in layout.items())
        return [f"train.micro_batch_size={self.plan.micro_batch_rows}", *settings, *self.more]

    @property
    def plan(self):
        shares = self.processes // self.tensor // self.context
        return BatchPlan(ROWS, shares, ROWS // shares // self.num_micro)

    @property
    def is_of_images(self):
        return self.text in (IMAGES, WIDE_IMAGES)

    def __str__(self):
        copies = f" x{self.replicate}" if self.replicate > 1 else ""
        each = ", exchanged each micro batch" if self.exchange == "micro_batch" else ""
        split = f" x tensor {self.tensor}" if self.tensor > 1 else ""
        split += f" x context {self.context}" if self.context > 1 else ""
        more = "".join(f", {each.partition('.')[2]}" for each in self.more)
        images = {IMAGES: ", images", WIDE_IMAGES: ", images, twice as wide"}.get(self.text, "")
        return f"{self.processes} {self.strategy}{copies}{split}, {self.num_micro} micro{each}{more}{images}"


WHOLE, RECOMPUTED = "parallel.sequence_parallel=false", "train.activation_checkpointing=blocks"

TENSOR_MORE = (WHOLE, RECOMPUTED, "precision.compute=bf16", "model.tie_embeddings=true")

CONTEXT_MORE = ("model.num_kv_heads=1", RECOMPUTED, "precision.compute=bf16", "task.attention=documents")

KV_HEADS = ("model.num_kv_heads=4", "model.num_kv_heads=2")

SPLIT = ("zero1", "zero2", "fsdp")

TABLE = [
    *(Row(size, strategy, num_micro) for size in (2, 4) for strategy in ("ddp", *SPLIT) for num_micro in (1, 2)),
    *(Row(size, "fsdp", 2, exchange="micro_batch") for size in (2, 4)),
    *(Row(4, strategy, num_micro, replicate=2) for strategy in SPLIT for num_micro in (1, 2)),
    Row(4, "fsdp", 2, replicate=2, exchange="micro_batch"),
    *(Row(size, "fsdp", num_micro, tensor=2, text=LONG) for size in (2, 4) for num_micro in (1, 2)),
    Row(4, "fsdp", tensor=4, text=LONG, more=("model.num_heads=4",)),
    Row(4, "ddp", tensor=2, text=LONG),
    Row(4, "zero2", 2, tensor=2, text=LONG),
    *(Row(2, "fsdp", tensor=2, text=LONG, more=(more,)) for more in TENSOR_MORE),
    Row(2, "fsdp", tensor=2, text=LONG, more=(WHOLE, RECOMPUTED)),
    *(Row(size, "fsdp", num_micro, context=2, text=LONGER) for size in (2, 4) for num_micro in (1, 2)),
    *(Row(2, "fsdp", context=2, text=LONGER, more=(more,)) for more in CONTEXT_MORE),
    *(Row(4, "zero1", context=4, text=LONGER, more=("model.num_heads=4", more)) for more in KV_HEADS),
    *(Row(2, "fsdp", 2, tensor=2, text=IMAGES, more=more) for more in ((), (WHOLE,), (RECOMPUTED,))),
    Row(2, "fsdp", 2, tensor=2, text=WIDE_IMAGES),
]


def data(row):
    generator = np.random.default_rng(0)
    if row.is_of_images:
        labels = generator.integers(0, 10, 64)
        return {"image": generator.integers(0, 256, (64, 16, 16, 1)).astype(np.uint8), "label": labels}
    length = load_yaml(row.text, "row")["task"]["sequence_length"] + 1
    return {"tokens": generator.integers(0, 256, size=(64, length)).astype(np.uint16)}


def measure(world, row):
    """Bytes that a process sends in a step, on average; what the formula says; bytes of the model's parameters."""
    sent, resolved, engine, task = count_step_bytes(world, row.text, row.overrides, data(row))
    return sent, formula(row, resolved, task), size_of(engine.model)


def formula(row, resolved, task):
    """As the product says it, of the model as it was before it was spread."""
    model = build_model(resolved.model, task.model_arguments())
    blocks = [f"{'' if row.is_of_images else 'model.'}layers.{number}" for number in range(2)]
    recomputed = blocks if RECOMPUTED in row.more else []
    shape = resolved.parallel.shape(row.processes)
    reads_parts = task_reads_parts(task)
    sent = bytes_of_step(shape, resolved.parallel, resolved.precision, model, row.plan, reads_parts, recomputed)
    return sum(sent.values())


def size_of(model):
    return 4 * sum(each.numel() for each in model.parameters())


@pytest.fixture(scope="module")
def measured():
    return measure_table(TABLE, measure)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_strategy_sends_the_bytes_of_its_formula(measured, row):
    sent, expected, size = measured[row]
    print(f"\n| {row} | {expected / size:.3f} | {sent / size:.3f} | {sent / expected - 1:+.1%} |", end="")
    assert abs(sent / expected - 1) <= TOLERANCE
