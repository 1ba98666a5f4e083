"""Object stores through fsspec: every call ends, within a time that follows from its bytes.

A driver's own timeouts are for silence between two bytes, if that: a server that accepts a write and never answers, or
drips a few bytes a second, holds a driver for ever. So each call has a deadline of our own. What an asynchronous driver
does is cancelled at its deadline; a call of another driver is left alone in its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import io
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
import fsspec.asyn

from kftrain.core import outages, threads
from kftrain.core.positioned import PositionedStream
from kftrain.errors import ConfigError

READ_BYTES = 16 << 20
"""What a stream reads ahead, and at most with one request."""

WRITE_BYTES = 8 << 20
"""What a stream hands to its driver at a time."""

T = TypeVar("T")


MAX_REQUESTS = 32
"""At once, of one call."""


@dataclass(frozen=True)
class _Call:
    """Of a driver's method."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Deadline:
    """How long a call may take."""

    base_seconds: float = 60.0
    hurried_seconds: float = 20.0
    """Instead, where nobody waits for storage that is away."""
    bytes_per_second: float = float(256 << 10)
    """Slower than that is away."""

    def seconds(self, num_bytes: int = 0) -> float:
        """Of a call that moves so many bytes."""
        base = self.hurried_seconds if outages.is_hurried() else self.base_seconds
        return base + num_bytes / self.bytes_per_second


deadline = Deadline()


class RemotePath:
    """An object of a store, or a folder. Methods raise what the driver raises, and TimeoutError."""

    def __init__(self, uri: str) -> None:
        """Raises ConfigError where no driver is installed."""
        self.uri = uri
        self._filesystem, self._path = _filesystem(uri)

    def exists(self) -> bool:
        """Whether an object, or anything below it, is there."""
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def info(self) -> dict[str, Any]:
        """What the store says of it: `size`, and what changes with its content. Raises FileNotFoundError."""
        return dict(self._call("info"))

    def object_info(self) -> dict[str, Any]:
        """`info` of an object. Raises FileNotFoundError where there is none, or a folder."""
        info = self.info()
        if info.get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, "no such object", self.uri)
        return info

    def names(self) -> list[str]:
        """Names directly below a folder; empty where there is none."""
        self._filesystem.invalidate_cache(self._path)
        try:
            found = self._call("ls", detail=False)
        except FileNotFoundError:
            return []
        return [str(name).rstrip("/").rsplit("/", 1)[-1] for name in found]

    def find(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """The URI of every object at or below the path -> its name there, and what the store says of it."""
        root, found = self._path.rstrip("/"), self._call("find", detail=True)
        return {
            str(self._filesystem.unstrip_protocol(path)): (
                path.removeprefix(root).lstrip("/") or path.rsplit("/", 1)[-1],
                dict(info),
            )
            for path, info in found.items()
        }

    def read(self) -> bytes:
        """A whole object, however large, of one version. Raises FileNotFoundError."""
        size = int(self.object_info()["size"])
        if size <= READ_BYTES:
            return self._whole(self._call("cat_file", num_bytes=size), size)
        with self.open_read() as stream:
            return stream.read()

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes from `start` on, before `stop`."""
        return self.read_ranges([start], [stop])[0]

    def read_ranges(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        """Several ranges, with all requests at once."""
        calls = [_Call((self._path,), {"start": start, "end": stop}) for start, stop in zip(starts, stops, strict=True)]
        found = self._run("cat_file", calls, sum(stops) - sum(starts))
        sizes = (stop - start for start, stop in zip(starts, stops, strict=True))
        return [self._whole(*each) for each in zip(found, sizes, strict=True)]

    def open_read(self, read_ahead: bool = True) -> BinaryIO:
        """An object as a stream. Raises FileNotFoundError."""
        raw = _ObjectReader(self)
        return cast(BinaryIO, io.BufferedReader(raw, READ_BYTES) if read_ahead else raw)

    @contextlib.contextmanager
    def open_write(self) -> Iterator[BinaryIO]:
        """A stream into a new object, which is there when the block ends without an exception.

        What the driver has sent is never sent again.
        """
        raw = _ObjectWriter(
            _in_thread(lambda: self._filesystem.open(self._path, "wb"), deadline.seconds(), self.uri), self.uri
        )
        try:
            with io.BufferedWriter(raw, WRITE_BYTES) as stream:
                try:
                    yield cast(BinaryIO, stream)
                except BaseException:  # first, or leaving the block would send the rest
                    raw.discard()
                    raise
        except BaseException:  # what failed may be the last part, sent when the block was left
            raw.discard()
            with contextlib.suppress(OSError):
                self.remove()
            raise

    def write(self, content: bytes) -> None:
        """Makes `content` the object's, all or nothing."""
        self._call("pipe_file", content, num_bytes=len(content))

    def create(self, content: bytes) -> None:
        """`write` where nothing is there. Raises FileExistsError where something else is than `content`.

        The answer may be lost, and the driver then repeats the write, which finds itself: so whatever was answered,
        what is there tells. Raises ConfigError where the driver cannot create exclusively.
        """
        self._require_exclusive_writes()
        try:
            self._call("pipe_file", content, mode="create", num_bytes=len(content))
        except (PermissionError, FileNotFoundError):
            raise
        except Exception as error:  # of any driver; what it says decides nothing, what is there does
            try:
                found = self.read()
            except FileNotFoundError:
                raise error from None
            if found != content:
                raise FileExistsError(errno.EEXIST, "created by another", self.uri) from error

    def put_folder(self, folder: Path) -> None:
        """Copies all files below a folder of this machine."""
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        root = self._path.rstrip("/")
        calls = [_Call((str(file), f"{root}/{file.relative_to(folder).as_posix()}"), {}) for file in files]
        self._run("put_file", calls, sum(file.stat().st_size for file in files))

    def remove(self) -> None:
        """Deletes an object, or everything below a folder; nothing happens where there is nothing."""
        if self.exists():
            self._call("rm", recursive=True)

    def _whole(self, content: bytes, num_bytes: int) -> bytes:
        """What came, where it is all of it: a proxy's page, a cut body and the answer to another range are outages."""
        if len(content) != num_bytes:
            what = f"{len(content)} bytes came instead of {num_bytes}, beginning with {content[:32]!r}"
            raise TimeoutError(errno.ETIMEDOUT, what, self.uri)
        return content

    def _call(self, name: str, *arguments: Any, num_bytes: int = 0, **options: Any) -> Any:
        return self._run(name, [_Call((self._path, *arguments), options)], num_bytes)[0]

    def _run(self, name: str, calls: Sequence[_Call], num_bytes: int) -> list[Any]:
        """Calls of a method of the driver, all at once where it can, until their deadline."""
        seconds = deadline.seconds(num_bytes)
        coroutine = getattr(self._filesystem, f"_{name}", None)
        if not (getattr(self._filesystem, "async_impl", False) and inspect.iscoroutinefunction(coroutine)):
            method = getattr(self._filesystem, name)
            return _in_thread(lambda: [method(*c.arguments, **c.options) for c in calls], seconds, self.uri)
        try:
            found = fsspec.asyn.sync(self._filesystem.loop, _together, coroutine, calls, timeout=seconds)
        except asyncio.TimeoutError as error:
            raise _late(seconds, self.uri) from error
        return cast("list[Any]", found)

    def _require_exclusive_writes(self) -> None:
        """An older driver takes `mode` for one more option, drops it, and overwrites."""
        if "mode" not in inspect.signature(self._filesystem.pipe_file).parameters:
            driver = type(self._filesystem).__module__.split(".")[0]
            raise ConfigError(
                "the driver of this store cannot create a file exclusively",
                where=self.uri,
                value=driver,
                fix=f"pip install -U {driver} fsspec",
            )


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


async def _together(method: Callable[..., Awaitable[Any]], calls: Sequence[_Call]) -> list[Any]:
    """What the calls return, in order; cancelled, it cancels them, which fsspec's own functions for many do not."""
    free = asyncio.Semaphore(MAX_REQUESTS)

    async def one(call: _Call) -> Any:
        async with free:
            return await method(*call.arguments, **call.options)

    tasks = [asyncio.ensure_future(one(call)) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "updated", "last_modified", "created")
"""Under which stores say what changes with an object's content, the best first."""


def version_of(info: dict[str, Any]) -> str:
    """What changes with the content of an object; empty where its store says nothing of the kind."""
    return next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")


MODIFIED_KEYS = ("LastModified", "updated", "last_modified", "mtime", "created")
"""Under which stores say when an object was written, the best first."""


def modified_of(info: dict[str, Any]) -> datetime | None:
    """When an object was written, in UTC; None where its store does not say. A time without a zone is in UTC there."""
    found = next((info[key] for key in MODIFIED_KEYS if info.get(key)), None)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    if isinstance(found, int | float):
        found = datetime.fromtimestamp(found, timezone.utc)
    if not isinstance(found, datetime):
        return None
    return found.astimezone(timezone.utc) if found.tzinfo else found.replace(tzinfo=timezone.utc)


class _ObjectReader(PositionedStream):
    """Reads by ranges: each is ridden out on its own, so that a stream goes on where it was."""

    def __init__(self, path: RemotePath) -> None:
        info = outages.ride_out(path.uri, "read", path.object_info)
        super().__init__(int(info["size"]))
        self._path = path
        self._version = version_of(info)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start, stop = self._position, min(self.size_bytes, self._position + min(len(view), READ_BYTES))
        if stop <= start:
            return 0
        content = outages.ride_out(self._path.uri, "read", lambda: self._read(start, stop))
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _read(self, start: int, stop: int) -> bytes:
        content = self._path.read_range(start, stop)
        if stop - start < self.size_bytes and version_of(self._path.info()) != self._version:
            raise OSError(errno.EREMCHG, "it was replaced while it was read", self._path.uri)
        return content


class _ObjectWriter(io.RawIOBase):
    """Hands what is written to a driver's stream, which takes nothing a second time."""

    def __init__(self, stream: Any, uri: str) -> None:
        super().__init__()
        self._stream = stream
        self._uri = uri
        self._num_bytes = 0
        self._is_discarded = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._num_bytes

    def write(self, data: Any) -> int:
        content = bytes(data)
        if not self._is_discarded:
            self._call(lambda: self._stream.write(content))
        self._num_bytes += len(content)
        return len(content)

    def close(self) -> None:
        if self.closed:
            return
        try:
            if not self._is_discarded:
                self._call(self._stream.close)
        finally:
            super().close()

    def discard(self) -> None:
        """What was sent goes, and nothing more is sent; nothing happens the second time."""
        if self._is_discarded:
            return
        self._is_discarded = True
        if isinstance(self._stream, fsspec.spec.AbstractBufferedFile):
            self._stream.closed = True  # or it sends what it still has when it is forgotten
            with contextlib.suppress(OSError):
                self._call(self._stream.discard)

    def _call(self, work: Callable[[], Any]) -> None:
        """A driver sends what it has gathered when it likes, at most a block of its own."""
        block_bytes = int(getattr(self._stream, "blocksize", 0) or 0) + WRITE_BYTES
        _in_thread(work, deadline.seconds(block_bytes), self._uri)


def _in_thread(work: Callable[[], T], seconds: float, where: str) -> T:
    """What `work` returns or raises. Raises TimeoutError at its deadline, and leaves the thread alone."""
    future = threads.start(work, "storage")
    try:
        return future.result(seconds)
    except FutureTimeoutError as error:
        if future.done():
            raise
        raise _late(seconds, where) from error


def _late(seconds: float, where: str) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:.0f} s", where)
