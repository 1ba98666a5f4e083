"""Rows by key: an open-addressing index in memory beside one dense file of rows, both probed a batch at a time.

The index holds four bytes a slot and is the only part that is built with room to spare; rows lie one after another in
a file that grows by a sixteenth, so that a live row costs little more than its numbers. The file is memory: nothing is
read back from it.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]

EMPTY = -1
DELETED = -2
"""A slot whose row is gone: a search goes on behind it."""

MAX_LOAD = 0.8
"""Share of slots that may be used, deleted ones included; double hashing needs five looks for an absent key then."""

NUM_REMEMBERED = 64
"""Arrays of keys whose rows are remembered between a read and the update that follows it."""

REBUILD_ROWS = 65_536
"""Rows that are put into a new index at a time."""

LOAD_TO_GROW = 0.7
"""Share of slots with live rows above which a full index is doubled; below, it is only cleared of deleted slots."""


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64 bits to 64 bits, one to one (the finalizer of splitmix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def build_row_type(width: int) -> np.dtype[np.void]:
    """Describe a row: 16 bytes, then `width` float32 numbers."""
    return np.dtype([("key", "<i8"), ("version", "<u4"), ("last_use", "<u4"), ("numbers", "<f4", (width,))])


class RowStore:
    """Rows of `width` float32 numbers by int64 key. Row numbers are 0..len - 1 and change when rows are removed.

    Args:
        width: Numbers of a row.
        folder: Where the file of rows lies; it has no name, so it goes with the process.
    """

    def __init__(self, width: int, folder: Path) -> None:
        self._type = build_row_type(width)
        # A file without a name goes with its descriptor; a named one would outlive a killed process.
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._rows: NDArray[np.void] = np.empty(0, self._type)
        self._num_rows = 0
        self._slots = np.full(1024, EMPTY, np.int32)
        self._num_used_slots = 0
        self._memory: dict[tuple[int, int, int], tuple[Keys, NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return self._num_rows

    @property
    def live(self) -> NDArray[np.void]:
        """View of all rows, in the order of their numbers."""
        return self._rows[: self._num_rows]

    @property
    def _opaque(self) -> NDArray[np.void]:
        # Without fields, numpy moves a row as one piece.
        return self._rows.view(f"V{self._type.itemsize}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that the file system has allotted, and of the index."""
        return os.fstat(self._file.fileno()).st_blocks * 512 + self._slots.nbytes

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Return the row number of each key, -1 where there is none."""
        return self._locate(keys)[0]

    def remember(self, keys: Keys, numbers: NDArray[np.int64]) -> None:
        """Keep what `find` returned, for who reads rows is about to change them; both arrays stay as they are."""
        if keys.size:
            if len(self._memory) >= NUM_REMEMBERED:
                self._memory.pop(next(iter(self._memory)))
            self._memory[keys.size, int(keys[0]), int(keys[-1])] = (keys, numbers)

    def recall(self, keys: Keys) -> NDArray[np.int64]:
        """Return what `find` does, from memory where these keys are there; it is forgotten then."""
        name = (keys.size, int(keys[0]), int(keys[-1])) if keys.size else (0, 0, 0)
        asked_keys, numbers = self._memory.pop(name, (None, None))
        if asked_keys is None or numbers is None or not np.array_equal(asked_keys, keys):
            return self.find(keys)
        is_absent = numbers < 0
        if is_absent.any():  # it may have come meanwhile; a row that was there has kept its number
            numbers[is_absent] = self.find(keys[is_absent])
        return numbers

    def read(self, numbers: NDArray[np.int64], width: int) -> NDArray[np.float32]:
        """Copy the first numbers, `[rows, width]`, of rows by their row numbers."""
        # As one piece a row, where numpy would move a number at a time.
        start, stride = self._type.itemsize - self._type["numbers"].itemsize, self._type.itemsize
        pieces = np.ndarray((len(self._rows),), f"V{4 * width}", self._rows, start, (stride,))
        copied: NDArray[np.float32] = pieces[numbers].view(np.float32).reshape(-1, width)
        return copied

    def gather(self, numbers: NDArray[np.int64]) -> NDArray[np.void]:
        """Copy whole rows, by their numbers."""
        return self._opaque[numbers].view(self._type)

    def scatter(self, numbers: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Write rows that `gather` copied back to their places."""
        self._opaque[numbers] = rows.view(self._opaque.dtype)

    def insert(self, keys: Keys) -> NDArray[np.int64]:
        """Append a row of zeros for each of these distinct absent keys; return their numbers."""
        numbers = np.arange(self._num_rows, self._num_rows + len(keys))
        self._reserve(self._num_rows + len(keys))
        self._rows[numbers] = np.zeros(1, self._type)
        self._rows["key"][numbers] = keys
        if self._num_used_slots + len(keys) > MAX_LOAD * len(self._slots):
            self._rebuild(self._num_rows + len(keys))
        self._fill_slots(keys, numbers)
        self._num_rows += len(keys)
        return numbers

    def remove(self, keys: Keys) -> None:
        """Remove the rows of these distinct present keys; the last rows move into their places."""
        self._memory.clear()
        removed, slots = self._locate(keys)
        assert (removed >= 0).all(), "a row to remove is absent"
        self._slots[slots] = DELETED
        remaining = self._num_rows - len(keys)
        holes = removed[removed < remaining]
        movers = np.setdiff1d(np.arange(remaining, self._num_rows), removed, assume_unique=True)
        _, moved_slots = self._locate(self._rows["key"][movers])
        self._slots[moved_slots] = holes
        self._rows[holes] = self._rows[movers]
        self._num_rows = remaining

    def _locate(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row and the slot of each key, -1 where there is none."""
        self._reserve(1)
        stored = self._rows["key"]
        slots, steps = self._hash(keys)
        places = np.full(len(keys), -1, np.int64)
        pending = np.arange(len(keys))
        # By numbers and `take`: masks cost several times that. Not of `stored`, which `take` would copy as a whole.
        while pending.size:
            numbers = self._slots.take(slots)
            is_same = (stored[numbers] == keys) & (numbers >= 0)  # EMPTY and DELETED read some row at the end
            goes_on = np.flatnonzero(~is_same & (numbers != EMPTY))
            if pending.size == places.size:  # most keys lie in their first slot
                places = np.where(is_same, slots, -1)
            else:
                same = np.flatnonzero(is_same)
                places[pending.take(same)] = slots.take(same)
            pending, keys, steps = pending.take(goes_on), keys.take(goes_on), steps.take(goes_on)
            slots = (slots.take(goes_on) + steps) & (len(self._slots) - 1)
        return np.where(places >= 0, self._slots.take(places, mode="wrap"), np.int64(-1)), places

    def _hash(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first slot of each key, and the odd step to the next, which reaches all of 2**n slots."""
        bits = mix_bits(keys.view(np.uint64))
        mask = np.uint64(len(self._slots) - 1)
        return (bits & mask).view(np.int64), ((bits >> np.uint64(32)) & mask | np.uint64(1)).view(np.int64)

    def _fill_slots(self, keys: Keys, numbers: NDArray[np.int64]) -> None:
        slots, steps = self._hash(keys)
        self._num_used_slots += len(keys)
        while numbers.size:
            is_free = self._slots[slots] < 0
            # Several keys may meet in one free slot: the last one written has it, the others see so and go on.
            self._slots[slots[is_free]] = numbers[is_free]
            is_lost = self._slots[slots] != numbers
            numbers, steps = numbers[is_lost], steps[is_lost]
            slots = (slots[is_lost] + steps) & (len(self._slots) - 1)

    def _rebuild(self, num_rows: int) -> None:
        size = len(self._slots)
        while num_rows > LOAD_TO_GROW * size:
            size *= 2
        self._slots = np.full(size, EMPTY, np.int32)
        self._num_used_slots = 0
        for start in range(0, self._num_rows, REBUILD_ROWS):  # the arrays between would else be as large as the index
            keys = self.live["key"][start : start + REBUILD_ROWS].copy()
            self._fill_slots(keys, np.arange(start, start + len(keys)))

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= len(self._rows):
            return
        capacity = num_rows + max(1024, num_rows // 16)
        self._file.truncate(capacity * self._type.itemsize)
        # A second map of the same file shows the same memory: nothing is copied, and the first goes with its last user.
        self._rows = np.memmap(self._file, self._type, "r+", shape=(capacity,)).view(np.ndarray)

    def put(self, rows: NDArray[Any]) -> None:
        """Take whole rows of distinct keys, in the place of those that are there."""
        keys = rows["key"].copy()
        numbers = self.find(keys)
        is_new = numbers < 0
        numbers[is_new] = self.insert(keys[is_new])
        self._rows[numbers] = rows
