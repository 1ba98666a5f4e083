"""Cache of a node: blocks of remote shards that were fetched and verified, within a budget, shared by its processes.

There is a sparse file for each shard, named by its table of digests (`block_file`), and small files whole, named by
their digest. What was not used for the longest time, and is open nowhere, makes room for what is needed now. Where
nothing can be kept, because the disk is full, or the folder cannot be written to or is gone, blocks stay in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from kftrain.core import storage
from kftrain.core.outages import one_line
from kftrain.core.progress import to_log
from kftrain.data.shards.block_file import BlockFile, open_block_file, open_or_make, try_lock_file
from kftrain.process.machine import make_node_folder, read_scratch_bytes

MAX_AUTO_BYTES, VOLUME_SHARE, DISK_SHARE = 32 << 30, 1 / 3, 1 / 4
"""Most bytes that a node keeps if nobody says how many, as a number and as shares of the volume and of the free space
of its disk: checkpoints on their way need the rest. A window of 65,536 images of 100 kB and the next one, all of them
read by a single node, take 13 GB."""

MEMORY_BYTES = 256 << 20
"""Bytes of blocks that one process keeps in memory where the node keeps none."""

USED_SECONDS, IDLE_SECONDS = 10.0, 60.0
"""Seconds after which a file in use says so again, and after which a process closes one that it does not use."""

LOCK_SECONDS, BUSY_SECONDS, FULL_SECONDS = 5.0, 0.01, 1.0
"""Seconds that a process waits for another one that fetches a small file, as it may be stopped; after which it asks
again for what is being fetched; and after which for room, where all was in use."""

_MARGIN, _ROOM = 16, 256
"""Room is made for a 16th of the budget at once, and each process takes a 256th of it at once: counting takes time."""
_AGAIN = "blocks go soon after they were read, and are fetched again"


class NodeCache:
    """The blocks that a node has. All methods may be called by any thread of any process."""

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        """`folder`: None keeps blocks in memory. `max_bytes`: of all files in it together."""
        self._folder = folder
        self.max_bytes = max_bytes
        """Most bytes on the node's disk; 0 where nothing is kept there."""
        self.patience = 1.0
        """Share of its deadline that is waited for what another process fetches: less each time that was in vain."""
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._room = 0
        """Bytes that this process may write before it counts them again."""
        self._full_until = 0.0
        """Time, on the monotonic clock, before which it does not count them again."""
        self._files: OrderedDict[str, BlockFile] = OrderedDict()
        """Files that this process has open, by their name, in memory by the shard's; what was used last is last."""
        self._max_open = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._warnings: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out what is open: a process opens its own."""
        return NodeCache, (self._folder, self.max_bytes)

    @classmethod
    def of_node(cls, cache_dir: str, max_bytes: int | Literal["auto"]) -> NodeCache:
        """Open the cache of this user on this node."""
        folder = make_node_folder(cache_dir, "shards") if max_bytes else None
        if folder is None:
            return cls(None, 0)
        if max_bytes == "auto":
            max_bytes = choose_cache_bytes(folder, math.inf if cache_dir else read_scratch_bytes())
        return cls(folder, max_bytes)

    def open(self, name: str, num_bytes: int, is_private: bool = False) -> BlockFile:
        """Open the file of a shard of so many bytes, which stays while somebody has it; `is_private`: in memory.

        On the disk its name ends with the boot: after a power cut nobody knows how much of it was written.
        """
        boot, now = read_boot_id(), time.monotonic()
        key = f"{name}.{boot}" if self._folder and boot and not is_private else name
        file = self._files.get(key)
        if file is None and self._folder and key != name:
            with self.tell_failure():
                file = open_block_file(self._folder / key, num_bytes)
        if file is None:
            key, file = name, self._files.get(name) or open_block_file(None, num_bytes)
        if now > file.used_at + USED_SECONDS:
            file.used_at = now
            with contextlib.suppress(OSError):
                os.utime(file.descriptor)
        with self._lock:
            self._files[key] = file
            self._files.move_to_end(key)
            oldest = next(iter(self._files.values()))
            if len(self._files) > self._max_open or oldest.used_at < now - IDLE_SECONDS:
                self._files.popitem(last=False)
        return file

    def reserve(self, file: BlockFile, num_bytes: int) -> bool:
        """Make room for blocks of an open file; False where there is none."""
        if file.is_private:
            left = MEMORY_BYTES - num_bytes
            with self._lock:  # those unused for longest are forgotten first
                for key, other in reversed(list(self._files.items())):
                    if other.is_private:
                        left -= 512 * os.fstat(other.descriptor).st_blocks
                        if left < 0:
                            del self._files[key]
            return True
        with self.tell_failure():
            return self._make_room(num_bytes)
        return False

    def read_file(self, sha256: str, fetch: Callable[[], bytes]) -> bytes:
        """Return a small file of this digest: the node's, or what `fetch` returns or raises, which is kept.

        The processes of a node fetch it once.
        """
        content = b""
        if self._folder:
            path = self._folder / f"{sha256}.file"
            with self.tell_failure(), os.fdopen(open_or_make(path), "r+b", buffering=0) as file:
                end = time.monotonic() + LOCK_SECONDS  # without the lock, too, all write the same bytes
                while not try_lock_file(file.fileno(), fcntl.LOCK_EX) and time.monotonic() < end:
                    time.sleep(BUSY_SECONDS)
                content = file.read()
                if storage.sha256_bytes(content) != sha256:
                    content = fetch()
                    if self._make_room(len(content)):
                        os.truncate(file.fileno(), os.pwrite(file.fileno(), content, 0))
                os.utime(file.fileno())
        return content or fetch()

    def _make_room(self, num_bytes: int) -> bool:
        """Take room for bytes on the disk, of which others know nothing, so it is little; False where there is none."""
        with self._turn:
            if self._room < num_bytes <= self.max_bytes and time.monotonic() >= self._full_until:
                wanted = max(num_bytes, self.max_bytes // _ROOM)
                self._room = min(wanted, self.max_bytes - self._remove_oldest(wanted))
                self._full_until = time.monotonic() + FULL_SECONDS * (self._room < num_bytes)
            has_room = num_bytes <= self._room
            self._room -= num_bytes * has_room
        if not has_room:
            self._tell_too_small()
        return has_room

    def _remove_oldest(self, num_bytes: int) -> int:
        """Count the bytes on the disk. Without room for more, what was not used for longest and is not in use goes."""
        entries = list(storage.entries(self._folder)) if self._folder else []
        used, limit = sum(512 * status.st_blocks for _, status in entries), self.max_bytes - num_bytes
        limit -= self.max_bytes // _MARGIN if used > limit else 0
        for path, status in sorted(entries, key=lambda entry: entry[1].st_mtime):
            if used <= limit:
                break
            if status.st_mtime > time.time() - 2 * USED_SECONDS:
                self._tell_too_small()
            with self._lock:  # whoever reads from it has it open still
                self._files.pop(path.name, None)
            with contextlib.suppress(OSError), path.open("rb") as stream:
                if try_lock_file(stream.fileno(), fcntl.LOCK_EX):
                    path.unlink()
                    used -= 512 * status.st_blocks
        return used

    @contextlib.contextmanager
    def tell_failure(self) -> Iterator[None]:
        """Tell once what this node cannot do within the block: what the store answers is a DataError."""
        try:
            yield
        except OSError as error:
            self._tell(f"{self._folder} keeps no more blocks of shards", one_line(error))

    def _tell_too_small(self) -> None:
        self._tell(f"data.cache_bytes, {self.max_bytes:,} here, is less than what is read in turns", _AGAIN)

    def _tell(self, what: str, why: str) -> None:
        if what not in self._warnings:
            to_log(f"warning: {what}: {why}")
        self._warnings.add(what)


@functools.cache
def read_boot_id() -> str:
    """Read what names this boot of the machine; empty where nothing does."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def choose_cache_bytes(folder: Path, volume_bytes: float) -> int:
    """Choose how many bytes a node keeps in a folder whose volume may hold so many, whatever its disk has."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        used = sum(512 * status.st_blocks for _, status in storage.entries(folder))
        free = used + disk.f_bavail * disk.f_frsize  # what is kept belongs to the space that is free for it
        return int(min(MAX_AUTO_BYTES, VOLUME_SHARE * volume_bytes, DISK_SHARE * free))
    return 0
