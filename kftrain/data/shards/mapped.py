"""Finds byte strings in bytes that are mapped into memory."""

from __future__ import annotations

import mmap

import numpy as np

from kftrain.data.shards.gather import find_address
from kftrain.errors import DataError


class MappedBytes:
    """A file of this machine, mapped: rows are copied once, from the page cache into the batch."""

    def __init__(self, content: mmap.mmap) -> None:
        self._map = content
        self._address = find_address(content)

    def locate(self, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
        """Return the addresses of so many bytes at each of these offsets, int64; they hold as long as this.

        Raises DataError for bytes outside of the file, which nobody may read there: what is copied is not checked.
        """
        if len(offsets) and (offsets.min() < 0 or offsets.max() > len(self._map) - num_bytes):
            raise DataError("rows lie outside of their shard", where="data", fix="verify the shards")
        return offsets + self._address

    def files(self, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the byte strings at these offsets, `[k]` of `object`: views, which keep the mapping."""
        view, contents = memoryview(self._map), np.empty(len(offsets), object)
        for number, (start, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
            contents[number] = view[start : start + length]
        return contents
