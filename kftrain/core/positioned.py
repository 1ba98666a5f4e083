"""Base of streams of known length: it knows where the next read begins."""

from __future__ import annotations

import io


class PositionedStream(io.RawIOBase):
    """Stream to read from, which may be moved beyond its end as any file may; a subclass reads."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        """Return True: every such stream can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: every such stream can be moved."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a place. Raises ValueError for a place before the beginning."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"no place in a stream: {start + offset}")
        self._position = start + offset
        return self._position
