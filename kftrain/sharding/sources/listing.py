"""Lists the files below a folder, here or in an object store, with what shows that one of them has changed."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from kftrain.core import storage, threads
from kftrain.data.time_window import from_nanoseconds
from kftrain.errors import DataError

STATE = "state of the file"
"""Key of a file's state in a line of a listing. Nothing is known by it, so that a copy of the files gives the same
dataset."""

THREADS = 16
"""Files that are looked at at the same time."""


@dataclass(frozen=True)
class SourceFile:
    """File of a source, with what shows that it has changed."""

    name: str
    """Path relative to the listed folder, with `/`."""
    uri: str
    size_bytes: int
    version: str
    """Modification time or, where a store has one, the entity tag."""
    state: str = ""
    """Text that changes where content is replaced and all the others stay: `ctime`, or the version of an object."""

    def to_dict(self) -> dict[str, Any]:
        """Return its line in a source's listing."""
        return {"name": self.name, "size_bytes": self.size_bytes, "version": self.version, STATE: self.state}


class ListedFile(NamedTuple):
    """A file as it is listed. When it was written is no part of what a dataset is known by."""

    file: SourceFile
    modified: datetime | None
    """Time in UTC; None where the store does not say."""


@contextlib.contextmanager
def reading_source(where: str) -> Iterator[None]:
    """Turn what goes wrong while reading raw data into a DataError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError("there is no such file or folder", where=where, fix="check data.source") from error
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=where, fix="check its permissions") from error


def digest_listing(listing: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the digest of a source's listing, and that of the states of its files."""
    known = [{k: v for k, v in line.items() if k != STATE} if isinstance(line, dict) else line for line in listing]
    return storage.digest_json(known), storage.digest_json([STATE in line and line[STATE] for line in listing])


def list_files(
    uri: str, wanted: Callable[[str], bool], skipped_folders: frozenset[str] = frozenset()
) -> list[SourceFile]:
    """List files as `list_with_times`, without the times."""
    return [listed.file for listed in list_with_times(uri, wanted, skipped_folders)]


def list_with_times(
    uri: str, wanted: Callable[[str], bool], skipped_folders: frozenset[str] = frozenset()
) -> list[ListedFile]:
    """List the regular files below a folder, or the one file at `uri`, whose name is wanted; sorted by name.

    Hidden files and folders are left out, and so are folders of a name in `skipped_folders`, at any depth. Links are
    followed. Raises DataError where something cannot be read, and for a link to a folder that it lies in.
    """
    with reading_source(uri):
        entries = _list_local(uri, skipped_folders) if storage.is_local(uri) else _list_remote(uri, skipped_folders)
        return sorted((entry for entry in entries if wanted(entry.file.name)), key=lambda entry: entry.file.name)


def _list_local(uri: str, skipped_folders: frozenset[str]) -> Iterator[ListedFile]:
    root = storage.local_path(uri)
    if not root.is_dir():
        yield from _list_regular(root.name, str(root), root.stat())
        return
    folders = [(str(root), "", frozenset({_identify(root.stat())}))]
    while folders:
        folder, prefix, above = folders.pop()
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if _hidden(entry.name) or (status := _read_status(entry)) is None:
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    yield from _list_regular(prefix + entry.name, entry.path, status)
                elif entry.name not in skipped_folders:
                    if _identify(status) in above:
                        raise DataError("the link leads to a folder that it lies in", where=entry.path, fix="delete it")
                    folders.append((entry.path, f"{prefix}{entry.name}/", above | {_identify(status)}))


def _identify(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _read_status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of an entry, through links; None where it has just gone.

    Raises DataError with the name of a link that leads nowhere.
    """
    try:
        return entry.stat()
    except OSError as error:
        if not entry.is_symlink():
            if isinstance(error, FileNotFoundError):
                return None
            raise
        raise DataError(
            f"the link leads nowhere: {error.strerror}", where=entry.path, fix="correct or delete it"
        ) from error


def _list_regular(name: str, path: str, status: os.stat_result) -> Iterator[ListedFile]:
    """Yield a regular file; nothing for any other."""
    if stat.S_ISREG(status.st_mode):
        file = SourceFile(name, path, status.st_size, str(status.st_mtime_ns), str(status.st_ctime_ns))
        yield ListedFile(file, from_nanoseconds(status.st_mtime_ns))


def _list_remote(uri: str, skipped_folders: frozenset[str]) -> Iterator[ListedFile]:
    objects = storage.find(uri)
    if not objects:
        raise FileNotFoundError(uri)
    for path, (name, info) in objects.items():
        parts = name.split("/")
        if not any(map(_hidden, parts)) and skipped_folders.isdisjoint(parts[:-1]):
            state = str(info.get("VersionId") or info.get("generation") or "")
            file = SourceFile(name, path, int(info["size"]), storage.read_version(info), state)
            yield ListedFile(file, storage.read_modified(info))


def require_as_listed(files: Iterable[Mapping[str, Any]]) -> None:
    """Raise DataError for the first file that is not as it was listed. `files`: as pieces name them."""

    def look(file: Mapping[str, Any]) -> None:
        with reading_source(uri := file["uri"]):
            size_bytes, version = storage.size_and_version(uri)
        version = version.partition("-")[0] if storage.is_local(uri) else version  # a listing has no inodes
        if (size_bytes, version) != (file["size_bytes"], file["version"]):
            fix = "run again when nobody writes to it"
            raise DataError("the source changed while it was read", where=uri, fix=fix)

    threads.call_together(look, list(files), THREADS)


def is_hidden(name: str) -> bool:
    """Tell whether a name is no data, as Spark's `_SUCCESS` and `_temporary/`.

    Prose and source code may be called so.
    """
    return name.startswith("_") or "/_" in name


def _hidden(name: str) -> bool:
    return name.startswith(".")
