"""Shards are hashed in the background from their first use, once per node, and remembered there.

Nothing waits for that before the first step. What is read meanwhile may turn out to be damaged: the next read says so,
and whoever publishes what came of it first waits until all that was read so far has been found whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from kftrain.core import remote, storage, threads
from kftrain.core.progress import to_log
from kftrain.data.settings import DataConfig
from kftrain.data.shards.block_file import open_or_make, try_lock_file
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.reading import SHARD_AGAIN, reading
from kftrain.errors import DataError, KftrainError, StorageAwayError, StorageError
from kftrain.process.machine import make_node_folder

FORGOTTEN_AFTER_SECONDS = 30 * 86400.0
"""Seconds without anything new after which what is remembered of a dataset goes."""

_READ_WHOLE = (
    "and others have no tables of digests: each node that reads from one fetches all of it, to verify it; "
    "kftrain shards verify makes the tables"
)

BUSY_SECONDS = 0.1
"""Seconds after which is asked again for a file that another process of this node is hashing."""


@dataclass(frozen=True)
class File:
    """File as it was opened, and what it should be."""

    uri: str
    size_bytes: int
    version: str
    """Text that changes with its content: its time and its inode, or what its store says; empty where that is nothing.
    """
    sha256: str


class Memory:
    """The files of this node that were found to be what they should; safe against processes that use it at once.

    One small file for each, which repeats what it stands for: a damaged one stands for nothing. Whoever hashes holds a
    lock on it, which the system takes from a process that dies.
    """

    def __init__(self, folder: Path | None) -> None:
        """Remember nothing where there is no folder: then every process hashes by itself."""
        self.folder = folder

    @classmethod
    def of_node(cls, cache_dir: str, dataset_digest: str) -> Memory:
        """Open what this user's processes remember of a dataset. Others that were not used for long are forgotten."""
        with contextlib.suppress(OSError):
            if above := make_node_folder(cache_dir, "verified"):
                folder = above / dataset_digest[:32]
                folder.mkdir(exist_ok=True)
                os.utime(folder)
                for other, status in storage.entries(above):
                    if status.st_mtime < time.time() - FORGOTTEN_AFTER_SECONDS:
                        shutil.rmtree(other, ignore_errors=True)
                return cls(folder)
        return cls(None)

    def once(self, file: File, check: Callable[[], None]) -> bool:
        """Call `check`, which raises, unless it was done for this file; False: another process is doing it now."""
        text = json.dumps(astuple(file)).encode()
        entry = None
        with contextlib.suppress(OSError):
            if self.folder is not None and file.version:
                entry = os.fdopen(open_or_make(self.folder / storage.sha256_bytes(text)), "r+b", buffering=0)
        if entry is None:
            check()
            return True
        with entry:
            # First without the lock: nearly always the file is known already. Read again under it, as another process
            # may have finished in between.
            if entry.read() == text:
                return True
            with contextlib.suppress(OSError):  # a file system without locks
                if not try_lock_file(entry.fileno(), fcntl.LOCK_EX):
                    return False
            entry.seek(0)
            if entry.read() != text:
                check()
                with contextlib.suppress(OSError):  # a full disk costs another look at the file, later
                    os.truncate(entry.fileno(), os.pwrite(entry.fileno(), text, 0))
        return True


class Uses:
    """Notes of files that are about to be read, for whoever hashes them: here nobody does."""

    def __init__(self, cache: NodeCache | None = None) -> None:
        """`cache`: keeps the blocks of remote files that verify themselves; None: each dataset's own, in memory."""
        self.cache = cache or NodeCache(None, 0)

    def begin(self, file: File) -> None:
        """Note that the file is about to be read."""

    def raise_found(self) -> None:
        """Raise what was found so far of the files that are read."""

    def note_opened(self, opened: list[Any]) -> None:
        """Note what another process has opened, as `Opened` lists it, and raise what was found so far."""
        for file in opened:
            self.begin(File(*file))
        self.raise_found()


class Opened(Uses):
    """Notes of files for another process, which hashes them and raises what is wrong."""

    def __init__(self, cache: NodeCache | None = None) -> None:
        super().__init__(cache)
        self._new: list[File] = []

    def begin(self, file: File) -> None:
        """Note a file, as `Uses` says."""
        self._new.append(file)

    def take_new(self) -> list[Any]:
        """Return what came since the last call, as plain data for `note_opened`."""
        taken, self._new = self._new, []
        return [astuple(file) for file in taken]


class FirstUse(Uses):
    """Hashing of files in threads.

    All methods may be called from any thread.
    """

    def __init__(self, memory: Memory, is_on: bool = True, cache: NodeCache | None = None) -> None:
        """Hash no file where `is_on` is False."""
        super().__init__(cache)
        self._memory = memory
        self._is_on = is_on
        self._changed = threading.Condition()
        self._begun: set[File] = set()
        self._left: deque[File] = deque()
        """Files that are not found whole yet: the first is being hashed."""
        self._since = math.inf
        """Time, on the monotonic clock, since which it is; infinite where none is."""
        self._problem: Exception | None = None
        self._is_told = False

    def begin(self, file: File) -> None:
        """Note that the file is about to be read; only the first time counts."""
        with self._changed:
            if not self._is_on or file in self._begun:
                return
            if not self._begun:
                threads.start(self._work, "verify")
            if not (storage.is_local(file.uri) or self._is_told):
                to_log(f"{file.uri} {_READ_WHOLE}")
                self._is_told = True
            self._begun.add(file)
            self._left.append(file)
            self._changed.notify_all()

    def raise_found(self) -> None:
        """Raise what was found so far: DataError for a damaged file, StorageError where one is out of reach."""
        # Read without the lock, as this is called for every batch: it is set once and never taken back.
        if self._problem is not None:
            raise self._problem

    def make_barrier(self) -> Callable[[], None]:
        """Return a function that waits until all that has begun by now is found whole; it raises as `raise_found` does.

        It raises StorageError, too, where a file is not read within its time.
        """
        with self._changed:
            # A snapshot: what begins later may be of later steps, which nothing waits for here.
            awaited = frozenset(self._left)

        def require() -> None:
            with self._changed:
                while self._problem is None and not awaited.isdisjoint(self._left):
                    seconds = remote.deadline.seconds(self._left[0].size_bytes)
                    if time.monotonic() - self._since > seconds:
                        what = f"it was not read within {seconds:.0f} s"
                        raise StorageError(what, where=self._left[0].uri, fix="check the storage")
                    self._changed.wait(1.0)
            self.raise_found()

        return require

    def require_verified(self) -> None:
        """Wait until everything that has begun is found whole. Raises as `make_barrier` says."""
        self.make_barrier()()

    def _work(self) -> None:
        while self._problem is None:
            with self._changed:
                self._changed.wait_for(lambda: self._left)
                file, self._since = self._left[0], time.monotonic()
            is_settled = True
            try:
                is_settled = self._settle(file)
            except Exception as error:  # noqa: BLE001 - it is raised again, in the threads that read
                self._problem = error
            with self._changed:
                self._since = math.inf
                if is_settled:
                    self._left.popleft()
                    self._changed.notify_all()
                else:
                    self._left.rotate(-1)
                    self._changed.wait(BUSY_SECONDS)

    def _settle(self, file: File) -> bool:
        """Hash a file; False if another process does that now. Raises what is wrong with it."""
        return not self._is_on or self._memory.once(file, lambda: check_content(file))


class AtOnce(FirstUse):
    """Hashing in the thread that reads, which raises there: for whoever forks, or would not wait in the end."""

    def begin(self, file: File) -> None:
        """Return when the file is found whole, which is remembered. Raises as `raise_found` does."""
        while not self._settle(file):
            time.sleep(BUSY_SECONDS)


def make_first_use(data: DataConfig, dataset_digest: str) -> FirstUse:
    """Choose how files are verified on their first use, as `data.verify` says, and what the node keeps of them."""
    memory, cache = Memory.of_node(data.cache_dir, dataset_digest), NodeCache.of_node(data.cache_dir, data.cache_bytes)
    return FirstUse(memory, data.verify == "first_use", cache)


def check_content(file: File) -> None:
    """Raise DataError where the file's content is another one, StorageError where it has just been replaced."""
    require_content(file.uri, file.sha256)
    with reading(file.uri):
        now = storage.size_and_version(file.uri)
    if now != (file.size_bytes, file.version):
        raise StorageError("it was replaced while it was read", where=file.uri, fix="resume the run")


def require_content(uri: str, sha256: str, fix: str = SHARD_AGAIN) -> None:
    """Read a whole file, and again where its sha256 is another one.

    Raises DataError where the file has changed, StorageError where something else answers for its store.
    """
    with reading(uri, fix):
        first = storage.sha256_file(uri)
        again = first if first == sha256 else storage.sha256_file(uri)
        if again != sha256:
            what = "its content has changed: the sha256 differs from the manifest's"
            raise make_changed_error(uri, what, fix, storage.size_bytes(uri) if again == first else -1)


def require_shard_size(uri: str, expected: int, fix: str = SHARD_AGAIN) -> tuple[int, str]:
    """Return size and version of a file. Raises as `require_content`."""
    with reading(uri, fix):
        for _ in range(2):
            actual = storage.size_and_version(uri)
            if actual[0] == expected:
                return actual
        raise make_changed_error(uri, describe_truncation(actual[0], expected), fix, actual[0])


def describe_truncation(num_bytes: int, expected: int) -> str:
    """Describe a file of another size."""
    return f"truncated or changed: it has {num_bytes} bytes, not {expected}"


def make_changed_error(uri: str, what: str, fix: str, size_bytes: int) -> KftrainError:
    """Make the error for a file that was read as another one, of so many bytes: is that what its folder lists?"""
    folder, _, name = uri.rpartition("/")
    if storage.is_local(uri) or dict(storage.find(folder).values()).get(name, {}).get("size") == size_bytes:
        return DataError(what, where=uri, fix=fix)
    fix = "see what stands between this process and the store"
    return StorageAwayError(f"something else answers for its store, or now and then: {what}", where=uri, fix=fix)
