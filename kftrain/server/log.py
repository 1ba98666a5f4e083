"""The record of a server: the frames that changed its state, with checksums, synced before they are acknowledged."""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kftrain.core.frames import HEADER, Frame, decode_header
from kftrain.core.storage import sync_folder

CHECKSUM = struct.Struct("<I")


class FrameLog:
    """A file of frames. One thread appends at a time; any number may wait in `sync`, and one sync serves them all."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        sync_folder(path.parent)
        self._lock = threading.Lock()
        self.num_bytes = self._file.tell()
        self._num_synced_bytes = self.num_bytes

    def append(self, frame: Frame) -> int:
        """Append a frame; return the position up to which `sync` has to have come for it to be safe."""
        parts, checksum = frame.encode(), 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        for part in (memoryview(CHECKSUM.pack(checksum)), *parts):
            while part:  # a write may be short, and an unbuffered file does not go on by itself
                num_written = self._file.write(part)
                part = part[num_written:]
                self.num_bytes += num_written
        return self.num_bytes

    def sync(self, position: int) -> None:
        """Wait until everything up to a position is on disk."""
        with self._lock:
            # One that was closed by a snapshot has nothing left to save.
            if self._num_synced_bytes < position and not self._file.closed:
                num_bytes = self.num_bytes  # read before the sync: what comes meanwhile may not be in it
                os.fdatasync(self._file.fileno())
                self._num_synced_bytes = num_bytes

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


def replay(path: Path) -> Iterator[Frame]:
    """Yield the frames of a log, and cut off what a crash has left half written at its end."""
    if not path.exists():
        return
    num_good_bytes = 0
    with path.open("r+b") as file:
        while (frame := _read_record(file.read(CHECKSUM.size + HEADER.size), file)) is not None:
            num_good_bytes = file.tell()
            yield frame
        file.truncate(num_good_bytes)


def _read_record(start: bytes, file: BinaryIO) -> Frame | None:
    header = decode_header(start[CHECKSUM.size :]) if len(start) == CHECKSUM.size + HEADER.size else None
    if header is None:
        return None
    body = file.read(header.body_bytes)
    checksum = zlib.crc32(body, zlib.crc32(start[CHECKSUM.size :]))
    is_whole = len(body) == header.body_bytes and checksum == CHECKSUM.unpack_from(start)[0]
    return header.read_body(memoryview(body)) if is_whole else None
