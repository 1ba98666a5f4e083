"""What a step costs beyond the forward pass, the backward pass and the update: ours against a bare loop, in one run.

    python benchmarks/step_overhead.py [--steps 40] [--rounds 60] [--compute fp32|bf16]

Both train the same small language model from the same weights on the same batches, on one process and one thread, with
AdamW (fused), clipping and a learning rate that changes with each step.

    bare    batch to tensors, forward, loss, backward, clip_grad_norm_, step, zero_grad; reads nothing
    ours    `Loop.run` over our engine: seeds, counted terms, agreement on stop and saves, steps that are not finite

The two take turns, a round of so many steps each, and the least time of a round counts, since a loaded machine only
adds to it, by the thread's CPU clock. Printed: milliseconds a step, their difference and their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from kftrain import config
from kftrain.data.loader import MicroBatch, StepBatch
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.world import World, join_world
from kftrain.process.stop_request import StopRequest
from kftrain.tasks import build_task
from kftrain.train import session
from kftrain.train.loop import Loop
from kftrain.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from kftrain.train.spmd import SpmdEngine

ROWS, LENGTH, NUM_BATCHES = 8, 8, 16
TEXT = """
task: {kind: language_modeling, sequence_length: 8, tokenizer: bytes}
model: {kind: transformer, dim: 8, num_layers: 2, num_heads: 2}
train: {global_batch_size: 8, log_interval_steps: 1000000}
checkpoint: {interval_steps: 1000000}
evaluate: {interval_steps: 0}
"""


class Batches:
    """A few batches of random tokens, over and over."""

    def __init__(self) -> None:
        rows = np.random.default_rng(0).integers(0, 256, size=(NUM_BATCHES, ROWS, LENGTH + 1)).astype(np.uint16)
        self.batches = [StepBatch(0, [MicroBatch({"tokens": each}, np.ones(ROWS, np.float32))]) for each in rows]

    def steps(self, first: int, count: int) -> Iterator[StepBatch]:
        for step in range(first, first + count):
            yield self.batches[step % NUM_BATCHES]


class Nothing:
    """What a loop needs beside its engine, doing nothing."""

    history: tuple[()] = ()
    step, busy, overdue, committed_step = None, False, False, 0

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    resting = watched

    def record(self, *arguments: Any) -> None:
        pass

    def save(self, *arguments: Any) -> None:
        pass

    wait = goes_on = record


class Quiet(Loop):
    """Saves nothing."""

    def _save(self, done: int, last: bool, busy: bool) -> None:
        pass


def bare(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, resolved: config.Config, batches: Batches, num_steps: int
) -> None:
    """A loop as one writes it by hand."""
    task, limit = build_task(resolved.task), resolved.train.gradient_clip_norm
    parameters = list(model.parameters())
    half = resolved.precision.compute == "bf16"
    for step, batch in enumerate(batches.steps(0, num_steps)):
        set_learning_rate(optimizer, learning_rate(resolved.optimizer, step, num_steps))
        (micro,) = batch.micro_batches
        tensors, weight = task.batch(micro.arrays), torch.from_numpy(micro.weight)
        with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
            output = model(*task.inputs(tensors))
        loss = task.loss(output, tensors, weight) / (ROWS * LENGTH)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def ours(engine: SpmdEngine, resolved: config.Config, world: World, batches: Batches) -> None:
    """The training loop."""
    nothing: Any = Nothing()
    Quiet(resolved, world, engine, batches, nothing, nothing, nothing, StopRequest(), nothing).run(0)  # type: ignore[arg-type]


def seconds(work: Callable[[], None]) -> float:
    before = time.thread_time()
    work()
    return time.thread_time() - before


@contextlib.contextmanager
def alone() -> Iterator[World]:
    """A world of one process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    with join_world(60.0) as world:
        yield world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--compute", choices=("fp32", "bf16"), default="fp32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    resolved = config.parse(TEXT, [f"train.steps={arguments.steps}", f"precision.compute={arguments.compute}"])
    batches = Batches()
    with alone() as world:
        engine, _ = session.build(resolved, build_task(resolved.task), batches, Mesh.of_copies(world))  # type: ignore[arg-type]
        plain = copy.deepcopy(engine.model)
        for module in plain.modules():
            module._forward_pre_hooks.clear()
        optimizer = build_optimizer(plain, resolved.optimizer)
        parts = {
            "bare": lambda: bare(plain, optimizer, resolved, batches, arguments.steps),
            "ours": lambda: ours(engine, resolved, world, batches),
        }
        least = {name: min(seconds(work) for _ in range(2)) for name, work in parts.items()}
        for _ in range(arguments.rounds):
            for name, work in parts.items():
                least[name] = min(least[name], seconds(work))
    one, two = (least[name] / arguments.steps * 1e3 for name in ("bare", "ours"))
    size = sum(parameter.numel() for parameter in plain.parameters())
    print(f"{size:,} parameters, {arguments.compute}: bare {one:.3f} ms, ours {two:.3f} ms a step;", end=" ")
    print(f"difference {two - one:+.3f} ms, ratio {two / one:.3f}")


if __name__ == "__main__":
    main()
