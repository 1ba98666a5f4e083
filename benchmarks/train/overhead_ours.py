"""What our loop costs beyond the forward pass, the backward pass and the update: one process, one thread.

    python benchmarks/train/overhead_ours.py [--steps 1500] [--scaled]

The bare step is a step as one writes it by hand: forward, loss, backward, `clip_grad_norm_`, fused AdamW, `zero_grad`
and a learning rate that changes with each step; it reads nothing. Ours is `Loop.run` with all that a training has: the
agreement on stop and saves, steps that are not finite, a recorder that writes a log line and points for MLflow at every
tenth step, a checkpoint writer (no save is due), and the liveness file of a supervised process. Neither reads data nor
makes tensors of it: the loader's thread does. With `--scaled` both compute in fp16 with copies of fp32 weights, scale
the loss (the bare step by `torch.amp.GradScaler`), count the steps that are skipped, and average the weights after the
others. Last line: microseconds of the bare step and of one of ours, and the model's parameters.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from turns import Turns

from kftrain import config
from kftrain.checkpoint.save import CheckpointWriter, Identity
from kftrain.data.counters import Counters
from kftrain.data.loader import MicroBatch, StepBatch
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.world import World, join_world
from kftrain.process.liveness import LIVENESS_ENV, Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.run.paths import RunPaths
from kftrain.tasks import build_task
from kftrain.tasks.base import Task
from kftrain.tracking.tracker import MlflowTracker
from kftrain.train import session
from kftrain.train.loop import Loop, compute_learning_rate
from kftrain.train.recorder import Recorder
from kftrain.train.settings import OptimizerConfig
from kftrain.train.step import Carrier, count_loss_terms

ROWS, LENGTH, NUM_BATCHES = 8, 8, 16
TEXT = """
task: {kind: language_modeling, sequence_length: 8, tokenizer: bytes}
model: {kind: transformer, dim: 8, num_layers: 2, num_heads: 2, ffn_dim: 16}
train: {global_batch_size: 8}
checkpoint: {interval_steps: 1000000}
evaluate: {interval_steps: 0}
"""


class Source:
    """What a training reads, without a loader's thread."""

    def __init__(self, turns: Turns[StepBatch] | None, batches: list[StepBatch]) -> None:
        self._turns = turns
        self._batches = batches
        self.counters = Counters()

    def steps(self, first: int, count: int) -> Any:
        return self._turns.steps(first, count) if self._turns else (each for each in self._batches[:count])


class Quiet(Loop):
    """Saves nothing."""

    def _save(self, done: int, last: bool, busy: bool) -> None:
        pass


def batches_of(task: Task) -> list[StepBatch]:
    """Random tokens, as the loader's thread hands them over."""
    rows = np.random.default_rng(0).integers(0, 256, size=(NUM_BATCHES, ROWS, LENGTH + 1)).astype(np.uint16)
    plain = [MicroBatch({"tokens": each}, np.ones(ROWS, np.float32)) for each in rows]
    carrier = Carrier.to(torch.device("cpu"), task)
    sent = [replace(each, sent=carrier.send(each, count_loss_terms(task, each))) for each in plain]
    return [StepBatch(0, [each], ROWS * LENGTH) for each in sent]


def adamw(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's own, fused: matrices decay, all else does not."""
    groups = [
        {"params": [each for each in model.parameters() if (each.dim() >= 2) == decays], "weight_decay": decay}
        for decays, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)


DECAY = 0.999
SCALED = ["precision.compute=fp16", f"train.average_decay={DECAY}"]


def make_scaled_step(
    task: Task, plain: torch.nn.Module, optimizer: torch.optim.Optimizer, limit: float
) -> Callable[[StepBatch], None]:
    """A step in fp16 as one writes it by hand, with torch's scaler, and averages by torch's kernel."""
    half, masters = copy.deepcopy(plain).half(), list(plain.parameters())
    halves, averages = list(half.parameters()), [each.detach().clone() for each in masters]
    scaler: Any = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    num_skipped = 0

    def take(batch: StepBatch) -> None:
        nonlocal num_skipped
        tensors = batch.micro_batches[0].sent.tensors
        with torch.no_grad():
            torch._foreach_copy_(halves, masters)
        loss = task.loss(half(*task.inputs(tensors.batch)), tensors.batch, tensors.weight) / batch.num_terms
        scaler.scale(loss).backward()
        for master, each in zip(masters, halves, strict=True):
            master.grad, each.grad = each.grad.float(), None  # type: ignore[union-attr]
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters, limit)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if scaler.get_scale() < before:  # as torch says whether a step was skipped: averages stay, as ours do
            num_skipped += 1
            return
        with torch.no_grad():
            torch._foreach_lerp_(averages, masters, 1 - DECAY)

    return take


def measure(world: World, folder: Path, num_steps: int, scaled: bool) -> list[float]:
    """See `Turns.figures`."""
    resolved = config.parse(TEXT, [f"train.steps={num_steps}", *(SCALED if scaled else [])])
    task = build_task(resolved.task)
    batches = batches_of(task)
    engine, _ = session.build(resolved, task, Source(None, batches), Mesh.of_copies(world))  # type: ignore[arg-type]
    plain, limit = copy.deepcopy(engine.model), resolved.train.gradient_clip_norm
    for module in plain.modules():
        module._forward_pre_hooks.clear()  # ours go by themselves
    parameters = list(plain.parameters())
    optimizer = adamw(plain, resolved.optimizer)
    take_scaled = make_scaled_step(task, plain, optimizer, limit)

    def bare(step: int, batch: StepBatch) -> None:
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(resolved.optimizer, step, num_steps)
        if scaled:
            take_scaled(batch)
            return
        tensors = batch.micro_batches[0].sent.tensors
        loss = task.loss(plain(*task.inputs(tensors.batch)), tensors.batch, tensors.weight) / batch.num_terms
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    turns = Turns(batches, bare)
    liveness = Liveness(lambda: world.gather_slowly(None), 60.0)
    writer = CheckpointWriter(RunPaths.of(str(folder), "run"), world, Identity(1, "", "", {}), 1, 0)
    tracker = MlflowTracker(lambda points, tags: None, dict, folder / "spool")
    recorder = Recorder([], tracker, num_steps)
    source: Any = Source(turns, batches)
    Quiet(resolved, world, engine, source, source, writer, recorder, StopRequest(), liveness).run(0)
    liveness.close()
    tracker.close(10.0)
    return [*turns.figures(), sum(each.numel() for each in parameters)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2050)
    parser.add_argument("--scaled", action="store_true", help="in fp16, with averages of the weights")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kftrain-bench-") as folder:
        names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ[LIVENESS_ENV] = folder
        with join_world(60.0) as world:
            print(json.dumps(measure(world, Path(folder), arguments.steps, arguments.scaled)))


if __name__ == "__main__":
    main()
