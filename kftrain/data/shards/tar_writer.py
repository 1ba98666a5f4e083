"""Writes uncompressed USTAR archives fast: headers of 512 bytes built by hand, content hashed while it is written.

All that could differ between two machines is fixed: mtime 0, owner 0, mode 0444, plain USTAR without
extensions. So equal members are equal bytes.

Content is copied once, into one of a few buffers that are used in turns and stay in the processor's cache; from there
it is written and hashed, as a whole and block by block. Hashing is the larger part of the work and releases the
interpreter lock: two other threads do it, unless other processes need their processors (`hash_in_line`).
"""

from __future__ import annotations

import hashlib
import io
import zlib
from pathlib import Path
from queue import SimpleQueue

from kftrain.core import threads
from kftrain.data.shards.block_digests import HASHED_BYTES, hash_blocks

BLOCK_BYTES = 512
END_OF_ARCHIVE = bytes(2 * BLOCK_BYTES)
MAX_MEMBER_BYTES = 8**11 - 1
"""Eleven octal digits: what a USTAR header can say."""
NUM_BUFFERS = 4
"""Chunks that may wait to be hashed, and the one that is filled."""

_OWNER = b"0000444\0" + b"0000000\0" * 2
_MTIME = b"00000000000\0"
_TYPE_TO_DEVICE = b"0" + bytes(100) + b"ustar\00000" + bytes(80)
_AFTER_CHECKSUM = _TYPE_TO_DEVICE + bytes(167)
_FIXED_SUM = sum(_OWNER) + sum(_MTIME) + sum(_TYPE_TO_DEVICE) + 8 * ord(" ")
_PADDING = [bytes(count) for count in range(BLOCK_BYTES)]


def member_header(folder: bytes, base: bytes, size_bytes: int) -> bytes:
    """Return the USTAR header of a regular file `folder/base`.

    At most 155 and 100 bytes; the checksum is a sum of partial sums.
    """
    assert size_bytes <= MAX_MEMBER_BYTES, size_bytes
    size = b"%011o\0" % size_bytes
    sum_ = _FIXED_SUM + _byte_sum(size) + _byte_sum(base)
    if not folder:
        return b"".join((base.ljust(100, b"\0"), _OWNER, size, _MTIME, b"%06o\0 " % sum_, _AFTER_CHECKSUM))
    checksum, after = b"%06o\0 " % (sum_ + _byte_sum(folder)), _TYPE_TO_DEVICE + folder.ljust(167, b"\0")
    return b"".join((base.ljust(100, b"\0"), _OWNER, size, _MTIME, checksum, after))


def padding(size_bytes: int) -> bytes:
    """Return the zeros that fill the last block of a member."""
    return _PADDING[-size_bytes % BLOCK_BYTES]


def _byte_sum(text: bytes) -> int:
    """Return the sum of at most 256 bytes: the lower half of Adler-32 is one more, modulo 65521."""
    return (zlib.adler32(text) & 0xFFFF) - 1


class TarWriter:
    """Writer of one archive, which hashes what it writes.

    `append` whole members, then `finish`. As a context manager it closes its file.
    """

    def __init__(self, path: Path, hash_in_line: bool = False) -> None:
        """`hash_in_line`: hash in the calling thread, where processors are busy with other writers."""
        self.path = path
        self.num_bytes = 0
        """Bytes of the members so far."""
        self._stream = path.open("xb", buffering=0)
        self._hasher = _Hasher(hash_in_line)
        self._buffer = self._hasher.free_buffers.get()

    def __enter__(self) -> TarWriter:
        return self

    def __exit__(self, *caught: object) -> None:
        self._hasher.close()
        self._stream.close()

    def append(self, parts: list[bytes | memoryview], num_bytes: int) -> None:
        """Add members: headers, contents and paddings in order, `num_bytes` in all; views must be contiguous.

        The parts are copied before this returns.
        """
        self.num_bytes += num_bytes
        if num_bytes <= HASHED_BYTES - self._buffer.tell():
            self._buffer.writelines(parts)
        else:
            for part in parts:
                self._append_in_pieces(memoryview(part).cast("B"))

    def finish(self) -> tuple[str, bytes]:
        """End the archive; return the sha256 of the file, and the table of those of its blocks."""
        self.append([END_OF_ARCHIVE], len(END_OF_ARCHIVE))
        self._flush()
        self._hasher.close()
        return self._hasher.digest.hexdigest(), bytes(self._hasher.table)

    def _append_in_pieces(self, part: memoryview) -> None:
        while part:
            room = HASHED_BYTES - self._buffer.tell()
            self._buffer.write(part[:room])
            part = part[room:]
            if self._buffer.tell() == HASHED_BYTES:
                self._flush()

    def _flush(self) -> None:
        view = self._buffer.getbuffer()[: self._buffer.tell()]
        left = view
        while left:
            left = left[self._stream.write(left) :]
        left.release()
        self._hasher.update(self._buffer, view)
        self._buffer = self._hasher.free_buffers.get()


class _Hasher:
    """Hashes chunks as they come: in the calling thread, or in two others, one its blocks, then one the whole file."""

    def __init__(self, in_line: bool) -> None:
        self.digest = hashlib.sha256()
        self.table = bytearray()
        self.free_buffers: SimpleQueue[io.BytesIO] = SimpleQueue()
        """Buffers of HASHED_BYTES, at their beginnings."""
        self._chunks, self._chunks_of_table = (SimpleQueue[tuple[io.BytesIO, memoryview] | None]() for _ in range(2))
        works = [] if in_line else [self._hash_blocks, self._hash_whole]
        self._threads = [threads.start(work, "shard-sha256") for work in works]
        for _ in range(NUM_BUFFERS if works else 1):
            self.free_buffers.put(io.BytesIO(bytes(HASHED_BYTES)))

    def update(self, buffer: io.BytesIO, view: memoryview) -> None:
        """Take a buffer back and hash what the view of it shows."""
        self._chunks.put((buffer, view))
        if not self._threads:
            self._chunks.put(None)
            self._hash_blocks()
            self._hash_whole()

    def _hash_blocks(self) -> None:
        while chunk := self._chunks.get():
            self.table += hash_blocks(chunk[1])
            self._chunks_of_table.put(chunk)
        self._chunks_of_table.put(None)

    def _hash_whole(self) -> None:
        while chunk := self._chunks_of_table.get():
            buffer, view = chunk
            self.digest.update(view)
            view.release()
            buffer.seek(0)
            self.free_buffers.put(buffer)

    def close(self) -> None:
        """End when everything has been hashed; may be called again."""
        self._chunks.put(None)
        for thread in self._threads:
            thread.result()
