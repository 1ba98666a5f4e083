"""The way of a batch to the device: tensors are built in the loader's thread, and copied while a step is computed.

On a GPU the copy runs on a stream of its own, from pinned memory, so that neither the host nor the step before waits
for it; the step that needs it waits on the device for the copy's end. On the CPU a batch is where it is needed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from kftrain.data.loader import MicroBatch
from kftrain.tasks.base import Task
from kftrain.tasks.prepare import tensors_of

if TYPE_CHECKING:
    from kftrain.tasks.base import Batch


@dataclass(frozen=True)
class Tensors:
    """The tensors that a loss is computed from, on the device."""

    batch: Batch
    weight: torch.Tensor
    """`[rows]` float32."""
    terms: torch.Tensor
    """Loss terms of each row, `[rows]` float32; 0 for padding."""


class Streams(Protocol):
    """A device's means to copy beside the computation. A seam for tests: there is no GPU among them."""

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Send this thread's work to the side stream within the block."""
        ...

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor to the device, through pinned memory; do not wait. Within `aside`."""
        ...

    def mark(self) -> Any:
        """Return an event after all copies so far. Within `aside`."""
        ...

    def wait(self, event: Any) -> None:
        """Let the device begin what the calling thread asks from here on after the event; the host does not wait."""
        ...

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor until the device has done what the calling thread has asked and will ask of it.

        It was taken on the side stream, which may use it for the next copy as soon as Python forgets the tensor; the
        computation that reads it is on another stream, and may not have begun by then.
        """
        ...


class CudaStreams:
    """The streams of one GPU, by PyTorch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """See `Streams`. It is the thread's device, too: pinning would otherwise begin a context on the first one."""
        context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return context

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Streams`. Pinned memory is kept by PyTorch until the copy from it has ended."""
        pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
        return pinned.to(self._device, non_blocking=True)

    def mark(self) -> Any:
        """See `Streams`."""
        return self._side.record_event()

    def wait(self, event: Any) -> None:
        """See `Streams`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def hold(self, tensor: torch.Tensor) -> None:
        """See `Streams`."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


@dataclass(frozen=True)
class Sent:
    """Tensors on their way to the device."""

    tensors: Tensors
    streams: Streams | None = None
    event: Any = None

    def receive(self) -> Tensors:
        """Return the tensors, for the calling thread's work on the device."""
        if self.streams is not None:
            self.streams.wait(self.event)
            for tensor in (*self.tensors.batch.values(), self.tensors.weight, self.tensors.terms):
                self.streams.hold(tensor)
        return self.tensors


class Carrier:
    """Builds the tensors of micro batches and sends them to the device."""

    def __init__(self, task: Task, streams: Streams | None) -> None:
        """Build for a task. `streams`: None where batches are needed on the CPU."""
        self._task = task
        self._streams = streams

    @classmethod
    def to(cls, device: torch.device, task: Task) -> Carrier:
        """Make the carrier for the batches of a process with this device."""
        return cls(task, CudaStreams(device) if device.type == "cuda" else None)

    def send(self, micro: MicroBatch, terms: np.ndarray) -> Sent:
        """Build a micro batch and send it, in the loader's thread. `terms`: of each row. Raises UserCodeError."""
        if self._streams is None:
            return Sent(built(self._task, micro, terms))
        streams = self._streams
        with streams.aside():
            host = built(self._task, micro, terms)
            batch = {name: streams.copy(tensor) for name, tensor in host.batch.items()}
            tensors = Tensors(batch, streams.copy(host.weight), streams.copy(host.terms))
            return Sent(tensors, streams, streams.mark())  # marked last: the event stands for all of the copies


def built(task: Task, micro: MicroBatch, terms: np.ndarray) -> Tensors:
    """Build the tensors of a micro batch on the CPU. Raises UserCodeError."""
    return Tensors(
        tensors_of(task, micro.arrays), torch.from_numpy(micro.weight), torch.from_numpy(terms.astype(np.float32))
    )


def to_device(tensors: Tensors, device: torch.device) -> Tensors:
    """Copy the tensors to the device, by the calling thread."""
    if device.type == "cpu":
        return tensors
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.batch.items()}
    return Tensors(batch, tensors.weight.to(device), tensors.terms.to(device))
