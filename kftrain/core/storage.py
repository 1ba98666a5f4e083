"""URIs to bytes: folders and object stores behind a dozen functions.

A URI is a path (`./runs`, `/mnt/pvc/runs`, `file:///…`) or anything fsspec knows (`s3://…`, `gs://…`, `memory://…`).

Nothing is ever written in place. `publish` writes aside, syncs and renames, so that a reader sees the old file, the new
one or none; on object stores a put is atomic already. `create` is the one primitive that two processes can race for:
exactly one wins.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kftrain.core.outages import explain_disk_errors as explain_disk_errors
from kftrain.core.outages import is_full as is_full
from kftrain.core.outages import is_outage as is_outage
from kftrain.core.outages import make_full_error as make_full_error
from kftrain.core.outages import refuse_missing_folder, retried, ride_out
from kftrain.core.outages import retry_for as retry_for
from kftrain.core.outages import simplify_errors as simplify_errors
from kftrain.core.remote import RemotePath
from kftrain.core.remote import read_modified as read_modified
from kftrain.core.remote import read_version as read_version
from kftrain.errors import ConfigError, DataError, KftrainError

HASH_CHUNK_BYTES = 1 << 20

PUBLISHED_MODE = 0o644
"""Mode of published files: temporary ones are private, these are for other pods and users to read."""


def is_local(uri: str) -> bool:
    """Tell whether the URI names a path of this machine. Raises ConfigError for a chain, as fsspec knows them."""
    if "::" in uri and ("://" in uri or re.match(r"[\w+.-]+::", uri)):
        raise ConfigError("a chain of URIs is not supported", where=uri, fix="name one place")
    return "://" not in uri or uri.startswith("file://")


def local_path(uri: str) -> Path:
    """Return the path behind a local URI."""
    assert is_local(uri), uri
    return Path(uri.removeprefix("file://"))


def absolute(uri: str, base: str | os.PathLike[str] = ".") -> str:
    """Return the URI with a relative path made absolute against `base`; remote URIs as they are."""
    return os.path.abspath(os.path.join(base, local_path(uri).expanduser())) if is_local(uri) else uri.rstrip("/")


def join(uri: str, *parts: str) -> str:
    """Return the URI of something below `uri`. Parts must not climb out of it."""
    for part in parts:
        if part.startswith("/") or (".." in part and ".." in part.split("/")):
            raise ConfigError("a name may not leave its folder", where=uri, value=part, fix="use a plain name")
    return "/".join([uri.rstrip("/"), *(part.strip("/") for part in parts)])


@retried("read")
def exists(uri: str) -> bool:
    """Tell whether a file or a folder is there."""
    return local_path(uri).exists() if is_local(uri) else RemotePath(uri).exists()


def size_bytes(uri: str) -> int:
    """Return the size of a file. Raises FileNotFoundError."""
    return size_and_version(uri)[0]


@retried("read")
def size_and_version(uri: str) -> tuple[int, str]:
    """Return the size of a file, and what changes with its content; empty where its store says nothing of the kind.

    Raises FileNotFoundError.
    """
    if is_local(uri):
        return read_size_and_version(local_path(uri).stat())
    info = RemotePath(uri).object_info()
    return int(info["size"]), read_version(info)


def read_size_and_version(status: os.stat_result) -> tuple[int, str]:
    """Return `size_and_version` of a file of this machine: its version is its time and its inode."""
    return status.st_size, f"{status.st_mtime_ns}-{status.st_ino}"


def open_read(uri: str, read_ahead: bool = True) -> BinaryIO:
    """Open a file for reading bytes; seekable, also remotely. Raises FileNotFoundError, for a pipe or a device too.

    Without `read_ahead` a remote one is asked for what is read and no more, which suits small reads that lie apart.
    """
    if is_local(uri):
        return ride_out(uri, "read", lambda: _open_regular(uri.removeprefix("file://")))
    return RemotePath(uri).open_read(read_ahead)


@contextlib.contextmanager
def open_write(uri: str) -> Iterator[BinaryIO]:
    """Open a new file to be written in pieces: durable when the block ends, gone when it ends by an exception.

    Others may see it grow, so this is for files that count only once another one is there. An outage is not ridden out
    in the middle of it: whoever writes it begins anew.
    """
    if not is_local(uri):
        with RemotePath(uri).open_write() as stream:
            yield stream
        return
    path = local_path(uri)
    make_folder(path.parent)
    try:
        with path.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:  # a signal, too: nobody takes half a file for a whole one
        path.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@retried("read")
def read_bytes(uri: str) -> bytes:
    """Read a whole file. Raises FileNotFoundError, for a pipe or a device too."""
    if not is_local(uri):
        return RemotePath(uri).read()
    with _open_regular(uri.removeprefix("file://")) as stream:
        return stream.read()


@retried("read")
def read_range(uri: str, start: int, stop: int, least: int | None = None) -> bytes:
    """Read a part of a remote file; with `least`, as much of it as came: who verifies that asks for the rest again.

    Raises OSError where the file ends before.
    """
    return RemotePath(uri).read_range(start, stop, stop - start if least is None else least)


def read_text(uri: str) -> str:
    """Read a whole file as UTF-8. Raises FileNotFoundError."""
    return read_bytes(uri).decode()


def read_json(uri: str) -> Any:
    """Read a whole file as JSON. Raises FileNotFoundError, and DataError where it is no JSON."""
    return decode_json(read_bytes(uri), uri)


def decode_json(content: bytes, uri: str, error: type[KftrainError] = DataError) -> Any:
    """Parse what a file at `uri` holds. Raises `error` where that is no JSON, or nested deeper than can be read."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as cause:
        name = uri.rsplit("/", 1)[-1]
        raise error(
            f"{name} is not valid JSON", where=uri, fix="restore it, or delete it and run the stage again"
        ) from cause


def read_json_if_exists(uri: str) -> Any | None:
    """Read a whole file as JSON, or None where there is none."""
    try:
        return read_json(uri)
    except FileNotFoundError:
        return None


@retried("list")
def find(uri: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the URI of every object at or below a remote path -> its name there, and what its store says of it.

    That is `size`, and what `read_version` and `read_modified` take.
    """
    return RemotePath(uri).find()


@retried("list")
def list_names(uri: str) -> list[str]:
    """List names directly below a folder, sorted; empty where the folder does not exist.

    Files that are being written are left out.
    """
    names = _list_folder(local_path(uri)) if is_local(uri) else RemotePath(uri).names()
    return sorted(name for name in names if not name.startswith(".tmp-"))


def entries(folder: Path, prefix: str = "") -> Iterator[tuple[Path, os.stat_result]]:
    """List what a folder of this machine holds that begins with `prefix`, with the status of what links lead to.

    Others may change the folder meanwhile: whatever goes, the folder too, is left out. So is a link that leads nowhere.
    """
    for path in (folder / name for name in _list_folder(folder) if name.startswith(prefix)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            yield path, path.stat()


@retried("write")
def publish(uri: str, data: bytes | str) -> None:
    """Make `data` the content of `uri`, all or nothing and durable; an older version is replaced as a whole."""
    content = data.encode() if isinstance(data, str) else data
    if not is_local(uri):
        return RemotePath(uri).write(content)
    _write_aside(local_path(uri), content, os.replace)


def publish_json(uri: str, document: Any) -> None:
    """Publish a JSON document: sorted keys, so that equal content is equal bytes."""
    publish(uri, dump_json(document))


@retried("write")
def create(uri: str, data: bytes | str) -> None:
    """Make `data` the content of `uri` if nothing is there; of many racing callers exactly one returns.

    Raises FileExistsError for the others. An object store's answer may be lost after the write has taken effect, and
    the write is repeated: so there the content tells whose it is, and callers that race put something into it that is
    theirs alone. Raises ConfigError where the store's driver cannot create exclusively.
    """
    content = data.encode() if isinstance(data, str) else data
    if not is_local(uri):
        return RemotePath(uri).create(content)
    _write_aside(local_path(uri), content, os.link)  # unlike a rename, a link refuses to replace


def create_json(uri: str, document: Any) -> None:
    """Create a JSON document. Raises FileExistsError."""
    create(uri, dump_json(document))


@contextlib.contextmanager
def new_folder(uri: str) -> Iterator[Path]:
    """Yield an empty local folder to fill; when the block ends without an exception its content appears at `uri`.

    In a local store that is one rename: all or nothing and durable. If `uri` came into being meanwhile, that one stays
    and ours is dropped, which is right for folders that are named by their content. In an object store the files arrive
    one by one, so whoever reads needs a file that the caller publishes last.
    """
    if not is_local(uri):
        with tempfile.TemporaryDirectory(prefix="kftrain-") as aside:
            yield Path(aside)
            ride_out(uri, "write", lambda: RemotePath(uri).put_folder(Path(aside)))
        return
    target = local_path(uri)
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=target.parent) as aside:
        content = Path(aside) / "content"
        content.mkdir()
        yield content
        for path in [*content.rglob("*"), content]:
            sync_folder(path) if path.is_dir() else finish_file(path)
        # A rename to a folder that is not empty fails, so of two that fill the same name one stays, and neither is
        # mixed.
        try:
            os.rename(content, target)
        except OSError:
            if not target.is_dir():
                raise
    sync_folder(target.parent)


@retried("remove")
def remove(uri: str) -> None:
    """Delete a file or a folder with all below it; nothing happens where there is none."""
    if is_local(uri):
        path = local_path(uri)
        if path.is_dir():
            return shutil.rmtree(path, ignore_errors=True)
        return path.unlink(missing_ok=True)
    RemotePath(uri).remove()


@retried("read")
def sha256_file(uri: str) -> str:
    """Return the hex digest of a file's content, read in chunks. Raises FileNotFoundError."""
    digest = hashlib.sha256()
    with open_read(uri) as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_bytes(content: bytes) -> str:
    """Return the hex digest of a content in memory."""
    return hashlib.sha256(content).hexdigest()


def sha256_text(text: str) -> str:
    """Return the hex digest of a text in UTF-8."""
    return sha256_bytes(text.encode())


def dump_json(document: Any) -> str:
    """Format JSON as this project writes it into files."""
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"


def digest_json(document: Any) -> str:
    """Return the hex sha256 of a document's canonical JSON: the digest of settings, schemas and listings."""
    return sha256_text(json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False))


def _list_folder(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing, and the names of the new ones durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    with refuse_missing_folder(path):
        path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_regular(path: str) -> BinaryIO:  # no `Path`: one takes as long to make as the file to open
    """Open a file for reading. Nobody waits for a pipe to be written to, or reads a device without an end."""
    # Without O_NONBLOCK the call itself would wait for somebody to open the other end of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(kind):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        return os.fdopen(descriptor, "rb")
    except BaseException:  # a signal, too, and `fdopen` has not taken it over
        os.close(descriptor)
        raise


def finish_file(path: Path) -> None:
    """Make a file durable, and readable for others: whoever wrote it may have kept it for itself."""
    path.chmod(PUBLISHED_MODE)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _write_aside(path: Path, content: bytes, give_name: Callable[[str, Path], None]) -> None:
    """Write a file that gets its name when it is whole.

    The content is durable before it gets its name, and the name after that: after a power cut there is the old file or
    the whole new one, never a name without content.
    """
    make_folder(path.parent)
    with refuse_missing_folder(path.parent):
        descriptor, aside = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(aside, PUBLISHED_MODE)
        give_name(aside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
    sync_folder(path.parent)
