"""Rows of several shards are copied once, all together: from where they lie in memory straight into their array.

numpy indexes what it sees as one array. So it is shown all the memory from the first string to the last one as strings
that begin at every byte: any address is an index, and only what is asked for is ever touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

RELEASED_FROM = 512
"""Least strings that numpy copies without the GIL (its own bound is 500): fewer are copied in several pieces each."""

MAX_SPAN_BYTES = 1 << 62
"""Most bytes of all these strings, which overlap: numpy takes 2^63, and the heap may lie 2^46 bytes from a file."""


class RowPlaces:
    """Places in memory of the rows of several fields, until `copy`: addresses of strings, or files as they are."""

    def __init__(self, types: Mapping[str, np.dtype], num_rows: int) -> None:
        """`types`: of each field's rows, each of which is one string; `object` for files."""
        self._types = types
        self._places = {name: np.zeros(num_rows, "O" if row.hasobject else np.int64) for name, row in types.items()}
        self._owners: list[Any] = []

    def put(self, chosen: np.ndarray, name: str, places: np.ndarray | np.int64, owner: Any) -> None:
        """Note places of the `chosen` rows of a field. `owner` holds the memory until it is copied."""
        self._places[name][chosen] = places
        self._owners.append(owner)

    def copy(self) -> dict[str, np.ndarray]:
        """Copy the strings: field name -> rows of its type."""
        return {
            name: self._places[name] if row.hasobject else copy_strings(self._places[name], row.itemsize).view(row)
            for name, row in self._types.items()
        }


def find_address(memory: Any) -> int:
    """Return the address of the first byte of what has a buffer."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def copy_strings(addresses: np.ndarray, num_bytes: int) -> np.ndarray:
    """Copy strings of one length at these addresses, int64 `[k]`, into a new array `[k]` of `V<num_bytes>`."""
    if not len(addresses):
        return np.empty(0, f"V{num_bytes}")
    num_pieces = choose_pieces(len(addresses), num_bytes)
    piece_bytes = num_bytes // num_pieces
    first = int(addresses.min())
    starts = addresses - first
    if int(starts.max()) * piece_bytes > MAX_SPAN_BYTES:
        ordered, apart = np.sort(addresses), np.empty(len(addresses), f"V{num_bytes}")
        is_low = addresses <= ordered[np.diff(ordered).argmax()]  # on one side of the widest gap
        apart[is_low], apart[~is_low] = (copy_strings(addresses[side], num_bytes) for side in (is_low, ~is_low))
        return apart
    if num_pieces > 1:
        starts = (starts[:, None] + np.arange(num_pieces) * piece_bytes).ravel()
    copied: np.ndarray = np.asarray(_Memory(first, int(starts.max()) + 1, piece_bytes))[starts]
    return copied.view(f"V{num_bytes}")


def choose_pieces(num_strings: int, num_bytes: int) -> int:
    """Choose into how many equal pieces each string is cut: as few as release the GIL, where it is worth that."""
    num_pieces = 1
    while num_strings * num_pieces < RELEASED_FROM and num_bytes % (2 * num_pieces) == 0 and num_bytes >= 4096:
        num_pieces *= 2
    return num_pieces


class _Memory:
    """Memory of this process as strings that begin at every byte."""

    def __init__(self, address: int, num_strings: int, num_bytes: int) -> None:
        strings = {"shape": (num_strings,), "strides": (1,), "typestr": f"|V{num_bytes}"}
        self.__array_interface__ = {**strings, "data": (address, True), "version": 3}
