"""Rows of float32 numbers as they travel: as they are, as bf16, or as int8 with a power of two for each row.

A row that was decoded is encoded to the same bits again: so a log or a copy of a server has what the server has. Keys
of rows travel as int64, or rising ones as their differences, in so few bytes as the largest of these needs.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Keys = NDArray[np.int64]

KEY_BYTES = 8
"""Bytes of a key as it is."""

NOT_FINITE = -128
"""The exponent of a row with a number that is not finite; all of it is decoded as NaN."""


class RowEncoding(IntEnum):
    """The form in which the numbers of rows travel."""

    FP32 = 0
    BF16 = 1
    """The upper half of the bits of a float32, rounded to the nearest, of two to the even one."""
    INT8 = 2
    """A byte a number, and one for the row's exponent: a scale that rows share, as in OCP's Microscaling Formats."""


def count_bytes(encoding: RowEncoding, num_values: int, dim: int) -> int:
    """Return the bytes of so many numbers, in rows of `dim`."""
    if encoding is RowEncoding.INT8:
        return num_values + num_values // dim
    return num_values * (2 if encoding is RowEncoding.BF16 else 4)


def encode(values: Floats, encoding: RowEncoding, dim: int) -> memoryview:
    """Return the bytes that travel; float32 is not copied."""
    if encoding is RowEncoding.BF16:
        return _round_to_bf16(values).data.cast("B")
    if encoding is RowEncoding.INT8:
        scaled, exponents = _scale(values, dim)
        return np.concatenate([exponents, np.rint(scaled).reshape(-1).astype(np.int8)]).data.cast("B")
    return np.ascontiguousarray(values).data.cast("B")


def decode(wire: NDArray[np.uint8], encoding: RowEncoding, dim: int, values: Floats) -> None:
    """Write the numbers of what travelled into `values`."""
    if encoding is RowEncoding.BF16:
        bits = values.view(np.uint32)
        bits[:] = wire.view(np.uint16)
        bits <<= 16
    elif encoding is RowEncoding.INT8:
        exponents, numbers = np.split(wire.view(np.int8), [len(values) // dim])
        rows = values.reshape(-1, dim)
        np.ldexp(numbers.reshape(-1, dim).astype(np.float32), exponents.astype(np.int32)[:, None], out=rows)
        rows[exponents == NOT_FINITE] = np.nan
    else:
        values[:] = wire.view(np.float32)


def choose_key_bytes(keys: Keys) -> int:
    """Return the bytes of a key's difference from the one before; all of them where keys do not rise."""
    if keys.size < 2:
        return KEY_BYTES
    largest = int(np.diff(keys.view(np.uint64)).max())  # a fall goes around, to a large number
    return max(1, (largest.bit_length() + 7) // 8)


def count_keys_bytes(num_keys: int, key_bytes: int) -> int:
    """Return the bytes of so many keys: the first one is whole."""
    if key_bytes == KEY_BYTES or not num_keys:
        return num_keys * KEY_BYTES
    return KEY_BYTES + (num_keys - 1) * key_bytes


def encode_keys(keys: Keys, key_bytes: int) -> memoryview:
    """Return the bytes that travel; whole keys are not copied."""
    keys = np.ascontiguousarray(keys)
    if key_bytes == KEY_BYTES:
        return keys.data.cast("B")
    steps = np.diff(keys).view(np.uint8).reshape(-1, KEY_BYTES)[:, :key_bytes]
    return np.concatenate([keys[:1].view(np.uint8), steps.reshape(-1)]).data.cast("B")


def decode_keys(wire: NDArray[np.uint8], key_bytes: int) -> Keys:
    """Return the keys of what travelled; whole ones as a view of it."""
    if key_bytes == KEY_BYTES or wire.size < KEY_BYTES:
        return wire.view(np.int64)
    steps = np.zeros((1 + (wire.size - KEY_BYTES) // key_bytes, KEY_BYTES), np.uint8)
    steps[0], steps[1:, :key_bytes] = wire[:KEY_BYTES], wire[KEY_BYTES:].reshape(-1, key_bytes)
    return np.cumsum(steps.reshape(-1).view(np.int64))


def round_up_or_down(values: Floats, dim: int, noise: Floats) -> Floats:
    """Round to numbers that INT8 has, up with the probability that makes the mean right. `noise`: uniform in [0, 1).

    Rounding to the nearest would drop what is small beside its row again and again. What is carried over to the next
    step instead (error feedback) would be a number for each of the table's, on each worker.
    """
    scaled, exponents = _scale(values, dim)
    rounded = np.clip(np.floor(scaled + noise.reshape(scaled.shape)), -127, 127)
    rounded = np.ldexp(rounded, exponents.astype(np.int32)[:, None])
    rounded[exponents == NOT_FINITE] = np.nan
    return np.asarray(rounded, np.float32).reshape(values.shape)


def _scale(values: Floats, dim: int) -> tuple[Floats, NDArray[np.int8]]:
    """Return rows (rows, dim) divided by the least power of two that brings them into -127..127, and its exponents."""
    rows = values.reshape(-1, dim)
    largest = np.abs(rows).max(1)
    is_finite = np.isfinite(largest)
    parts, exponents = np.frexp(np.where(is_finite, largest, 0) / np.float32(127))
    # What is exactly a power of two is (1/2, exponent + 1) to frexp.
    exponents = np.maximum(exponents - (parts == 0.5), -120)
    scaled = np.ldexp(np.where(is_finite[:, None], rows, 0), -exponents[:, None])
    return scaled, np.where(is_finite, exponents, NOT_FINITE).astype(np.int8)


def _round_to_bf16(values: Floats) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0  # rounding may carry out of a NaN's bits
    return rounded
