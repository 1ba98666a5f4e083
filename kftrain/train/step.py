"""One optimizer step over all processes: accumulate, exchange, clip, update.

The loss of a step is the sum of its terms over the count of its terms, over all processes and micro batches. The count
is known before the first forward pass (`Task.count_terms`), so each micro batch contributes sum / count and gradients
need no rescaling afterwards. Gradients are averaged over processes by FSDP and DDP; multiplying by the number of
processes makes that a sum. Uneven shares and padding are therefore exact, and one process gives the same update as
many.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kftrain.data.loader import StepBatch
from kftrain.parallel import wrap
from kftrain.parallel.world import World
from kftrain.plugins import user_code
from kftrain.tasks.base import Task


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
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        layout: wrap.Layout,
        world: World,
        clip_norm: float,
    ) -> None:
        self.model, self.optimizer, self.task = model, optimizer, task
        self._layout, self._world, self._clip_norm = layout, world, clip_norm

    def count_terms(self, batch: StepBatch) -> int:
        """Loss terms in this process's share of the step."""
        with user_code("task.count_terms"):
            counts = [self.task.count_terms(micro.arrays) * micro.weight for micro in batch.micro_batches]
        return int(sum(float(np.sum(count)) for count in counts))

    def run(self, batch: StepBatch, num_terms: int) -> StepResult:
        """Takes one step. `num_terms`: loss terms of the step over all processes. Collective."""
        self.model.train()
        total = torch.zeros((), dtype=torch.float64)
        last = len(batch.micro_batches) - 1
        for index, micro in enumerate(batch.micro_batches):
            with wrap.accumulating(self.model, last=index == last):
                loss = self._loss(micro.arrays, micro.weight) / max(num_terms, 1)
                (loss * self._world.size).backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach().double()
        norm = self._clip()
        finite = bool(np.isfinite(norm))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(total, norm, finite)

    def _loss(self, arrays: dict[str, np.ndarray], weight: np.ndarray) -> torch.Tensor:
        device = self._world.device
        with user_code("task.loss"), wrap.compute_context(self._layout, device):
            tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in self.task.batch(arrays).items()}
            return self.task.loss(self.model, tensors, torch.from_numpy(weight).to(device)).float()

    def _clip(self) -> float:
        limit = self._clip_norm if self._clip_norm > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch for one step of one process: dropout after a resume equals dropout without, no state is saved."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
