"""One optimizer step over all processes: accumulate, exchange, clip, update.

The loss of a step is the sum of its terms over the count of its terms, over all processes and micro batches. The count
is known before the first forward pass (`Task.count_terms`), so each micro batch contributes sum / count and gradients
need no rescaling afterwards. Gradients are averaged over processes by FSDP; multiplying by the number of processes
makes that a sum. Uneven shares and padding are therefore exact, and one process gives the same update as
many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kftrain.data.dataset import ShardedDataset
from kftrain.data.loader import MicroBatch, StepBatch
from kftrain.errors import UserCodeError
from kftrain.evaluate.score import Statistics, score
from kftrain.models import modes
from kftrain.models.output import split_output
from kftrain.parallel import blocks
from kftrain.parallel.buffers import CombinedBuffers
from kftrain.parallel.gradients import UsedParameters
from kftrain.parallel.transforms import Distributed
from kftrain.plugins import user_code
from kftrain.tasks.base import Task
from kftrain.tasks.prepare import prepare


@dataclass(frozen=True)
class StepResult:
    """What one step measured."""

    local_loss_sum: torch.Tensor
    """Sum of this process's loss terms divided by the global count; the sum over processes is the mean loss."""
    gradient_norm: float
    """Global norm before clipping."""
    updated: bool
    """False where the norm was not finite: parameters and optimizer are as before."""


class Stepper:
    """Holds what every step needs: the distributed model, its optimizer, the task."""

    def __init__(
        self,
        distributed: Distributed,
        optimizer: torch.optim.Optimizer,
        task: Task,
        calls: blocks.Calls,
        clip_norm: float,
        buffers: CombinedBuffers,
    ) -> None:
        """`calls`: of the model and its blocks, in each computation of the loss; unless it is sharded it may vary."""
        model = distributed.model
        self.model, self.optimizer, self.task, self.mesh = model, optimizer, task, distributed.mesh
        self._distributed, self._clip_norm, self._calls = distributed, clip_norm, calls
        self._buffers = buffers
        self._modes = modes.modes_of(model)
        self._used = UsedParameters(model, self.mesh.world) if distributed.is_sharded else None
        self._log = blocks.CallLog(model, set(calls) - {blocks.ROOT}) if distributed.is_sharded else None

    def count_terms(self, batch: StepBatch) -> int:
        """Loss terms in this process's share of the step."""
        return int(sum(float(np.sum(terms_of(self.task, micro))) for micro in batch.micro_batches))

    def run(self, batch: StepBatch, num_terms: int) -> StepResult:
        """Takes one step. `num_terms`: loss terms of the step over all processes. Collective."""
        modes.restore(self._modes)
        self._buffers.begin()
        total = torch.zeros((), dtype=torch.float64)
        last = len(batch.micro_batches) - 1
        with self._distributed.computing():
            for index, micro in enumerate(batch.micro_batches):
                self._distributed.accumulate(last=index == last)
                loss = self._loss(micro) / max(num_terms, 1)
                (loss * self._distributed.num_averaged).backward()  # type: ignore[no-untyped-call]
                total = total + loss.detach().double()
        self._distributed.hand_over()
        self._buffers.combine(sum(float(micro.weight.sum()) for micro in batch.micro_batches))
        if self._used is not None:
            self._used.drop_unused()
        norm = self._clip()
        finite = bool(np.isfinite(norm))
        if finite:
            self.optimizer.step()
            after_step(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(total, norm, finite)

    def evaluate(
        self, dataset: ShardedDataset, batch_size: int, max_samples: int, on_batch: Callable[[], None]
    ) -> Statistics:
        """Statistics of the first samples (0: all) of a dataset, the same on every process. Collective."""
        with self._distributed.computing():
            return score(self.model, self.task, dataset, self.mesh, batch_size, max_samples, on_batch)[0]

    def _loss(self, micro: MicroBatch) -> torch.Tensor:
        if self._log is None:
            return loss_of(self.model, self.task, micro, self.mesh.world.device)
        self._log.take()  # what a validation has called
        loss = loss_of(self.model, self.task, micro, self.mesh.world.device)
        blocks.require_same_calls(self._calls, self._log.take())
        return loss

    def _clip(self) -> float:
        limit = self._clip_norm if self._clip_norm > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def terms_of(task: Task, micro: MicroBatch) -> np.ndarray:
    """Loss terms of each row, `[rows]`; none for padding. Raises UserCodeError for another shape."""
    with user_code("task.count_terms"):
        counts = np.asarray(task.count_terms(micro.arrays))
    if counts.shape != micro.weight.shape:
        raise UserCodeError(
            f"must return one number for each of {len(micro.weight)} rows, got {list(counts.shape)}",
            where="task.count_terms",
        )
    weighted: np.ndarray = counts * micro.weight
    return weighted


def loss_of(model: nn.Module, task: Task, micro: MicroBatch, device: torch.device) -> torch.Tensor:
    """The sum of the loss terms, fp32, auxiliary ones among them.

    Raises UserCodeError for what is no scalar with a gradient.
    """
    batch, inputs = prepare(task, micro.arrays, device)
    with user_code("model.forward"):
        found = split_output(model(*inputs), len(micro.weight))
    with user_code("task.loss"):
        loss = task.loss(found.output, batch, torch.from_numpy(micro.weight).to(device))
    if not isinstance(loss, torch.Tensor) or loss.dim():
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UserCodeError(f"must return a scalar, got {shown}", where="task.loss", fix="return the sum of all terms")
    if not loss.requires_grad:
        raise UserCodeError("depends on no parameter that is trained", where="task.loss")
    if found.auxiliary is None:
        return loss.float()
    terms = torch.from_numpy(terms_of(task, micro).astype(np.float32)).to(device)
    return loss.float() + (found.auxiliary.float() * terms).sum()


def after_step(model: nn.Module) -> None:
    """Calls the model's own `after_step`, where it has one."""
    hook = getattr(model, "after_step", None)
    if callable(hook):
        with torch.no_grad(), user_code("model.after_step"):
            hook()


def seed_step(seed: int, step: int, data_rank: int) -> None:
    """Seeds torch for one step of one process: dropout after a resume equals dropout without, no state is saved."""
    digest = hashlib.sha256(f"{seed}/{step}/{data_rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
