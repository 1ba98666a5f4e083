"""What the loop asks of whatever computes its steps: a batch in, tensors out, and no wait for the device.

The host runs ahead of an accelerator: it has asked for a step long before that is computed. Whatever needs a number on
the host (a log line, whether the training diverges) reads it later, when it has come by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kftrain.data.expanded import ValidationRows
from kftrain.data.loader import StepBatch
from kftrain.evaluate.score import Statistics
from kftrain.parallel.mesh import Mesh
from kftrain.tasks.base import TrainingTask
from kftrain.train.parts import Parts

Agree = Callable[[list[float]], list[float]]
"""Sums values over all processes. Collective."""


@dataclass(frozen=True)
class StepResult:
    """The numbers that one step measured: scalars on the device, which nobody has waited for."""

    local_loss_sum: torch.Tensor
    """Sum of this process's loss terms divided by the global count; the sum over processes is the mean loss."""
    gradient_norm: torch.Tensor
    """Global norm before clipping. Where it is not finite, parameters and optimizer are as before."""


class Engine(Protocol):
    """Computes steps and evaluations on a mesh. All but the properties is collective."""

    @property
    def mesh(self) -> Mesh:
        """Layout of the processes: who reads which samples, and who shares what."""

    @property
    def task(self) -> TrainingTask:
        """The task that is trained."""

    @property
    def state(self) -> Parts:
        """Parts that a checkpoint must hold."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the steps that follow."""

    def step(self, batch: StepBatch, num_terms: int, agree: Agree) -> StepResult:
        """Take one step. `num_terms`: its loss terms over all processes.

        `agree` is called once, while the device computes: what else must be known of the others may travel with it.
        """

    def evaluate(
        self, dataset: ValidationRows, batch_size: int, max_samples: int, on_batch: Callable[[], None]
    ) -> Statistics | None:
        """Return statistics of the first `max_samples` samples of a dataset (0: all); None but on the first process."""


class Measured:
    """The numbers of one step on their way to the host."""

    def __init__(self, result: StepResult) -> None:
        """Ask for the copy, and do not wait for it."""
        # Into pinned memory, or the copy would wait; the event is behind it, so that `read` waits for this step only
        # and not for the next one, which was asked for meanwhile.
        scalars = [result.local_loss_sum, result.gradient_norm]
        self._event: torch.cuda.Event | None = None
        if scalars[1].device.type == "cuda":
            numbers = torch.stack([scalar.double() for scalar in scalars])
            host = torch.empty(len(scalars), dtype=torch.float64, pin_memory=True)
            scalars = list(host.copy_(numbers, non_blocking=True).unbind())
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._scalars = scalars

    def read(self) -> tuple[float, float]:
        """Return the local sum of the loss and the gradient norm; wait for their step, not for what came after it."""
        if self._event is not None:
            self._event.synchronize()
        loss, norm = (float(scalar.numpy()) for scalar in self._scalars)
        return loss, norm
