"""Copies of remote shards on a node: fetched whole in the background, verified on the way, shared by its processes.

A copy is named by its digest and comes into being by a rename, so a process that is killed leaves none that is taken
for whole. Locks are the system's, on the files themselves: who fetches a shard, and who reads its copy. What was not
read for the longest time, and is read by nobody, makes room for what is needed now.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kftrain.core import storage
from kftrain.core.outages import one_line
from kftrain.core.progress import to_log
from kftrain.data.settings import DataConfig
from kftrain.data.shards.manifest import reading
from kftrain.data.shards.verified import File, FirstUse, Memory, Opened, make_node_folder, require_content

CHUNK_BYTES = 1 << 20

_PART = ".part"
"""Suffix of what is being fetched."""
_LOCK = ".lock"
"""Name of the lock of whoever counts what there is."""


class NodeCache:
    """The copies of a node. All methods may be called by any thread of any process."""

    def __init__(self, folder: Path, max_bytes: int, memory: Memory) -> None:
        """`max_bytes`: of all copies together. `memory`: knows which of them are whole."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._memory = memory
        self._is_told = False

    @classmethod
    def of_node(cls, cache_dir: str, max_bytes: int, memory: Memory) -> NodeCache | None:
        """Open the cache of this user on this node; None where nothing may be kept."""
        folder = make_node_folder(cache_dir, "shards") if max_bytes else None
        return None if folder is None else cls(folder, max_bytes, memory)

    def open_copy(self, file: File) -> BinaryIO | None:
        """Open the whole copy of a file; it stays until that is closed.

        None where there is none.
        """
        try:
            stream = (self._folder / file.sha256).open("rb")
        except OSError:
            return None
        status = os.fstat(stream.fileno())
        # Locked first, looked at then: between the two nobody can delete the copy, as `_reserve` deletes only what is
        # unlocked.
        if not _try_lock(stream, fcntl.LOCK_SH) or not self._memory.knows(_describe_copy(stream, file)):
            stream.close()
            return None
        with contextlib.suppress(OSError):
            os.utime(stream.fileno(), ns=(time.time_ns(), status.st_mtime_ns))  # it was used just now
        return stream

    def fetch(self, file: File) -> bool | None:
        """Make a copy; False: there is no room for it, None: another process is making it now.

        A folder that is full, damaged or gone is no room: what it is for is read from the store. Raises DataError where
        the object has another content, also when it is fetched once more.
        """
        try:
            with self._open_part(file) as part:
                if part is None:
                    return None
                return self._is_whole(file) or self._fetch_into(part, file)
        except OSError as error:  # of this node: what the store answers is a DataError
            if not self._is_told:
                to_log(f"warning: {self._folder} keeps no more copies of shards: {one_line(error)}")
            self._is_told = True
            return False

    def _fetch_into(self, part: BinaryIO, file: File) -> bool:
        if not self._reserve(part, file.size_bytes):
            return False
        if _download(file, part) != file.sha256 and _download(file, part) != file.sha256:
            require_content(file.uri, file.sha256)
            return False
        # Durable, then remembered as whole, then renamed: whoever sees the name must find all of its content.
        os.fsync(part.fileno())
        self._memory.note(_describe_copy(part, file))
        os.rename(self._path_of_part(file), self._folder / file.sha256)
        return True

    def _is_whole(self, file: File) -> bool:
        """Tell whether there is a copy; one that nobody remembers is hashed, and goes where it is damaged."""
        path = self._folder / file.sha256
        if not path.exists():
            return False
        with path.open("rb") as stream:
            copy = _describe_copy(stream, file)
            if self._memory.knows(copy):
                return True
            if storage.sha256_file(str(path)) == file.sha256:
                self._memory.note(copy)
                return True
        path.unlink()
        return False

    def _path_of_part(self, file: File) -> Path:
        return self._folder / (file.sha256 + _PART)

    @contextlib.contextmanager
    def _open_part(self, file: File) -> Iterator[BinaryIO | None]:
        """Open the file that is fetched into; it is gone in the end unless it was renamed.

        None where another process has it.
        """
        path = self._path_of_part(file)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0) as part:
            if not _try_lock(part, fcntl.LOCK_EX) or not _is_at(part, path):
                yield None
                return
            try:
                yield part
            finally:
                if _is_at(part, path):
                    path.unlink()

    def _reserve(self, part: BinaryIO, num_bytes: int) -> bool:
        """Make room for a file, which has that size from now on; False where what is in use leaves none.

        Then nothing goes: copies that are there are worth more than an attempt.
        """
        if num_bytes > self._max_bytes:
            return False
        with (self._folder / _LOCK).open("ab") as lock, contextlib.ExitStack() as locks:
            # One process counts at a time. What it reserves is seen by the next one as the size of the part, so the sum
            # holds.
            fcntl.flock(lock, fcntl.LOCK_EX)
            part.truncate(0)
            entries = [entry for entry in storage.entries(self._folder) if entry[0].name != _LOCK]
            too_many = sum(status.st_size for _, status in entries) + num_bytes - self._max_bytes
            oldest_first = sorted(entries, key=lambda entry: (entry[0].suffix != _PART, entry[1].st_atime_ns))
            unused = []
            for path, status in oldest_first:
                if too_many > 0 and status.st_size and _is_unused(path, locks):
                    unused.append(path)
                    too_many -= status.st_size
            if too_many > 0:
                return False
            for path in unused:
                path.unlink(missing_ok=True)
            part.truncate(num_bytes)
            return True


def _describe_copy(stream: BinaryIO, file: File) -> File:
    """Describe a copy as it is opened."""
    return File(f"copy of {file.sha256}", *storage.read_size_and_version(os.fstat(stream.fileno())), file.sha256)


def _download(file: File, part: BinaryIO) -> str:
    """Write the object over what is there, no more of it than its size; return the sha256 of what came."""
    digest, position = hashlib.sha256(), 0
    with reading(file.uri):
        opened = storage.open_read(file.uri)
    with opened as stream:
        while position <= file.size_bytes:
            with reading(file.uri):
                chunk = stream.read(CHUNK_BYTES)
            if not chunk:
                break
            digest.update(chunk)
            os.pwrite(part.fileno(), chunk[: file.size_bytes - position], position)
            position += len(chunk)
    part.truncate(min(position, file.size_bytes))
    return digest.hexdigest()


def _try_lock(stream: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(stream: BinaryIO, path: Path) -> bool:
    """Tell whether an open file still is the one at a path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    return False


def _is_unused(path: Path, locks: contextlib.ExitStack) -> bool:
    """Tell whether no process uses a file; none does until `locks` are closed."""
    with contextlib.suppress(FileNotFoundError):
        stream = path.open("rb")
        if _try_lock(stream, fcntl.LOCK_EX):
            locks.enter_context(stream)
            return True
        stream.close()
    return False


def make_first_use(data: DataConfig, dataset_digest: str) -> FirstUse:
    """Choose how files are verified on their first use, as `data.verify` and `data.cache_bytes` say."""
    memory = Memory.of_node(data.cache_dir, dataset_digest)
    return FirstUse(memory, data.verify == "first_use", NodeCache.of_node(data.cache_dir, data.cache_bytes, memory))


def opened_of(data: DataConfig, dataset_digest: str) -> Opened:
    """Return the same for a process whose files another one hashes and fetches."""
    memory = Memory.of_node(data.cache_dir, dataset_digest)
    return Opened(NodeCache.of_node(data.cache_dir, data.cache_bytes, memory))
