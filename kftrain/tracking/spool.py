"""A queue of points in a JSON lines file, which survives the process.

Points are appended, read from the front, and the file is emptied when all were taken. A crash can tear the last line
only. Points that were taken before a crash but not yet removed from the file come again: the reader must bear that.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from kftrain.errors import TrackingError
from kftrain.tracking.base import Point


class Spool:
    """A queue of points in a file, for a single thread of a single process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken_bytes = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._size_bytes = self._repair()
        except OSError as error:
            raise TrackingError(
                f"cannot keep metrics on disk: {error}", where=str(path), fix="free the disk"
            ) from error

    @property
    def empty(self) -> bool:
        """True if all points were taken."""
        return self._taken_bytes == self._size_bytes

    def append(self, points: list[Point]) -> None:
        """Add points at the end. Raises OSError, after which none of them is in the queue."""
        lines = "".join(json.dumps(asdict(point)) + "\n" for point in points).encode()
        try:
            with self._path.open("ab") as stream:
                stream.write(lines)
        except (
            OSError
        ):  # a full disk may have taken a part of the lines: cut them off, or the next would follow a torn one
            self._truncate(self._size_bytes)
            raise
        self._size_bytes += len(lines)

    def peek(self, limit: int) -> tuple[list[Point], int]:
        """Return the first points, at most `limit`, and their size in bytes, which `take` needs."""
        points: list[Point] = []
        start = self._taken_bytes
        with self._path.open("rb") as stream:
            stream.seek(start)
            while len(points) < limit and stream.tell() < self._size_bytes:
                points.append(_parse(stream.readline()))
            return points, stream.tell() - start

    def take(self, num_bytes: int) -> None:
        """Remove the first points, by their size in bytes as `peek` returned it."""
        self._taken_bytes += num_bytes
        if self.empty:
            self._truncate(0)
            self._taken_bytes = 0
            self._size_bytes = 0

    def __len__(self) -> int:
        """Count the points in the queue by reading all of them."""
        return len(self.peek(self._size_bytes)[0])

    def _truncate(self, size: int) -> None:
        if self._path.exists():
            with self._path.open("rb+") as stream:
                stream.truncate(size)

    def _repair(self) -> int:
        """Drop lines that are no points, such as a torn last one, and return the size of the file in bytes."""
        self._path.touch()
        before = self._path.read_bytes()
        content = b"".join(line for line in before.splitlines(keepends=True) if _is_point(line))
        if content != before:
            self._path.write_bytes(content)
        return len(content)


def _parse(line: bytes) -> Point:
    return Point(**json.loads(line))


def _is_point(line: bytes) -> bool:
    try:
        _parse(line)
    except (ValueError, TypeError):
        return False
    return line.endswith(b"\n")
