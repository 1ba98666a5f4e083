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
"""What is remembered of a dataset goes after so long without anything new."""

MAX_FETCHES = 4
"""Remote files that one process fetches at the same time."""

BUSY_SECONDS = 0.1
"""How soon is asked again for a file that another process of this node is hashing."""


@dataclass(frozen=True)
class File:
    """A file as it was opened, and what it should be."""

    uri: str
    size_bytes: int
    version: str
    """What changes with its content: its time and its inode, or what its store says; empty where that is nothing."""
    sha256: str


class Memory:
    """The files of this node that were found to be what they should; safe against processes that use it at once.

    One small file for each, which repeats what it stands for: a damaged one stands for nothing. Whoever hashes holds a
    lock on it, which the system takes from a process that dies.
    """

    def __init__(self, folder: Path | None) -> None:
        """Without a folder nothing is remembered, and every process hashes by itself."""
        self._folder = folder

    @classmethod
    def of_node(cls, cache_dir: str, dataset_digest: str) -> Memory:
        """What this user's processes remember of a dataset. Others that were not used for long are forgotten."""
        above = node_folder(cache_dir, "verified")
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
        """Calls `check`, which raises, unless it was done for this file; False: another process is doing it now."""
        text = _text(file)
        entry = self._open(text) if file.version else None
        if entry is None:
            check()
            return True
        with entry:
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
        """Whether the file was found whole."""
        entry = self._open(_text(file))
        if entry is None:
            return False
        with entry:
            return entry.read() == _text(file)

    def note(self, file: File) -> None:
        """Remembers a file that was found whole."""
        entry = self._open(_text(file))
        if entry is not None:
            with entry:
                _write(entry, _text(file))

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
    """Takes note of files that are about to be read."""

    def __init__(self, copies: NodeCache | None = None) -> None:
        """`copies`: where remote files are fetched to, which verifies them."""
        self._copies = copies

    def begin(self, file: File) -> None:
        """Says that the file is about to be read."""
        raise NotImplementedError

    def raise_found(self) -> None:
        """Raises what was found so far of the files that are read."""

    def copy_of(self, file: File) -> BinaryIO | None:
        """The whole copy of a remote file, opened; None where there is none yet."""
        return None if self._copies is None else self._copies.copy_of(file)


class Opened(Uses):
    """Notes files for another process, which hashes them, and raises what is wrong."""

    def __init__(self, copies: NodeCache | None = None) -> None:
        super().__init__(copies)
        self._all: set[File] = set()
        self._new: list[File] = []

    def begin(self, file: File) -> None:
        """See `Uses`."""
        if file not in self._all:
            self._all.add(file)
            self._new.append(file)

    def take(self) -> list[Any]:
        """What came since the last call, as plain data for `note_opened`."""
        taken, self._new = self._new, []
        return [astuple(file) for file in taken]


def note_opened(uses: Uses | None, opened: list[Any]) -> None:
    """Notes what another process has opened, and raises what was found so far."""
    if uses is not None:
        for file in opened:
            uses.begin(File(*file))
        uses.raise_found()


class FirstUse(Uses):
    """Hashes files in threads. All methods may be called from any thread."""

    def __init__(self, memory: Memory, is_on: bool = True, copies: NodeCache | None = None) -> None:
        """Where it is not on, no file is hashed."""
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
        """Says that the file is about to be read; only the first time counts."""
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
        """Raises what was found so far: DataError that names a damaged file, StorageError where one is out of reach."""
        if self._problem is not None:
            raise self._problem

    def so_far(self) -> Callable[[], None]:
        """A function that waits until all that has begun by now is found whole; it raises as `raise_found` does.

        It raises StorageError, too, where a file is not read within its time.
        """
        with self._changed:
            awaited = frozenset(self._left)

        def require() -> None:
            with self._changed:
                while self._problem is None and not awaited.isdisjoint(self._left):
                    self._require_in_time()
                    self._changed.wait(1.0)
            self.raise_found()

        return require

    def require_verified(self) -> None:
        """Waits until everything that has begun is found whole. Raises as `so_far` says."""
        self.so_far()()

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
            self._end(file) if done else self._again(file)

    def _settle(self, file: File) -> bool:
        """Whether nothing is left to do for a file; raises what is wrong with it."""
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

    def _again(self, file: File) -> None:
        with self._changed:
            self._current.pop(file)
            self._queue.append(file)
            self._changed.wait(BUSY_SECONDS)


class AtOnce(FirstUse):
    """Hashes in the thread that reads, and raises there: for whoever forks, or would not wait in the end."""

    def begin(self, file: File) -> None:
        """Returns when the file is found whole, which is remembered. Raises as `raise_found` does."""
        while not self._settle(file):
            time.sleep(BUSY_SECONDS)


def _text(file: File) -> bytes:
    return json.dumps(astuple(file)).encode()


def _write(entry: BinaryIO, text: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk costs another look at the file, later
        os.pwrite(entry.fileno(), text, 0)
        entry.truncate(len(text))


def check_content(file: File) -> None:
    """Raises DataError where the file's content is another one, StorageError where it has just been replaced."""
    require_content(file.uri, file.sha256)
    with reading(file.uri):
        now = storage.size_and_version(file.uri)
    if now != (file.size_bytes, file.version):
        raise StorageError("it was replaced while it was read", where=file.uri, fix="resume the run")


def require_content(uri: str, sha256: str, fix: str = SHARD_AGAIN) -> None:
    """Reads a whole file, and again where its sha256 is another one.

    Raises DataError where the file has changed, StorageError where something else answers for its store.
    """
    with reading(uri, fix):
        first = storage.sha256_file(uri)
        again = first if first == sha256 else storage.sha256_file(uri)
        if again != sha256:
            what = "its content has changed: the sha256 differs from the manifest's"
            raise _changed(uri, what, fix, storage.size_bytes(uri) if again == first else -1)


def require_shard_size(uri: str, expected: int, fix: str = SHARD_AGAIN) -> tuple[int, str]:
    """Size and version of a file. Raises as `require_content`."""
    with reading(uri, fix):
        for _ in range(2):
            found = storage.size_and_version(uri)
            if found[0] == expected:
                return found
        raise _changed(uri, truncated(found[0], expected), fix, found[0])


def truncated(num_bytes: int, expected: int) -> str:
    """Describe a file of another size."""
    return f"truncated or changed: it has {num_bytes} bytes, not {expected}"


def _changed(uri: str, what: str, fix: str, size_bytes: int) -> KftrainError:
    """What to raise of a file that was read as another one, of so many bytes: is that what its folder lists?"""
    folder, _, name = uri.rpartition("/")
    listed = {} if storage.is_local(uri) else {each: info["size"] for each, info in storage.find(folder).values()}
    if storage.is_local(uri) or listed.get(name) == size_bytes:
        return DataError(what, where=uri, fix=fix)
    fix = "see what stands between this process and the store"
    return StorageAwayError(f"something else answers for its store, or now and then: {what}", where=uri, fix=fix)


def node_folder(cache_dir: str, name: str) -> Path | None:
    """A folder of this node that only this user can write to; None where there can be none."""
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
