"""Shards are hashed in the background from their first use, once per node, and remembered there.

Nothing waits for that before the first step. What is read meanwhile may turn out to be damaged: the next read says so,
and whoever publishes what came of it first waits until all that was read so far has been found whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kftrain.core import remote, storage, threads
from kftrain.data.shards.manifest import SHARD_AGAIN, reading
from kftrain.errors import DataError, KftrainError, StorageAwayError, StorageError

if TYPE_CHECKING:
    from kftrain.data.shards.cache import NodeCache

FORGOTTEN_AFTER_SECONDS = 30 * 86400.0
"""Seconds without anything new after which what is remembered of a dataset goes."""

MAX_FETCHES = 4
"""Remote files that one process fetches at the same time."""

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
        self._folder = folder

    @classmethod
    def of_node(cls, cache_dir: str, dataset_digest: str) -> Memory:
        """Open what this user's processes remember of a dataset. Others that were not used for long are forgotten."""
        above = make_node_folder(cache_dir, "verified")
        if above is None:
            return cls(None)
        with contextlib.suppress(OSError):
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
        text = _describe_file(file)
        entry = self._open(text) if file.version else None
        if entry is None:
            check()
            return True
        with entry:
            # First without the lock: nearly always the file is known already. Read again under it, as another process
            # may have finished in between.
            if entry.read() == text:
                return True
            try:
                fcntl.flock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                pass
            entry.seek(0)
            if entry.read() != text:
                check()
                _write(entry, text)
        return True

    def knows(self, file: File) -> bool:
        """Tell whether the file was found whole."""
        entry = self._open(_describe_file(file))
        if entry is None:
            return False
        with entry:
            return entry.read() == _describe_file(file)

    def note(self, file: File) -> None:
        """Remember a file that was found whole."""
        entry = self._open(_describe_file(file))
        if entry is not None:
            with entry:
                _write(entry, _describe_file(file))

    def _open(self, text: bytes) -> BinaryIO | None:
        if self._folder is None:
            return None
        try:
            path = self._folder / hashlib.sha256(text).hexdigest()
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            return os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
        except OSError:
            return None


class Uses:
    """Notes of files that are about to be read."""

    def __init__(self, copies: NodeCache | None = None) -> None:
        """`copies`: where remote files are fetched to, which verifies them."""
        self._copies = copies

    def begin(self, file: File) -> None:
        """Note that the file is about to be read."""
        raise NotImplementedError

    def raise_found(self) -> None:
        """Raise what was found so far of the files that are read."""

    def open_copy(self, file: File) -> BinaryIO | None:
        """Open the whole copy of a remote file; None where there is none yet."""
        return None if self._copies is None else self._copies.open_copy(file)


class Opened(Uses):
    """Notes of files for another process, which hashes them and raises what is wrong."""

    def __init__(self, copies: NodeCache | None = None) -> None:
        super().__init__(copies)
        self._all: set[File] = set()
        self._new: list[File] = []

    def begin(self, file: File) -> None:
        """Note a file once, as `Uses` says."""
        if file not in self._all:
            self._all.add(file)
            self._new.append(file)

    def take_new(self) -> list[Any]:
        """Return what came since the last call, as plain data for `note_opened`."""
        taken, self._new = self._new, []
        return [astuple(file) for file in taken]


def note_opened(uses: Uses | None, opened: list[Any]) -> None:
    """Note what another process has opened, and raise what was found so far."""
    if uses is not None:
        for file in opened:
            uses.begin(File(*file))
        uses.raise_found()


class FirstUse(Uses):
    """Hashing of files in threads.

    All methods may be called from any thread.
    """

    def __init__(self, memory: Memory, is_on: bool = True, copies: NodeCache | None = None) -> None:
        """Hash no file where `is_on` is False."""
        super().__init__(copies)
        self._memory = memory
        self._is_on = is_on
        self._changed = threading.Condition()
        self._begun: set[File] = set()
        self._left: set[File] = set()
        self._queue: deque[File] = deque()
        self._current: dict[File, float] = {}
        """What is being hashed, and since when on the monotonic clock."""
        self._problem: Exception | None = None

    def begin(self, file: File) -> None:
        """Note that the file is about to be read; only the first time counts."""
        with self._changed:
            is_copied = self._copies is not None and not storage.is_local(file.uri)
            if not (self._is_on or is_copied) or file in self._begun:
                return
            if len(self._begun) < (MAX_FETCHES if is_copied else 1):
                threads.start(self._work, "verify")
            self._begun.add(file)
            self._left.add(file)
            self._queue.append(file)
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
                    self._require_in_time()
                    self._changed.wait(1.0)
            self.raise_found()

        return require

    def require_verified(self) -> None:
        """Wait until everything that has begun is found whole. Raises as `make_barrier` says."""
        self.make_barrier()()

    def _require_in_time(self) -> None:
        for file, start in self._current.items():
            seconds = remote.deadline.seconds(file.size_bytes)
            if time.monotonic() - start > seconds:
                raise StorageError(f"it was not read within {seconds:.0f} s", where=file.uri, fix="check the storage")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                file = self._queue.popleft()
                self._current[file] = time.monotonic()
            try:
                done = self._settle(file)
            except Exception as error:  # noqa: BLE001 - it is raised again, in the threads that read
                self._end(file, error)
                return
            self._end(file) if done else self._queue_again(file)

    def _settle(self, file: File) -> bool:
        """Hash or fetch a file; False if another process does that now. Raises what is wrong with it."""
        if self._copies is not None and not storage.is_local(file.uri):
            fetched = self._copies.fetch(file)
            if fetched is not False:
                return fetched is True
        return not self._is_on or self._memory.once(file, lambda: check_content(file))

    def _end(self, file: File, problem: Exception | None = None) -> None:
        with self._changed:
            self._current.pop(file)
            self._left.discard(file)
            self._problem = self._problem or problem
            self._changed.notify_all()

    def _queue_again(self, file: File) -> None:
        with self._changed:
            self._current.pop(file)
            self._queue.append(file)
            self._changed.wait(BUSY_SECONDS)


class AtOnce(FirstUse):
    """Hashing in the thread that reads, which raises there: for whoever forks, or would not wait in the end."""

    def begin(self, file: File) -> None:
        """Return when the file is found whole, which is remembered. Raises as `raise_found` does."""
        while not self._settle(file):
            time.sleep(BUSY_SECONDS)


def _describe_file(file: File) -> bytes:
    return json.dumps(astuple(file)).encode()


def _write(entry: BinaryIO, text: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk costs another look at the file, later
        os.pwrite(entry.fileno(), text, 0)
        entry.truncate(len(text))


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
            raise _make_changed_error(uri, what, fix, storage.size_bytes(uri) if again == first else -1)


def require_shard_size(uri: str, expected: int, fix: str = SHARD_AGAIN) -> tuple[int, str]:
    """Return size and version of a file. Raises as `require_content`."""
    with reading(uri, fix):
        for _ in range(2):
            actual = storage.size_and_version(uri)
            if actual[0] == expected:
                return actual
        raise _make_changed_error(uri, describe_truncation(actual[0], expected), fix, actual[0])


def describe_truncation(num_bytes: int, expected: int) -> str:
    """Describe a file of another size."""
    return f"truncated or changed: it has {num_bytes} bytes, not {expected}"


def _make_changed_error(uri: str, what: str, fix: str, size_bytes: int) -> KftrainError:
    """Make the error for a file that was read as another one, of so many bytes: is that what its folder lists?"""
    folder, _, name = uri.rpartition("/")
    listed = (
        {}
        if storage.is_local(uri)
        else {listed_name: info["size"] for listed_name, info in storage.find(folder).values()}
    )
    if storage.is_local(uri) or listed.get(name) == size_bytes:
        return DataError(what, where=uri, fix=fix)
    fix = "see what stands between this process and the store"
    return StorageAwayError(f"something else answers for its store, or now and then: {what}", where=uri, fix=fix)


def make_node_folder(cache_dir: str, name: str) -> Path | None:
    """Make a folder of this node that only this user can write to; None where there can be none."""
    folder = Path(cache_dir or tempfile.gettempdir()) / f"kftrain-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            return None
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder / name
