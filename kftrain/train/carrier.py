"""How a batch comes to the device: its tensors are built in the loader's thread, and copied while a step is computed.

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
    """What a loss is computed from, on the device."""

    batch: Batch
    weight: torch.Tensor
    """`[rows]` float32."""
    terms: torch.Tensor
    """Loss terms of each row, `[rows]` float32; 0 for padding."""


class Streams(Protocol):
    """What a device must know for copies beside the computation. A seam for tests: there is no GPU among them."""

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Within the block this thread's work goes to the side stream."""
        ...

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device, through pinned memory; does not wait. Within `aside`."""
        ...

    def mark(self) -> Any:
        """An event after all copies so far. Within `aside`."""
        ...

    def wait(self, event: Any) -> None:
        """What the calling thread asks of the device from here on begins after the event; the host does not wait."""
        ...

    def hold(self, tensor: torch.Tensor) -> None:
        """The memory of a tensor is not given away before what the calling thread has asked so far is done with it."""
        ...


class CudaStreams:
    """Of one GPU, by PyTorch."""

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
        return self._side.record_event()  # type: ignore[no-untyped-call]

    def wait(self, event: Any) -> None:
        """See `Streams`."""
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[no-untyped-call]

    def hold(self, tensor: torch.Tensor) -> None:
        """See `Streams`."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


@dataclass(frozen=True)
class Sent:
    """Tensors on their way."""

    tensors: Tensors
    streams: Streams | None = None
    event: Any = None

    def receive(self) -> Tensors:
        """The tensors, for the calling thread's work on the device."""
        if self.streams is not None:
            self.streams.wait(self.event)
            for tensor in (*self.tensors.batch.values(), self.tensors.weight, self.tensors.terms):
                self.streams.hold(tensor)
        return self.tensors


class Carrier:
    """Builds the tensors of micro batches and sends them to the device."""

    def __init__(self, task: Task, streams: Streams | None) -> None:
        """`streams`: None where batches are needed on the CPU."""
        self._task = task
        self._streams = streams

    @classmethod
    def to(cls, device: torch.device, task: Task) -> Carrier:
        """For the batches of a process with this device."""
        return cls(task, CudaStreams(device) if device.type == "cuda" else None)

    def send(self, micro: MicroBatch, terms: np.ndarray) -> Sent:
        """Called in the loader's thread. `terms`: of each row. Raises UserCodeError."""
        if self._streams is None:
            return Sent(built(self._task, micro, terms))
        streams = self._streams
        with streams.aside():
            found = built(self._task, micro, terms)
            batch = {name: streams.copy(tensor) for name, tensor in found.batch.items()}
            tensors = Tensors(batch, streams.copy(found.weight), streams.copy(found.terms))
            return Sent(tensors, streams, streams.mark())


def built(task: Task, micro: MicroBatch, terms: np.ndarray) -> Tensors:
    """The tensors of a micro batch on the CPU. Raises UserCodeError."""
    return Tensors(
        tensors_of(task, micro.arrays), torch.from_numpy(micro.weight), torch.from_numpy(terms.astype(np.float32))
    )


def to_device(tensors: Tensors, device: torch.device) -> Tensors:
    """The same on the device, by the calling thread."""
    if device.type == "cpu":
        return tensors
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.batch.items()}
    return Tensors(batch, tensors.weight.to(device), tensors.terms.to(device))
