"""A stream of known length that is never asked for more than it holds.

Formats say in a header how long the next part is. Python allocates that much before it reads, and a header of 512 bytes
may say a terabyte: memory would be what a stranger's file asks for, not what it holds.
"""

from __future__ import annotations

import io
from typing import BinaryIO


class BoundedStream(io.RawIOBase):
    """Reads of another stream, cut at its end. What asks for more gets less, as at any end of a file."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self.size_bytes = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves there. Raises ValueError for a place before the beginning."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"no place in a stream: {start + offset}")
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """At most `size` bytes; negative or None: all that is left."""
        left = max(0, self.size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        self._stream.seek(min(self._position, self.size_bytes))
        content = self._stream.read(wanted)
        self._position += len(content)
        return content
