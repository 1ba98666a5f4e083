"""Writes uncompressed USTAR archives fast: headers of 512 bytes built by hand, content hashed while it is written.

All that could differ between two machines is fixed: mtime 0, owner 0, mode 0444, plain USTAR without
extensions. So equal members are equal bytes. Written in chunks of a few MiB; a second thread hashes the chunk
before while the next one is built (hashing releases the interpreter lock), so that the digest costs no extra
pass.
"""

from __future__ import annotations

import functools
import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

BLOCK_BYTES = 512
END_OF_ARCHIVE = bytes(2 * BLOCK_BYTES)
MAX_MEMBER_BYTES = 8**11 - 1
"""Eleven octal digits: what a USTAR header can say."""
CHUNK_BYTES = 4 << 20

_OWNER = b"0000444\0" + b"0000000\0" * 2
_MTIME = b"00000000000\0"
_TYPE_TO_DEVICE = b"0" + bytes(100) + b"ustar\00000" + bytes(80)
_AFTER_CHECKSUM = _TYPE_TO_DEVICE + bytes(167)
_FIXED_SUM = sum(_OWNER) + sum(_MTIME) + sum(_TYPE_TO_DEVICE) + 8 * ord(" ")
_PADDING = [bytes(count) for count in range(BLOCK_BYTES)]


def member_header(folder: bytes, base: bytes, size_bytes: int) -> bytes:
    """The USTAR header of a regular file `folder/base`.

    At most 155 and 100 bytes; the checksum is a sum of partial sums.
    """
    after_name, known_sum = _owner_to_time(size_bytes)
    checksum = b"%06o\0 " % (known_sum + sum(base) + sum(folder))
    after_checksum = _TYPE_TO_DEVICE + folder.ljust(167, b"\0") if folder else _AFTER_CHECKSUM
    return b"".join((base.ljust(100, b"\0"), after_name, checksum, after_checksum))


def padding(size_bytes: int) -> bytes:
    """The zeros that fill the last block of a member."""
    return _PADDING[-size_bytes % BLOCK_BYTES]


@functools.lru_cache(maxsize=4096)
def _owner_to_time(size_bytes: int) -> tuple[bytes, int]:
    """Mode, owner, size and time, with the sum of all bytes of the header but the name's."""
    assert size_bytes <= MAX_MEMBER_BYTES, size_bytes
    size = b"%011o\0" % size_bytes
    return _OWNER + size + _MTIME, _FIXED_SUM + sum(size)


class TarWriter:
    """One archive.

    `append` blocks of bytes that are whole members, then `finish`. As a context manager it closes its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        """Bytes of the members so far."""
        self._stream = path.open("xb", buffering=0)
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-sha256")
        self._digest = hashlib.sha256()
        self._hashing: Future[None] | None = None
        self._parts: list[bytes] = []
        self._pending_bytes = 0

    def __enter__(self) -> TarWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hasher.shutdown()
        self._stream.close()

    def append(self, parts: list[bytes], num_bytes: int) -> None:
        """Adds members: headers, contents and paddings in order, `num_bytes` in all."""
        self._parts += parts
        self.num_bytes += num_bytes
        self._pending_bytes += num_bytes
        if self._pending_bytes >= CHUNK_BYTES:
            self._flush()

    def finish(self) -> str:
        """Ends the archive and gives the sha256 of the file."""
        self.append([END_OF_ARCHIVE], len(END_OF_ARCHIVE))
        self._flush()
        self._wait_for_hash()
        return self._digest.hexdigest()

    def _flush(self) -> None:
        chunk = b"".join(self._parts)
        self._parts = []
        self._pending_bytes = 0
        self._wait_for_hash()
        self._hashing = self._hasher.submit(self._digest.update, chunk)
        view = memoryview(chunk)
        while view:
            view = view[self._stream.write(view) :]

    def _wait_for_hash(self) -> None:
        if self._hashing is not None:
            self._hashing.result()
