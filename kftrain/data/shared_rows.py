"""Memory that a process shares with its data workers: a step's rows are decoded into it and never copied again.

It has no name (`memfd`): it is gone with the last process that has it, however that has ended, it leaves nothing in
/dev/shm, and /dev/shm may be as small as a pod's is by default. It is cut into slots of one step each, and grows by
them; a slot is used again once nobody has an array of it any more.
"""

from __future__ import annotations

import math
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

SPARE_SLOTS = 2
"""Free slots that keep their memory: that of further ones goes back to the system."""


class Slots:
    """Slots of the memory behind a descriptor, as many as are needed; either process maps those that it uses."""

    def __init__(self, descriptor: int, fields: Fields, num_rows: int) -> None:
        """Make no slot yet; `num_rows`: of a step."""
        self._descriptor = descriptor
        self._fields = [(NUMBERS, "<i8", ()), (POSITIONS, "<i8", ()), *fields]
        self._num_rows = num_rows
        self._sizes = [math.prod(shape) * np.dtype(dtype).itemsize * num_rows for _, dtype, shape in self._fields]
        self._slot_bytes = _align(sum(map(_align, self._sizes)), mmap.ALLOCATIONGRANULARITY)
        self._free: deque[tuple[int, mmap.mmap]] = deque()
        self.num_slots = 0
        """Made so far."""

    def take(self) -> tuple[int, Arrays]:
        """Take a slot and the arrays in it; it is free again when all of these are gone, and views of them."""
        try:
            slot = self._free.pop()
        except IndexError:
            self.num_slots += 1
            os.ftruncate(self._descriptor, self.num_slots * self._slot_bytes)
            slot = self.num_slots - 1, self._map(self.num_slots - 1)
        # Arrays hold the lease, not the slot: its finalizer runs when the last view of the memory is gone, in any
        # thread, and a deque needs no lock.
        lease = _Lease(slot[1])
        weakref.finalize(lease, self._give_back, slot).atexit = False
        return slot[0], self._make_arrays(np.asarray(lease))

    def _give_back(self, slot: tuple[int, mmap.mmap]) -> None:
        if len(self._free) < SPARE_SLOTS:
            self._free.append(slot)
            return
        if hasattr(mmap, "MADV_REMOVE"):
            slot[1].madvise(mmap.MADV_REMOVE)  # for all processes: they find zeros there, and nobody looks
        self._free.appendleft(slot)  # taken last

    def view(self, number: int) -> Arrays:
        """View the arrays in a slot that another process has taken."""
        return self._make_arrays(np.frombuffer(self._map(number), np.uint8))

    def _map(self, number: int) -> mmap.mmap:
        return mmap.mmap(self._descriptor, self._slot_bytes, offset=number * self._slot_bytes)

    def _make_arrays(self, memory: np.ndarray) -> Arrays:
        """View the memory of a slot, uint8 `[bytes]`, as arrays, one after the other."""
        arrays, start = {}, 0
        for (name, dtype, shape), size in zip(self._fields, self._sizes, strict=True):
            arrays[name] = memory[start : start + size].view(dtype).reshape(self._num_rows, *shape)
            start += _align(size)
        return arrays


class _Lease:
    """Owner of the memory for the arrays of one use of a slot: it goes when the last of them does."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.mapped = mapped
        memory = np.frombuffer(mapped, np.uint8)
        address, _ = memory.__array_interface__["data"]
        self.__array_interface__ = {"shape": memory.shape, "typestr": "|u1", "data": (address, False), "version": 3}


def make_memory() -> int:
    """Make memory without a name; return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kftrain")
    with tempfile.TemporaryFile() as file:  # elsewhere than on Linux: a file without a name
        return os.dup(file.fileno())


def _align(size: int, alignment: int = 64) -> int:
    return -(-size // alignment) * alignment
