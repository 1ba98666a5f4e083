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
import inspect
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from kftrain.errors import ConfigError

HASH_CHUNK_BYTES = 1 << 20

PUBLISHED_MODE = 0o644
"""Temporary files are private; what is published is for other pods and users to read."""

CONFLICT_WAITS_SECONDS = (0.1, 0.4, 1.6)
"""Pauses before another try where an object store says that it was busy with another writer of the same object."""

_STATUS_OF_CODE = {
    "PreconditionFailed": HTTPStatus.PRECONDITION_FAILED,
    "ConditionalRequestConflict": HTTPStatus.CONFLICT,
}
"""S3's error codes of a conditional write, for errors that do not carry the status."""

_OUTAGE_CODES = {errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EAGAIN}
"""What an object store that asks for fewer requests, and a network file system that lost its server, answer with."""

_OUTAGE_NAMES = re.compile("Connect|Timeout")
"""Classes of exceptions, of Python and of the drivers of object stores, that speak of a service that is away."""


def is_outage(error: BaseException) -> bool:
    """Whether an exception of a read or a write says that the storage is away for now: later it may succeed."""
    if isinstance(error, OSError) and error.errno in _OUTAGE_CODES:
        return True
    return any(_OUTAGE_NAMES.search(kind.__name__) for kind in type(error).__mro__)


def is_local(uri: str) -> bool:
    """Whether the URI names a path of this machine."""
    return "://" not in uri or uri.startswith("file://")


def local_path(uri: str) -> Path:
    """The path behind a local URI."""
    assert is_local(uri), uri
    return Path(uri.removeprefix("file://"))


def absolute(uri: str, base: str | os.PathLike[str] = ".") -> str:
    """The URI with a relative path made absolute against `base`; remote URIs as they are."""
    return os.path.abspath(os.path.join(base, local_path(uri).expanduser())) if is_local(uri) else uri.rstrip("/")


def join(uri: str, *parts: str) -> str:
    """The URI of something below `uri`. Parts must not climb out of it."""
    for part in parts:
        if ".." in part.split("/") or part.startswith("/"):
            raise ConfigError("a name may not leave its folder", where=uri, value=part, fix="use a plain name")
    return "/".join([uri.rstrip("/"), *(part.strip("/") for part in parts)])


def exists(uri: str) -> bool:
    """Whether a file or a folder is there."""
    if is_local(uri):
        return local_path(uri).exists()
    filesystem, path = _filesystem(uri)
    return bool(filesystem.exists(path))


def size_bytes(uri: str) -> int:
    """Size of a file. Raises FileNotFoundError."""
    if is_local(uri):
        return local_path(uri).stat().st_size
    filesystem, path = _filesystem(uri)
    return int(filesystem.size(path))


def open_read(uri: str) -> BinaryIO:
    """A file opened for reading bytes; seekable, also remotely. Raises FileNotFoundError."""
    if is_local(uri):
        return local_path(uri).open("rb")
    filesystem, path = _filesystem(uri)
    return cast(BinaryIO, filesystem.open(path, "rb"))


def read_bytes(uri: str) -> bytes:
    """A whole file. Raises FileNotFoundError."""
    with open_read(uri) as stream:
        return stream.read()


def read_text(uri: str) -> str:
    """A whole file as UTF-8. Raises FileNotFoundError."""
    return read_bytes(uri).decode()


def read_json(uri: str) -> Any:
    """A whole file as JSON. Raises FileNotFoundError, and ValueError where it is no JSON."""
    return json.loads(read_bytes(uri))


def read_json_if_exists(uri: str) -> Any | None:
    """A whole file as JSON, or None where there is none."""
    try:
        return read_json(uri)
    except FileNotFoundError:
        return None


def list_names(uri: str) -> list[str]:
    """Names directly below a folder, sorted; empty where the folder does not exist.

    Files that are being written are left out.
    """
    if is_local(uri):
        path = local_path(uri)
        names = os.listdir(path) if path.is_dir() else []
    else:
        filesystem, path_ = _filesystem(uri)
        with contextlib.suppress(FileNotFoundError):
            filesystem.invalidate_cache(path_)
        names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in _ls(filesystem, path_)]
    return sorted(name for name in names if not name.startswith(".tmp-"))


def publish(uri: str, data: bytes | str) -> None:
    """Makes `data` the content of `uri`, all or nothing and durable; an older version is replaced as a whole."""
    content = data.encode() if isinstance(data, str) else data
    if not is_local(uri):
        filesystem, path_ = _filesystem(uri)
        filesystem.pipe_file(path_, content)
        return
    path = local_path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _written_aside(path, content) as aside:
        os.replace(aside, path)
    sync_folder(path.parent)


def publish_json(uri: str, document: Any) -> None:
    """`publish` of a JSON document: sorted keys, so that equal content is equal bytes."""
    publish(uri, dump_json(document))


def create(uri: str, data: bytes | str) -> None:
    """Makes `data` the content of `uri` if nothing is there; of many racing callers exactly one returns.

    Raises FileExistsError for the others. An object store's answer may be lost after the write has taken effect: then
    the content tells whose it is, so callers that race put something into it that is theirs alone. Raises ConfigError
    where the store's driver cannot create exclusively.
    """
    content = data.encode() if isinstance(data, str) else data
    if not is_local(uri):
        _create_remote(uri, content)
        return
    path = local_path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _written_aside(path, content) as aside:
        os.link(aside, path)  # unlike a rename, a link refuses to replace
    sync_folder(path.parent)


def create_json(uri: str, document: Any) -> None:
    """`create` of a JSON document. Raises FileExistsError."""
    create(uri, dump_json(document))


@contextlib.contextmanager
def new_folder(uri: str) -> Iterator[Path]:
    """Yields an empty local folder to fill; when the block ends without an exception its content appears at `uri`.

    In a local store that is one rename: all or nothing and durable. If `uri` came into being meanwhile, that one stays
    and ours is dropped, which is right for folders that are named by their content. In an object store the files arrive
    one by one, so whoever reads needs a file that the caller publishes last.
    """
    if not is_local(uri):
        filesystem, path_ = _filesystem(uri)
        with tempfile.TemporaryDirectory(prefix="kftrain-") as aside:
            yield Path(aside)
            filesystem.put(aside + "/", path_ + "/", recursive=True)
        return
    target = local_path(uri)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=target.parent) as aside:
        content = Path(aside) / "content"
        content.mkdir()
        yield content
        for path in [*content.rglob("*"), content]:
            sync_folder(path) if path.is_dir() else _sync_file(path)
        try:
            os.rename(content, target)
        except OSError:
            if not target.is_dir():
                raise
    sync_folder(target.parent)


def remove(uri: str) -> None:
    """Deletes a file or a folder with all below it; nothing happens where there is none."""
    if is_local(uri):
        path = local_path(uri)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        return
    filesystem, path_ = _filesystem(uri)
    if filesystem.exists(path_):
        filesystem.rm(path_, recursive=True)


def sha256_file(uri: str) -> str:
    """Hex digest of a file's content, read in chunks. Raises FileNotFoundError."""
    digest = hashlib.sha256()
    with open_read(uri) as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_bytes(content: bytes) -> str:
    """Hex digest of a content in memory."""
    return hashlib.sha256(content).hexdigest()


def sha256_text(text: str) -> str:
    """Hex digest of a text in UTF-8."""
    return sha256_bytes(text.encode())


def dump_json(document: Any) -> str:
    """JSON as this project writes it into files."""
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"


def digest_json(document: Any) -> str:
    """Hex sha256 of a document's canonical JSON: the digest of settings, schemas and listings."""
    return sha256_text(json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False))


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _written_aside(path: Path, content: bytes) -> Iterator[str]:
    descriptor, aside = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(aside, PUBLISHED_MODE)
        yield aside
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)


def _create_remote(uri: str, content: bytes) -> None:
    filesystem, path = _filesystem(uri)
    _require_exclusive_writes(filesystem, uri)
    unclear = False  # whether an earlier try may have taken effect although it was answered with an error
    for wait_seconds in (*CONFLICT_WAITS_SECONDS, None):
        try:
            filesystem.pipe_file(path, content, mode="create")
            return
        except (PermissionError, FileNotFoundError):
            raise
        except OSError as error:
            status = _http_status(error)
            exists = isinstance(error, FileExistsError) or status == HTTPStatus.PRECONDITION_FAILED
            if exists and not unclear:
                raise FileExistsError(errno.EEXIST, "created by another", uri) from error
            if _holds(filesystem, path, content, uri):
                return
            if status != HTTPStatus.CONFLICT or wait_seconds is None:
                raise
            unclear = True
            time.sleep(wait_seconds)


def _holds(filesystem: Any, path: str, content: bytes, uri: str) -> bool:
    """Whether an object is there with this content. Raises FileExistsError where it has another one."""
    try:
        found = filesystem.cat_file(path)
    except FileNotFoundError:
        return False
    if found != content:
        raise FileExistsError(errno.EEXIST, "created by another", uri)
    return True


def _http_status(error: OSError) -> int:
    """The status that an S3 driver's error was made of; 0 where it names none."""
    response = getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return 0
    named = _STATUS_OF_CODE.get(response.get("Error", {}).get("Code", ""), 0)
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", named))


def _require_exclusive_writes(filesystem: Any, uri: str) -> None:
    """An older driver takes `mode` for one more option, drops it, and overwrites."""
    if "mode" not in inspect.signature(filesystem.pipe_file).parameters:
        driver = type(filesystem).__module__.split(".")[0]
        raise ConfigError(
            "the driver of this store cannot create a file exclusively",
            where=uri,
            value=driver,
            fix=f"pip install -U {driver} fsspec",
        )


def _ls(filesystem: Any, path: str) -> list[str]:
    try:
        return [str(name) for name in filesystem.ls(path, detail=False)]
    except FileNotFoundError:
        return []


def _filesystem(uri: str) -> tuple[Any, str]:
    try:
        filesystem, path = fsspec.core.url_to_fs(uri, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        scheme = uri.split("://", 1)[0]
        raise ConfigError(
            f"no driver for {scheme}:// ({error})",
            where=uri,
            fix=f"install it, for s3: pip install 'kftrain[{scheme}]'",
        ) from error
    return filesystem, str(path)
