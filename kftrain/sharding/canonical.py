"""Plain values as bytes that are equal only for equal values: what digests of records are made of."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np


def encode_canonically(value: Any) -> Iterator[bytes]:
    """Yield type, length and content of a value. Raises TypeError for what is no plain data."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"array {value.dtype.str} {value.shape} ".encode()
        yield value.tobytes()
    elif isinstance(value, bytes | bytearray | memoryview):
        yield f"bytes {len(value)} ".encode()
        yield bytes(value)
    elif isinstance(value, str):
        yield from encode_canonically(b"text " + value.encode("utf-8", "surrogatepass"))
    elif value is None or isinstance(value, bool | int | float | np.generic):
        yield f"{type(value).__name__} {value!r} ".encode()
    elif isinstance(value, date | time | timedelta | Decimal | UUID):  # pandas' times say the same as Python's
        yield from encode_canonically(("plain", value.isoformat() if isinstance(value, date | time) else str(value)))
    elif isinstance(value, list | tuple):
        yield f"list {len(value)} ".encode()
        for item in value:
            yield from encode_canonically(item)
    elif isinstance(value, dict):
        yield f"dict {len(value)} ".encode()
        for name in sorted(value, key=str):
            yield from encode_canonically([name, value[name]])
    else:
        raise TypeError(type(value).__name__)
