"""What a step costs beyond the forward pass, the backward pass and the update: ours against a bare loop, in one run.

    python benchmarks/step_overhead.py [--steps 40] [--rounds 60]

Both train the same small language model from the same weights on the same batches, on one process and one thread, with
AdamW (fused), clipping and a learning rate that changes with each step.

    bare    batch to tensors, forward, loss, backward, clip_grad_norm_, step, zero_grad; reads nothing
    ours    `Loop.run` over our engine: seeds, agreement on stop and saves, steps that are not finite

Neither reads data or counts loss terms: the loader's thread does. The two take turns, a round of so many steps each;
each step is measured by itself, by the thread's CPU clock. A loaded machine only adds to it, so the step counts that
nine of ten are slower than. Printed: milliseconds a step, their difference and their ratio.
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
QUANTILE = 0.1
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
        self.batches = [
            StepBatch(0, [MicroBatch({"tokens": each}, np.ones(ROWS, np.float32))], ROWS * LENGTH) for each in rows
        ]
        self.asked_at: list[float] = []
        """CPU seconds of the thread at each step of the round."""

    def steps(self, first: int, count: int) -> Iterator[StepBatch]:
        self.asked_at.clear()
        for step in range(first, first + count):
            self.asked_at.append(time.thread_time())
            yield self.batches[step % NUM_BATCHES]


class Nothing:
    """What a loop needs beside its engine, doing nothing."""

    history: tuple[()] = ()
    step = None
    busy = False
    overdue = False
    committed_step = 0

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
    for step, batch in enumerate(batches.steps(0, num_steps)):
        set_learning_rate(optimizer, learning_rate(resolved.optimizer, step, num_steps))
        (micro,) = batch.micro_batches
        tensors, weight = task.batch(micro.arrays), torch.from_numpy(micro.weight)
        loss = task.loss(model(*task.inputs(tensors)), tensors, weight) / batch.num_terms
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def ours(engine: SpmdEngine, resolved: config.Config, world: World, batches: Batches) -> None:
    """The training loop."""
    nothing: Any = Nothing()
    Quiet(resolved, world, engine, batches, nothing, nothing, nothing, StopRequest(), nothing).run(0)  # type: ignore[arg-type]


def milliseconds(work: Callable[[], None], batches: Batches) -> list[float]:
    """Of each step of a round but the first."""
    work()
    return [float(each) for each in np.diff(batches.asked_at)[1:] * 1e3]


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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    resolved = config.parse(TEXT, [f"train.steps={arguments.steps}"])
    batches = Batches()
    with alone() as world:
        engine, _ = session.build(resolved, build_task(resolved.task), batches, Mesh.of_copies(world))  # type: ignore[arg-type]
        plain = copy.deepcopy(engine.model)
        for module in plain.modules():
            module._forward_pre_hooks.clear()  # ours go by themselves
        optimizer = build_optimizer(plain, resolved.optimizer)
        parts = {
            "bare": lambda: bare(plain, optimizer, resolved, batches, arguments.steps),
            "ours": lambda: ours(engine, resolved, world, batches),
        }
        for work in parts.values():
            work()
        found: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(arguments.rounds):
            for name, work in parts.items():
                found[name] += milliseconds(work, batches)
    one, two = (float(np.quantile(found[name], QUANTILE)) for name in ("bare", "ours"))
    size = sum(parameter.numel() for parameter in plain.parameters())
    print(f"{size:,} parameters: bare {one:.3f} ms, ours {two:.3f} ms a step;", end=" ")
    print(f"difference {two - one:+.3f} ms, ratio {two / one:.3f}")


if __name__ == "__main__":
    main()
