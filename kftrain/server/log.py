"""The record of a server: the frames that changed its state, with checksums, synced before they are acknowledged."""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path

from kftrain.core.frames import HEADER, Frame, FrameKind, decode_header
from kftrain.core.storage import sync_folder
from kftrain.errors import StorageError

CHECKSUM = struct.Struct("<I")


BYTES_TO_SYNC = 2**22
"""Bytes after which a sync begins although nobody waits for one yet, so that little is left when somebody does."""


class FrameLog:
    """A file of frames, written and synced behind its users by a thread; one sync serves all who wait."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        os.fdatasync(self._file.fileno())  # what was replayed may be in the memory of this machine alone
        sync_folder(path.parent)
        self.position = self._file.tell()
        self._num_synced_bytes = self.position
        self._awaited_position = 0
        self._queue: list[Frame] = []
        self._changed = threading.Condition()
        self._error: OSError | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._write_behind, daemon=True)
        self._thread.start()

    def append(self, frame: Frame) -> int:
        """Append a frame, whose memory stays as it is from now on; return the position for `sync` to have it safe."""
        with self._changed:
            self._queue.append(frame)
            self.position += CHECKSUM.size + sum(part.nbytes for part in frame.encode())
            self._changed.notify_all()
            return self.position

    def sync(self, position: int) -> None:
        """Wait until everything up to a position is on disk. Raises StorageError if it cannot be written."""
        with self._changed:
            self._awaited_position = max(self._awaited_position, position)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error or self._num_synced_bytes >= position)
            if self._error:
                # For ever: what follows a torn record would not be read back.
                raise StorageError(f"the log cannot be written: {self._error}", where=self._file.name)

    def close(self) -> None:
        """Write what is left and close the file."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._file.close()

    def _write_behind(self) -> None:
        num_unsynced_bytes = 0
        is_over = False
        try:
            while not is_over:
                frames, is_over = self._wait_for_work()
                num_unsynced_bytes += sum(self._write(frame) for frame in frames)
                # A PUSH alone is not acknowledged; anything else will be waited for in a moment.
                is_urgent = any(frame.kind is not FrameKind.PUSH for frame in frames) or not frames
                if is_urgent or num_unsynced_bytes >= BYTES_TO_SYNC:
                    os.fdatasync(self._file.fileno())
                    with self._changed:
                        self._num_synced_bytes += num_unsynced_bytes
                        self._changed.notify_all()
                    num_unsynced_bytes = 0
        except OSError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait_for_work(self) -> tuple[list[Frame], bool]:
        """Return the frames to write, none where there is only a sync to make, and whether that was all."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._queue or self._is_closed or self._awaited_position > self._num_synced_bytes
            )
            frames, self._queue = self._queue, []
            return frames, self._is_closed and not frames

    def _write(self, frame: Frame) -> int:
        parts, checksum = frame.encode(), 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        parts.insert(0, memoryview(CHECKSUM.pack(checksum)))
        for part in parts:
            rest = part
            while rest:  # a write may be short, and an unbuffered file does not go on by itself
                rest = rest[self._file.write(rest) :]
        return sum(part.nbytes for part in parts)


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


def _read_record(start: bytes, file: BufferedRandom) -> Frame | None:
    header = decode_header(start[CHECKSUM.size :]) if len(start) == CHECKSUM.size + HEADER.size else None
    if header is None:
        return None
    body = bytearray(header.body_bytes)
    num_read = file.readinto(body)
    checksum = zlib.crc32(body, zlib.crc32(start[CHECKSUM.size :]))
    is_whole = num_read == header.body_bytes and checksum == CHECKSUM.unpack_from(start)[0]
    return header.read_body(memoryview(body)) if is_whole else None
