"""Which records have the same content: a number of 64 bits for what a record holds, and how much that is.

Made for finding copies, not against an adversary: long contents are not worth a cryptographic hash, which would take as
long as writing them does.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kftrain.data.schema import LazyFields, Record
from kftrain.sharding.canonical import encode_canonically

SHORT_BYTES = 4096
"""Largest content in bytes for which a cryptographic hash costs no more than the other one."""

_ROW_WORDS = 4096

UNKNOWN = 0
"""The hash of a content that is compared with nothing: an empty one, or objects of a user's own."""


def select_content(record: Record, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a record by which it is known again: those of `names` that it has, else all.

    Of what is decoded the file as it came.
    """
    fields = record.fields
    chosen = [name for name in names if name in fields] or list(fields)
    return {name: fields.as_it_came(name) if isinstance(fields, LazyFields) else fields[name] for name in chosen}


def hash_content(content: Mapping[str, Any]) -> tuple[int, int]:
    """Return the hash of a content, in the range of int64, and its size in bytes; numbers count as eight."""
    size_bytes = sum(_count_bytes(value) for value in content.values())
    if not size_bytes:
        return UNKNOWN, 0
    try:
        hashes = [_hash_value(value) for value in content.values()]
    except TypeError:
        return UNKNOWN, size_bytes
    return hashes[0] if len(hashes) == 1 else _hash_short_bytes(repr(hashes).encode()), size_bytes


def hash_key(key: str) -> int:
    """Return the hash of a key, in the range of int64, the same on every machine."""
    return _hash_short_bytes(key.encode("utf-8", "surrogatepass"))


def _count_bytes(value: Any) -> int:
    if isinstance(value, np.ndarray | memoryview):
        return value.nbytes
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_count_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_count_bytes, value))
    return 0 if value is None else 8


def _hash_value(value: Any) -> int:
    if isinstance(value, bytes | bytearray | memoryview):
        return hash_bytes(value)
    if isinstance(value, str):
        return hash_bytes(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _hash_short_bytes(f"{value.shape} {value.dtype.str} {hash_bytes(value.tobytes())}".encode())
    digest = hashlib.sha256()
    for part in encode_canonically(value):
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


def hash_bytes(content: bytes | bytearray | memoryview) -> int:
    """Return the hash of bytes, in the range of int64."""
    if len(content) <= SHORT_BYTES:
        return _hash_short_bytes(content)
    words = np.frombuffer(content, "<u8", len(content) // 8)
    multipliers = _draw_multipliers()
    sums = []
    for start in range(0, len(words), _ROW_WORDS):
        row = words[start : start + _ROW_WORDS]
        # A difference in the high bits of words shows in high bits of the first sum only, but anywhere in the second.
        sums += [int(np.dot(row, multipliers[: len(row)])), int(np.dot(row.byteswap(), multipliers[-len(row) :]))]
    return _hash_short_bytes(np.array(sums, "<u8").tobytes() + bytes(content[len(words) * 8 :]) + b"%d" % len(content))


def _hash_short_bytes(content: bytes | bytearray | memoryview) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


@functools.cache
def _draw_multipliers() -> np.ndarray:
    """Draw odd numbers of 64 bits, the same on every machine."""
    odd: np.ndarray = np.random.PCG64(15).random_raw(2 * _ROW_WORDS) | np.uint64(1)
    return odd
