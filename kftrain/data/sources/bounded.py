"""A stream of known length that is never asked for more than it holds.

Formats say in a header how long the next part is. Python allocates that much before it reads, and a header of 512 bytes
may say a terabyte: memory would be what a stranger's file asks for, not what it holds.
"""

from __future__ import annotations

import io
from typing import BinaryIO

from kftrain.positioned import PositionedStream


class BoundedStream(PositionedStream):
    """Reads of another stream, cut at its end. What asks for more gets less, as at any end of a file."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream.seek(0, io.SEEK_END))
        self._stream = stream

    def read(self, size: int | None = -1) -> bytes:
        """At most `size` bytes; negative or None: all that is left."""
        left = max(0, self.size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        self._stream.seek(min(self._position, self.size_bytes))
        content = self._stream.read(wanted)
        self._position += len(content)
        return content
