"""The protocol of an engine, which computes the loop's steps: a batch in, tensors out, and no wait for the device.

The host runs ahead of an accelerator: it has asked for a step long before that is computed. Whatever needs a number on
the host (a log line, whether the training diverges) reads it later, when it has come by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from kftrain.checkpoint.staging import State
from kftrain.config import Config
from kftrain.data.expanded import ValidationRows
from kftrain.data.loader import StepBatch, TrainLoader
from kftrain.errors import CheckpointError
from kftrain.evaluate.score import Statistics
from kftrain.parallel.distributed import Part
from kftrain.parallel.mesh import Mesh
from kftrain.run.commit import CheckpointManifest
from kftrain.tasks.base import Task, TrainingTask
from kftrain.train.completing import ExportDescription
from kftrain.train.islands import Islands
from kftrain.train.remote_rows import RemoteRows

Agree = Callable[[list[float]], list[float]]
"""Sums values over all processes of an island. Collective."""


@dataclass(frozen=True)
class StepResult:
    """The numbers that one step measured: scalars on the device, which nobody has waited for."""

    local_loss_sum: torch.Tensor
    """Sum of this process's loss terms divided by the global count; the sum over processes is the mean loss."""
    gradient_norm: torch.Tensor
    """Global norm before clipping. Where it is not finite, parameters and optimizer are as before."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further numbers, which are the same on all processes: for the log and the tracker."""


DISPENSABLE = {"averages"}
"""Parts of a checkpoint that a training may go on without."""


class Parts:
    """The parts of one training's state, by name; the names are the first keys in the files of a checkpoint.

    Each part has the version of its form. A release that does not know a part, or knows it in another form, must not go
    on without it: it refuses the checkpoint.
    """

    def __init__(self, parts: dict[str, Part]) -> None:
        self._parts = parts

    @property
    def versions(self) -> dict[str, int]:
        """Version of each part, by name."""
        return {name: part.version for name, part in self._parts.items()}

    def save(self) -> State:
        """Return the whole state, as it is now. Collective."""
        return {name: part.save() for name, part in self._parts.items()}

    def load(self, state: State) -> None:
        """Put a state back: the inverse of `save`. Optional parts that it does not have stay as they are."""
        for name, part in self._parts.items():
            if name in state or not part.is_optional:
                part.load(state[name])

    def list_missing(self, versions: dict[str, int]) -> list[str]:
        """List the optional parts that a checkpoint with these `versions` does not have."""
        return [name for name, part in self._parts.items() if part.is_optional and name not in versions]

    def list_dispensable(self, versions: dict[str, int]) -> list[str]:
        """List the parts of a checkpoint with these `versions` that this training has not, and can do without."""
        return [name for name in versions if name in DISPENSABLE and name not in self._parts]

    def begin(self, names: Collection[str], num_steps: int) -> None:
        """Begin these optional parts anew after so many steps, beside others that were loaded."""
        for name in names:
            self._parts[name].begin(num_steps)

    def require_same(self, versions: dict[str, int], where: str) -> None:
        """Raises CheckpointError where a checkpoint at `where` has other parts than these, or other `versions`.

        It may lack optional ones, and have those that a training can do without.
        """
        needed = {name: version for name, version in self.versions.items() if name not in self.list_missing(versions)}
        versions = {name: versions[name] for name in versions if name not in self.list_dispensable(versions)}
        # Sorted, so that all processes name the same part.
        odd = next((name for name in sorted({*versions, *needed}) if versions.get(name) != needed.get(name)), None)
        if odd is None:
            return
        if odd not in versions:
            what = f"the checkpoint has no {odd!r}, which this training needs"
        elif odd not in needed:
            what = f"the checkpoint holds {odd!r}, which this release or this training does not know"
        else:
            what = f"the checkpoint holds version {versions[odd]} of {odd!r}, this release reads version {needed[odd]}"
        fix = "resume with the release and the settings that wrote it, or start a new run"
        raise CheckpointError(what, where=where, fix=fix)


class Engine(Protocol):
    """Computes steps and evaluations on a mesh. All but the properties is collective."""

    @property
    def mesh(self) -> Mesh:
        """Layout of the processes: who reads which samples, and who shares what."""

    @property
    def task(self) -> TrainingTask:
        """The task that is trained: it makes batches, losses and metrics."""

    @property
    def model(self) -> nn.Module:
        """The model as it is trained: its parameters are whole or parts, as the engine keeps them."""

    @property
    def state(self) -> Parts:
        """Parts that a checkpoint must hold."""

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters of the model, over all processes."""

    @property
    def num_norm_samples(self) -> int | None:
        """Number of samples that share statistics of batch norms; None where the model trains none."""

    @property
    def rows(self) -> RemoteRows | None:
        """Rows of the model that lie on servers; None where none do."""

    @property
    def islands(self) -> Islands | None:
        """The outer parameters, where there are several islands."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the steps that follow."""

    def step(self, batch: StepBatch, num_terms: int, agree: Agree) -> StepResult:
        """Take one step. `num_terms`: its loss terms over all processes of this island.

        `agree` is called once, while the device computes: what else must be known of the others may travel with it.
        """

    def evaluate(
        self, dataset: ValidationRows, batch_size: int, max_samples: int, on_batch: Callable[[], None]
    ) -> Statistics | None:
        """Return statistics of the first `max_samples` samples of a dataset (0: all); None but on the first process."""


EngineFactory = Callable[[Config, Task, TrainLoader, Mesh, CheckpointManifest | None], tuple[Engine, ExportDescription]]
"""Type of a function that builds an engine with all that a step needs; and tells what will stand beside the export of
its model. It is given the manifest of the checkpoint that is loaded into it; without one it has the weights that the
run starts with. Collective. It raises ConfigError and UserCodeError for what cannot be trained or exported."""


class StepNumbers:
    """The numbers of one step on their way to the host."""

    def __init__(self, result: StepResult) -> None:
        """Ask for the copy, and do not wait for it."""
        # Into pinned memory, or the copy would wait; the event is behind it, so that `read` waits for this step only
        # and not for the next one, which was asked for meanwhile. All numbers go in one copy, in fp64, which holds
        # each of them unchanged.
        self._names = list(result.metrics)
        scalars = [result.local_loss_sum, result.gradient_norm, *result.metrics.values()]
        self._event: torch.cuda.Event | None = None
        if scalars[1].device.type == "cuda":
            numbers = torch.stack([scalar.double() for scalar in scalars])
            host = torch.empty(len(scalars), dtype=torch.float64, pin_memory=True)
            scalars = list(host.copy_(numbers, non_blocking=True).unbind())
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._scalars = scalars

    def read(self) -> tuple[float, float, dict[str, float]]:
        """Return the local sum of the loss, the gradient norm and the metrics; wait for their step, not for later."""
        if self._event is not None:
            self._event.synchronize()
        loss, norm, *others = (float(scalar.numpy()) for scalar in self._scalars)
        return loss, norm, dict(zip(self._names, others, strict=True))
