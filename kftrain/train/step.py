"""Computes one process's share of a step: tensors on their way to the device, loss terms and their sum, random numbers.

Tensors are built in the loader's thread, and copied while the step before is computed. On a GPU the copy runs on a
stream of its own, from pinned memory, so that neither the host nor the step before waits for it; the step that needs it
waits on the device for the copy's end. On the CPU a batch is where it is needed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kftrain.core.plugins import user_code
from kftrain.data.loader import MicroBatch
from kftrain.errors import ConfigError, UserCodeError
from kftrain.models.output import split_output
from kftrain.parallel.chunked_logits import compute_within
from kftrain.parallel.sequences import WHOLE_SEQUENCES, SequenceCut
from kftrain.tasks.base import TrainingTask
from kftrain.tasks.prepare import arguments_of, tensors_of

if TYPE_CHECKING:
    from kftrain.tasks.base import Batch


@dataclass(frozen=True)
class Tensors:
    """The tensors that a loss is computed from, on the device."""

    batch: Batch
    weight: torch.Tensor
    """Weight of each row, `[rows]` float32; 0 for padding."""
    terms: torch.Tensor
    """Loss terms of each row, `[rows]` float32; 0 for padding."""


class CudaStreams:
    """A GPU's means to copy beside the computation. Tests have others of this shape: no GPU is among their machines."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Send this thread's work to the side stream within the block.

        The GPU is the thread's device there, too: pinning would otherwise begin a context on the first.
        """
        context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return context

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor to the device, through pinned memory; do not wait. Within `aside`."""
        # PyTorch keeps pinned memory until the copy from it has ended, although nothing here holds it.
        pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
        return pinned.to(self._device, non_blocking=True)

    def mark(self) -> Any:
        """Return an event after all copies so far. Within `aside`."""
        return self._side.record_event()

    def wait(self, event: Any) -> None:
        """Let the device begin what the calling thread asks from here on after the event; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor until the device has done what the calling thread has asked and will ask of it.

        It was taken on the side stream, which may use it for the next copy as soon as Python forgets the tensor; the
        computation that reads it is on another stream, and may not have begun by then.
        """
        tensor.record_stream(torch.cuda.current_stream(self._device))


@dataclass(frozen=True)
class Sent:
    """Tensors on their way to the device, with the event after which they are there; on the CPU without one."""

    tensors: Tensors
    streams: CudaStreams | None = None
    event: Any = None

    def receive(self) -> Tensors:
        """Return the tensors, for the calling thread's work on the device."""
        if self.streams is not None:  # in the thread that computes: both calls are about its own stream
            self.streams.wait(self.event)
            for tensor in (*self.tensors.batch.values(), self.tensors.weight, self.tensors.terms):
                self.streams.hold(tensor)
        return self.tensors


class Carrier:
    """Builds the tensors of micro batches and sends them to the device."""

    def __init__(self, task: TrainingTask, streams: CudaStreams | None) -> None:
        """Build for a task. `streams`: None where batches are needed on the CPU."""
        self._task = task
        self._streams = streams

    @classmethod
    def to(cls, device: torch.device, task: TrainingTask) -> Carrier:
        """Make the carrier for the batches of a process with this device."""
        return cls(task, CudaStreams(device) if device.type == "cuda" else None)

    def send(self, micro: MicroBatch, terms: np.ndarray) -> Sent:
        """Build a micro batch and send it, in the loader's thread. `terms`: of each row. Raises UserCodeError."""
        if self._streams is None:
            return Sent(build_tensors(self._task, micro, terms))
        streams = self._streams
        with streams.aside():
            host = build_tensors(self._task, micro, terms)
            batch = {name: streams.copy(tensor) for name, tensor in host.batch.items()}
            tensors = Tensors(batch, streams.copy(host.weight), streams.copy(host.terms))
            return Sent(tensors, streams, streams.mark())  # marked last: the event stands for all of the copies


def build_tensors(task: TrainingTask, micro: MicroBatch, terms: np.ndarray) -> Tensors:
    """Build the tensors of a micro batch on the CPU. Raises UserCodeError."""
    return Tensors(
        tensors_of(task, micro.arrays), torch.from_numpy(micro.weight), torch.from_numpy(terms.astype(np.float32))
    )


def count_loss_terms(task: TrainingTask, micro: MicroBatch) -> np.ndarray:
    """Count the loss terms of each row, `[rows]`; 0 for padding. Raises UserCodeError for another shape."""
    with user_code("task.count_terms"):
        counts = np.asarray(task.count_terms(micro.arrays))
    if counts.shape != micro.weight.shape:
        raise UserCodeError(
            f"must return one number for each of {len(micro.weight)} rows, got {list(counts.shape)}",
            where="task.count_terms",
        )
    weighted: np.ndarray = counts * micro.weight
    return weighted


def receive_tensors(task: TrainingTask, micro: MicroBatch, device: torch.device) -> Tensors:
    """Return the tensors that were sent to the device; build and copy them now if none were."""
    if micro.sent is not None:
        sent: Tensors = micro.sent.receive()
        return sent
    host = build_tensors(task, micro, count_loss_terms(task, micro))
    if device.type == "cpu":
        return host
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in host.batch.items()}
    return Tensors(batch, host.weight.to(device), host.terms.to(device))


def compute_loss_sum(
    model: Callable[..., Any],
    task: TrainingTask,
    tensors: Tensors,
    cut: SequenceCut = WHOLE_SEQUENCES,
    takes_weights: bool = True,
) -> torch.Tensor:
    """Compute the sum of the loss terms, fp32, auxiliary ones among them.

    `cut`: the places that the model has computed; it is given whole sequences. `takes_weights`: False for a model that
    is known to have no `take_row_weights`, since a module takes long to say so.

    Raises UserCodeError for what is no scalar with a gradient.
    """
    inputs = arguments_of(task, tensors.batch)
    with user_code("model.forward"):
        if takes_weights:
            give_row_weights(model, tensors.weight)
        loss: torch.Tensor = compute_within(
            model, inputs, lambda returned: finish_loss_sum(returned, task, tensors, cut)
        )
        return loss


def give_row_weights(model: Any, weights: torch.Tensor) -> None:
    """Tell a model that wants to know it which rows of the next pass count; see `Model.take_row_weights`."""
    take: Any = getattr(model, "take_row_weights", None)
    if callable(take):
        take(weights)


def finish_loss_sum(
    returned: Any, task: TrainingTask, tensors: Tensors, cut: SequenceCut = WHOLE_SEQUENCES
) -> torch.Tensor:
    """Compute the sum of the loss terms from what the model returned; see `compute_loss_sum`."""
    with user_code("model.forward"):
        answer = split_output(returned, len(tensors.weight))
    with user_code("task.loss"):
        batch = cut.cut_batch(tensors.batch, task.sequence_dims) if cut.size > 1 else tensors.batch
        loss = task.loss(answer.output, batch, tensors.weight)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UserCodeError(f"must return a scalar, got {shown}", where="task.loss", fix="return the sum of all terms")
    if not loss.requires_grad:
        raise UserCodeError("depends on no parameter that is trained", where="task.loss")
    if answer.auxiliary is not None and cut.size > 1:
        what = "a model's auxiliary loss is of whole rows, of which each process has computed a part"
        raise ConfigError(what, where="parallel.context", value=cut.size, fix="set it to 1, or leave the loss out")
    if answer.auxiliary is None:
        return loss.float()  # before it is divided and summed over micro batches, which would round a bf16 each time
    # Per row, times the row's terms: the step divides by the count of all terms, so it comes to a mean over terms, and
    # padding, which has none, adds nothing.
    return loss.float() + (answer.auxiliary.float() * tensors.terms).sum()


def has_after_step(model: nn.Module) -> bool:
    """Tell whether the model has an `after_step` of its own."""
    return callable(getattr(model, "after_step", None))


def call_after_step(model: nn.Module) -> bool:
    """Call the model's own `after_step`, where it has one; return True where that uses parameters.

    Raises UserCodeError where it replaces one.
    """
    # The optimizer keeps the parameters that it was built with: it would go on with the old one. Duplicates are looked
    # at, too, for a tied parameter may be replaced in one of its places.
    hook, watch = getattr(model, "after_step", None), _DataIntoParts()
    if callable(hook):
        before = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad(), user_code("model.after_step"), watch:
            hook()
        now = dict(model.named_parameters(remove_duplicate=False))
        name = next((name for name in before | now if before.get(name) is not now.get(name)), None)
        if name is not None:
            fix = "change its values: parameter.copy_(…)"
            raise UserCodeError("puts another parameter in place", where="model.after_step", value=name, fix=fix)
    return watch.has_seen_parameters


def ask_metrics(model: nn.Module) -> dict[str, float]:
    """Ask the model for numbers of its last step, where it has any; those that are not finite are left out."""
    method: Any = getattr(model, "step_metrics", None)
    if not callable(method):
        return {}
    with user_code("model.step_metrics"):
        numbers = {str(name): float(value) for name, value in method().items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _DataIntoParts(TorchFunctionMode):
    """Lets `parameter.data = …` copy into a distributed parameter: its memory is that of its part, and must stay."""

    has_seen_parameters = False

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.has_seen_parameters |= any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves((arguments, keywords)))
        if function == _SET_DATA and isinstance(arguments[0], DTensor):
            return arguments[0].detach().copy_(arguments[1])
        return function(*arguments, **(keywords or {}))


def seed_step(seed: int, step: int, data_rank: int, device: torch.device) -> None:
    """Seed torch for one step of one process: dropout after a resume equals dropout without, and no state is saved.

    Only the generators that the process uses: `torch.manual_seed` takes as long as a small model's forward pass.
    """
    # By the data rank: processes that share samples (tensor) compute alike, and must draw alike.
    seed_generators(_hash_seeds(seed, step // SEEDS_TOGETHER, data_rank)[step % SEEDS_TOGETHER], device)


SEEDS_TOGETHER = 64
"""Number of steps whose seeds are hashed at once: alone, a hash waits 20 µs for its code to come into the cache."""


@functools.lru_cache(maxsize=1)
def _hash_seeds(seed: int, block: int, data_rank: int) -> list[int]:
    steps = range(block * SEEDS_TOGETHER, (block + 1) * SEEDS_TOGETHER)
    digests = [hashlib.sha256(f"{seed}/{step}/{data_rank}".encode()).digest() for step in steps]
    return [int.from_bytes(digest[:8], "little") >> 1 for digest in digests]


def seed_generators(number: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of a device."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)
