"""A copy of a state in host memory, so that training may go on while it is written.

Every tensor is copied once, from wherever it lies, into memory that is kept for the next save: a save needs that much
in any case, and new memory costs more time than the copy. A distributed tensor's copy holds the local part of it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_DTensor: Any = DTensor
"""DTensor with any arguments: its constructor is not typed."""

State = dict[str, Any]

Place = tuple[Any, ...]
"""Path of keys and indices that leads to a tensor in the state."""


class Staging:
    """The memory of one process's copies; the next copy overwrites the one before, which must be written by then."""

    def __init__(self) -> None:
        self._buffers: dict[Place, torch.Tensor] = {}

    @torch.no_grad()
    def copy_of(self, state: State) -> State:
        """Copy the state as it is now: tensors to the CPU, into the memory of the copy before; nothing is shared."""
        copied: State = self._copy(state, ())
        return copied

    def _copy(self, value: Any, place: Place) -> Any:
        if isinstance(value, DTensor):
            local = self._copy(value.to_local(), place)
            return _DTensor(local, value._spec, requires_grad=False)  # from_local would bring it back to the mesh's GPU
        if isinstance(value, torch.Tensor):
            # Blocking: from a GPU this waits for all work asked for so far. When it returns, the optimizer may go on
            # to change the tensor, and the thread may read the copy.
            return self._take_buffer(place, value).copy_(value)
        if isinstance(value, dict):
            return {key: self._copy(item, (*place, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self._copy(item, (*place, number)) for number, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return copy.deepcopy(value)

    def _take_buffer(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[place] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffer
