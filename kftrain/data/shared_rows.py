"""Memory that a process shares with its data workers: a step's rows are decoded into it and never copied again.

A slot is memory without a name (`memfd`): it is gone with the last process that has it, however that has ended, it
leaves nothing in /dev/shm, and /dev/shm may be as small as a pod's is by default. A slot is used again once nobody has
an array of it any more.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

from kftrain.data.schema import Arrays

Fields = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype and shape of a row of each field."""

NUMBERS, POSITIONS = "/numbers", "/positions"
"""Names of what a slot holds beside the rows: which samples they are, and where these stand in the training order."""

_ALIGNMENT_BYTES = 64


class Slot:
    """Shared memory of one step."""

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.descriptor = _make_memory()
        os.ftruncate(self.descriptor, num_bytes)
        self.memory = mmap.mmap(self.descriptor, num_bytes)

    def __del__(self) -> None:
        """Close the descriptor; the memory itself lives as long as arrays of it."""
        os.close(self.descriptor)


class _Lease:
    """Owner of the memory for the arrays of one use of a slot: it goes when the last of them does."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        memory = np.frombuffer(slot.memory, np.uint8)
        address, _ = memory.__array_interface__["data"]
        self.__array_interface__ = {"shape": memory.shape, "typestr": "|u1", "data": (address, False), "version": 3}


class Slots:
    """Slots of memory, as many as are needed: those in use, and those that are free again."""

    def __init__(self, fields: Fields, num_rows: int) -> None:
        """Make no slot yet; `num_rows`: of a step."""
        self._fields = [(NUMBERS, "<i8", ()), (POSITIONS, "<i8", ()), *fields]
        self._num_rows = num_rows
        self._free: deque[Slot] = deque()
        self.num_slots = 0
        """Made so far."""

    def take(self) -> tuple[Slot, Arrays]:
        """Take a slot and the arrays in it; it is free again when all of these are gone, and views of them."""
        try:
            slot = self._free.popleft()
        except IndexError:
            slot = Slot(self.num_slots, num_bytes(self._fields, self._num_rows))
            self.num_slots += 1
        # Arrays hold the lease, not the slot: its finalizer runs when the last view of the memory is gone, in any
        # thread, and `deque.append` needs no lock.
        lease = _Lease(slot)
        weakref.finalize(lease, self._free.append, slot).atexit = False
        return slot, arrays_in(np.asarray(lease), self._fields, self._num_rows)


def map_slot(descriptor: int, fields: Fields, num_rows: int) -> Arrays:
    """Map the arrays in a slot of another process."""
    fields = [(NUMBERS, "<i8", ()), (POSITIONS, "<i8", ()), *fields]
    memory = mmap.mmap(descriptor, num_bytes(fields, num_rows))
    return arrays_in(np.frombuffer(memory, np.uint8), fields, num_rows)


def num_bytes(fields: Fields, num_rows: int) -> int:
    """Count the bytes of a slot."""
    return max(1, sum(_align(_count_bytes(dtype, shape, num_rows)) for _, dtype, shape in fields))


def arrays_in(memory: np.ndarray, fields: Fields, num_rows: int) -> Arrays:
    """View memory, uint8 `[bytes]`, as arrays of so many rows, one after the other."""
    arrays, start = {}, 0
    for name, dtype, shape in fields:
        size = _count_bytes(dtype, shape, num_rows)
        arrays[name] = memory[start : start + size].view(dtype).reshape(num_rows, *shape)
        start += _align(size)
    return arrays


def _count_bytes(dtype: str, shape: Sequence[int], num_rows: int) -> int:
    size: int = np.dtype(dtype).itemsize * num_rows
    for length in shape:
        size *= length
    return size


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _make_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kftrain batch")
    with tempfile.TemporaryFile() as file:  # elsewhere than on Linux: a file without a name
        return os.dup(file.fileno())
