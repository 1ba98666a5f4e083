"""The files of one checkpoint, as torch.distributed.checkpoint (DCP) reads and writes them, in any storage.

What is written is hashed on the way, so that nothing is read back, and is durable when its stream is closed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from torch.distributed.checkpoint import filesystem

from kftrain.core import storage
from kftrain.run.commit import FileEntry

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of the metadata before DCP renames it. Object stores cannot rename: until then it is held in memory."""


class CheckpointFiles(filesystem.FileSystemBase):
    """A file system for DCP over our storage. Raises OSError and StorageError."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}
        """Files that were written: name -> size and digest."""
        self._held: dict[str, bytes] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file for reading (`rb`) or a new one for writing (`wb`)."""
        uri = os.fspath(path)
        with _plain_errors(uri):
            if mode == "rb":
                with storage.open_read(uri) as stream:
                    yield stream
            elif uri.endswith(TEMPORARY_SUFFIX):
                with io.BytesIO() as held:
                    yield held
                    # Only where all of it was written: an error leaves nothing that `rename` could publish.
                    self._held[uri] = held.getvalue()
            else:
                with self._open_hashing(uri) as hashing:
                    yield hashing

    @contextlib.contextmanager
    def _open_hashing(self, uri: str) -> Iterator[HashingStream]:
        with storage.open_write(uri) as stream:
            hashing = HashingStream(stream)
            try:
                yield hashing
            except RuntimeError as error:  # torch's own, which says "unexpected pos", where a write has failed
                raise (hashing.error or error) from None
        self._add(uri, hashing.entry)  # after the stream is closed: until then the file is not durable

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Publish what was held in memory, whole or not at all."""
        content = self._held.pop(os.fspath(path))
        uri = os.fspath(new_path)
        with _plain_errors(uri):
            storage.publish(uri, content)
        self._add(uri, FileEntry(bytes=len(content), sha256=storage.sha256_bytes(content)))

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Join the folder's URI and a file's name."""
        return storage.join(os.fspath(path), suffix)

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Return the URI of the folder as a string."""
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make the folder; object stores have none."""
        uri = os.fspath(path)
        with _plain_errors(uri):
            if storage.is_local(uri):
                storage.make_folder(storage.local_path(uri))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept every URI: storage itself says which it knows."""
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Tell whether a file is there."""
        with _plain_errors(os.fspath(path)):
            return storage.exists(os.fspath(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Delete a file."""
        with _plain_errors(os.fspath(path)):
            storage.remove(os.fspath(path))

    def _add(self, uri: str, entry: FileEntry) -> None:
        self.entries[uri.rsplit("/", 1)[-1]] = entry


class HashingStream:
    """A file to write to, in order, that knows the digest of what was written."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._num_bytes = 0
        self.error: Exception | None = None
        """Error of the first write that failed; torch raises another one in its place."""

    @property
    def entry(self) -> FileEntry:
        """Size and digest of the bytes written so far."""
        return FileEntry(bytes=self._num_bytes, sha256=self._digest.hexdigest())

    def write(self, content: bytes | memoryview) -> int:
        """Write all of it; return its length in bytes."""
        try:
            self._stream.write(content)
        except Exception as error:  # of any driver: torch raises another one in its place
            self.error = self.error or error
            raise
        # Only now: the digest is of bytes that the stream has taken.
        self._digest.update(content)
        num_bytes = memoryview(content).nbytes
        self._num_bytes += num_bytes
        return num_bytes

    def tell(self) -> int:
        """Number of bytes written."""
        return self._num_bytes

    def flush(self) -> None:
        """Nothing: `storage.open_write` does it at the end."""

    def close(self) -> None:
        """Nothing: `storage.open_write` does it at the end."""


@contextlib.contextmanager
def _plain_errors(uri: str) -> Iterator[None]:
    """Turn errors into ones that survive being pickled for another process; those of drivers do not all."""
    try:
        with storage.simplify_errors(uri):
            yield
    except OSError as error:
        described = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise OSError(error.errno or errno.EIO, error.strerror or described, uri) from error
