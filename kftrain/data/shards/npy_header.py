"""Headers of `.npy` members, built by hand: numpy's own differ between its versions, and shards must not."""

from __future__ import annotations

import functools
import tokenize
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 64
"""Multiple of bytes to which a header is padded, so that a member's data is aligned in a mapped tar."""

NOT_ARRAY = (ValueError, SyntaxError, TypeError, EOFError, OverflowError, MemoryError, tokenize.TokenError)
"""Exceptions that numpy raises for a damaged `.npy`; its header may ask for any size."""

_MAGIC = b"\x93NUMPY\x01\x00"


@functools.lru_cache(maxsize=4096)
def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the header, format 1.0, of a C-ordered array; `dtype` as in `np.dtype(...).str`."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}".encode("ascii")
    length = len(_MAGIC) + 2 + len(text) + 1
    text += b" " * (-length % ALIGNMENT_BYTES) + b"\n"
    return _MAGIC + len(text).to_bytes(2, "little") + text


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian numpy dtype of a schema's field."""
    dtype: np.dtype[Any] = np.dtype(name).newbyteorder("<")
    return dtype


def encode_npy(array: np.ndarray) -> bytes:
    """Return an array as a whole `.npy` file."""
    little = np.asarray(array, stored_dtype(array.dtype.name), order="C")
    return npy_header(little.dtype.str, little.shape) + little.tobytes()
