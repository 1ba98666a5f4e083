"""Files of a node that hold the blocks of one remote shard that were fetched so far, shared by its processes.

Such a file is sparse: a block lies where it lies in the shard. Behind the data stands a byte for each block, which is 1
once the block was verified and written. In that order: a process that is killed leaves no byte that is taken for a good
one. A lock on the bytes of blocks belongs to whoever fetches them, one on the file to whoever has it open; the system
takes both from a process that dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kftrain.data.shards.block_digests import DIGEST_BLOCK_BYTES, count_digest_blocks
from kftrain.data.shared_rows import make_memory


class BlockFile:
    """Open file of a shard. All methods may be called by any thread of any process."""

    def __init__(self, descriptor: int, num_bytes: int, is_private: bool) -> None:
        """Take over the descriptor of a file, an empty one or one of this shard; `is_private`: of this process."""
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.descriptor = descriptor
        self._num_bytes = num_bytes
        self._is_present = np.zeros(count_digest_blocks(num_bytes), bool)
        os.truncate(descriptor, num_bytes + len(self._is_present))
        self.is_private = is_private
        self.content = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_READ)
        """Bytes of the shard; zeros where a block is missing."""
        self.is_whole = False
        """True once all blocks were seen to be there."""
        self.used_at = 0.0
        """Time, on the monotonic clock, at which the file was last said to be in use."""

    def list_missing(self, blocks: np.ndarray) -> np.ndarray:
        """Return those of these blocks, int64 `[k]`, that nobody has written yet."""
        missing: np.ndarray = blocks[~self._is_present[blocks]]
        if missing.size:
            content = os.pread(self.descriptor, len(self._is_present), self._num_bytes)
            self._is_present = np.frombuffer(content, np.uint8) == 1
            self.is_whole = bool(self._is_present.all())
            missing = blocks[~self._is_present[blocks]]
        return missing

    @contextlib.contextmanager
    def claim(self, first: int, stop: int) -> Iterator[bool]:
        """Claim blocks first … stop - 1 for this thread within the block; False: somebody else fetches some of them.

        Raises OSError where the system has no such locks; then two threads may fetch the same into a private file.
        """
        lock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, self._num_bytes + first, stop - first, 0)
        with contextlib.ExitStack() as stack:
            is_claimed = True
            try:
                # A description of its own: a lock that belongs to a shared one would not keep threads apart.
                own = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, own)
                fcntl.fcntl(own, fcntl.F_OFD_SETLK, lock)
            except BlockingIOError:
                is_claimed = False
            except OSError:
                if not self.is_private:
                    raise
            yield is_claimed

    def write(self, first: int, content: memoryview) -> None:
        """Write whole blocks from `first` on, which were claimed and verified, and then say that they are there."""
        marks = memoryview(b"\1" * count_digest_blocks(len(content)))
        for part, place in ((content, first * DIGEST_BLOCK_BYTES), (marks, self._num_bytes + first)):
            if os.pwrite(self.descriptor, part, place) < len(part):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_block_file(path: Path | None, num_bytes: int) -> BlockFile:
    """Open or make the file of a shard of so many bytes; None: one in memory, which goes with the object.

    Raises OSError.
    """
    if path is None:
        return BlockFile(make_memory(), num_bytes, is_private=True)
    for _ in range(2):  # again where it was being removed, or is not of this shard
        with contextlib.ExitStack() as stack:
            descriptor = open_or_make(path)
            stack.callback(os.close, descriptor)
            # Locked first, looked at then: who removes a file has locked it.
            if try_lock_file(descriptor, fcntl.LOCK_SH) and (status := os.fstat(descriptor)).st_nlink:
                if status.st_size in (0, num_bytes + count_digest_blocks(num_bytes)):
                    stack.pop_all()
                    return BlockFile(descriptor, num_bytes, is_private=False)
                path.unlink(missing_ok=True)
    raise BlockingIOError(errno.EAGAIN, "it cannot be locked", str(path))


def open_or_make(path: Path) -> int:
    """Open a file of this user alone to be read and written; an empty one is made where there is none."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def try_lock_file(descriptor: int, kind: int) -> bool:
    """Lock a file unless somebody else has it. Raises OSError where the system has no such locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
