"""Object stores through fsspec: every call ends, within a time that follows from its bytes.

A driver's own timeouts are for silence between two bytes, if that: a server that accepts a write and never answers, or
drips a few bytes a second, holds a driver for ever. So each call has a deadline of our own. What an asynchronous driver
does is cancelled at its deadline; a call of another driver is left alone in its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
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

from kftrain.core import outages, s3_ranges, threads
from kftrain.core.hedging import Hedge
from kftrain.errors import ConfigError

READ_BYTES = 16 << 20
"""Bytes that a stream reads ahead, and at most with one request."""

WRITE_BYTES = 8 << 20
"""Bytes that a stream hands to its driver at a time."""

T = TypeVar("T")

MAX_REQUESTS = 32
"""Most requests of one call at once."""


@dataclass(frozen=True)
class Deadline:
    """Time that a call may take."""

    base_seconds: float = 60.0
    hurried_seconds: float = 20.0
    """Base seconds where nobody waits for storage that is away."""
    bytes_per_second: float = float(256 << 10)
    """Rate below which a store counts as away."""

    def seconds(self, num_bytes: int = 0) -> float:
        """Return the seconds of a call that moves so many bytes."""
        base = self.hurried_seconds if outages.is_hurried() else self.base_seconds
        return base + num_bytes / self.bytes_per_second


deadline = Deadline()

_hedge = Hedge()


class PositionedStream(io.RawIOBase):
    """A stream of known length to read from, which may be moved beyond its end as any file may; a subclass reads."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        """Return True: every such stream can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: every such stream can be moved."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a place. Raises ValueError for a place before the beginning."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"no place in a stream: {start + offset}")
        self._position = start + offset
        return self._position


class RemotePath:
    """Object of a store, or a folder. Methods raise what the driver raises, and TimeoutError."""

    def __init__(self, uri: str) -> None:
        """Raises ConfigError where no driver is installed."""
        self.uri = uri
        self._filesystem, self._path = _open_filesystem(uri)

    def exists(self) -> bool:
        """Tell whether an object, or anything below it, is there."""
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def info(self) -> dict[str, Any]:
        """Ask the store for `size`, and what changes with the content. Raises FileNotFoundError."""
        return dict(self._call("info"))

    def object_info(self) -> dict[str, Any]:
        """Return `info` of an object. Raises FileNotFoundError where there is none, or a folder."""
        info = self.info()
        if info.get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, "no such object", self.uri)
        return info

    def names(self) -> list[str]:
        """List names directly below a folder; empty where there is none."""
        # Drivers remember listings, and another process may have written since.
        self._filesystem.invalidate_cache(self._path)
        try:
            paths = self._call("ls", detail=False)
        except FileNotFoundError:
            return []
        return [str(name).rstrip("/").rsplit("/", 1)[-1] for name in paths]

    def find(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return the URI of every object at or below the path -> its name there, and what the store says of it."""
        root = self._path.rstrip("/")
        objects = self._call("find", times=16, detail=True)  # many pages, nobody knows before how many
        return {
            str(self._filesystem.unstrip_protocol(path)): (
                path.removeprefix(root).lstrip("/") or path.rsplit("/", 1)[-1],
                dict(info),
            )
            for path, info in objects.items()
        }

    def read(self) -> bytes:
        """Read a whole object, however large, of one version. Raises FileNotFoundError."""
        size = int(self.object_info()["size"])
        if size <= READ_BYTES:
            return self._require_whole(self._call("cat_file", num_bytes=size), size)
        with self.open_read() as stream:
            return stream.read(size)  # without a number Python asks for 8 KiB at a time

    def read_range(self, start: int, stop: int, least: int) -> bytes:
        """Read the bytes from `start` on, before `stop`; or, of those, as many as came, where `least` are enough.

        Raises OSError where the object ends before.
        """
        content = self._read_hedged(start, stop)
        if len(content) < least and int(self.object_info()["size"]) < start + least:
            raise OSError(errno.ENODATA, "it ends before what is read of it", self.uri)
        return content if least <= len(content) <= stop - start else self._require_whole(content, stop - start)

    def _read_hedged(self, start: int, stop: int) -> bytes:
        """Read what comes of a range; a slow request is made a second time, where the driver is asynchronous."""
        if not getattr(self._filesystem, "async_impl", False):
            return bytes(self._call("cat_file", start=start, end=stop, num_bytes=stop - start))

        async def read() -> Any:
            content = await s3_ranges.read_range(self._filesystem, self._path, start, stop)
            return await self._filesystem._cat_file(self._path, start=start, end=stop) if content is None else content

        seconds = deadline.seconds(stop - start)
        try:
            answer = fsspec.asyn.sync(self._filesystem.loop, _hedge.call, stop - start, read, timeout=seconds)
        except asyncio.TimeoutError as error:
            s3_ranges.leave_to_s3fs(s3_ranges.REST_SECONDS)
            raise _make_late_error(seconds, self.uri) from error
        return bytes(answer)

    def open_read(self, read_ahead: bool = True) -> BinaryIO:
        """Open an object as a stream. Raises FileNotFoundError."""
        raw = _ObjectReader(self)
        return cast(BinaryIO, io.BufferedReader(raw, READ_BYTES) if read_ahead else raw)

    @contextlib.contextmanager
    def open_write(self) -> Iterator[BinaryIO]:
        """Open a stream into a new object, which is there when the block ends without an exception.

        What the driver has sent is never sent again.
        """
        raw = _ObjectWriter(
            _run_in_thread(lambda: self._filesystem.open(self._path, "wb"), deadline.seconds(), self.uri), self.uri
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
        """Make `content` the object's, all or nothing."""
        self._call("pipe_file", content, num_bytes=len(content))

    def create(self, content: bytes) -> None:
        """Write where nothing is there. Raises FileExistsError where something else is than `content`.

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
                existing = self.read()
            except FileNotFoundError:
                raise error from None
            if existing != content:
                raise FileExistsError(errno.EEXIST, "created by another", self.uri) from error

    def put_folder(self, folder: Path) -> None:
        """Copy all files below a folder of this machine."""
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        root = self._path.rstrip("/")
        calls = [(str(file), f"{root}/{file.relative_to(folder).as_posix()}") for file in files]
        self._run("put_file", calls, sum(file.stat().st_size for file in files))

    def remove(self) -> None:
        """Delete an object, or everything below a folder; nothing happens where there is nothing."""
        if self.exists():
            self._call("rm", recursive=True)

    def _require_whole(self, content: bytes, num_bytes: int) -> bytes:
        """Require that all came: a proxy's page, a cut body and the answer to another range are outages."""
        if len(content) != num_bytes:
            what = f"{len(content)} bytes came instead of {num_bytes}, beginning with {content[:32]!r}"
            raise TimeoutError(errno.ETIMEDOUT, what, self.uri)
        return content

    def _call(self, name: str, *arguments: Any, num_bytes: int = 0, times: int = 1, **options: Any) -> Any:
        return self._run(name, [(self._path, *arguments)], num_bytes, times, **options)[0]

    def _run(
        self, name: str, calls: Sequence[tuple[Any, ...]], num_bytes: int, times: int = 1, **options: Any
    ) -> list[Any]:
        """Call a method of the driver, with several arguments at once where it can, until so many deadlines."""
        seconds = times * deadline.seconds(num_bytes)
        coroutine = getattr(self._filesystem, f"_{name}", None)
        if not (getattr(self._filesystem, "async_impl", False) and inspect.iscoroutinefunction(coroutine)):
            method = getattr(self._filesystem, name)
            return _run_in_thread(lambda: [method(*arguments, **options) for arguments in calls], seconds, self.uri)
        method = functools.partial(coroutine, **options)
        try:
            answers = fsspec.asyn.sync(self._filesystem.loop, _call_together, method, calls, timeout=seconds)
        except asyncio.TimeoutError as error:
            raise _make_late_error(seconds, self.uri) from error
        return cast("list[Any]", answers)

    def _require_exclusive_writes(self) -> None:
        """Raise ConfigError for an older driver, which takes `mode` for one more option, drops it, and overwrites."""
        if "mode" not in inspect.signature(self._filesystem.pipe_file).parameters:
            driver = type(self._filesystem).__module__.split(".")[0]
            raise ConfigError(
                "the driver of this store cannot create a file exclusively",
                where=self.uri,
                value=driver,
                fix=f"pip install -U {driver} fsspec",
            )


def _open_filesystem(uri: str) -> tuple[Any, str]:
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


async def _call_together(method: Callable[..., Awaitable[Any]], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return what the calls return, in order; cancel them if it is cancelled, which fsspec's own functions do not."""
    free = asyncio.Semaphore(MAX_REQUESTS)

    async def one(*arguments: Any) -> Any:
        async with free:
            return await method(*arguments)

    tasks = [asyncio.ensure_future(one(*arguments)) for arguments in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "updated", "last_modified", "created")
"""Keys under which stores say what changes with an object's content, the best first."""


def read_version(info: dict[str, Any]) -> str:
    """Return what changes with the content of an object; empty where its store says nothing of the kind."""
    return next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")


MODIFIED_KEYS = ("LastModified", "updated", "last_modified", "mtime", "created")
"""Keys under which stores say when an object was written, the best first."""


def read_modified(info: dict[str, Any]) -> datetime | None:
    """Return when an object was written, in UTC; None where its store does not say.

    A time without a zone is in UTC there.
    """
    moment = next((info[key] for key in MODIFIED_KEYS if info.get(key)), None)
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    if isinstance(moment, int | float):
        moment = datetime.fromtimestamp(moment, timezone.utc)
    if not isinstance(moment, datetime):
        return None
    return moment.astimezone(timezone.utc) if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


class _ObjectReader(PositionedStream):
    """Stream that reads by ranges: each is ridden out on its own, so that a stream goes on where it was."""

    def __init__(self, path: RemotePath) -> None:
        info = outages.ride_out(path.uri, "read", path.object_info)
        super().__init__(int(info["size"]))
        self._path = path
        self._version = read_version(info)

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
        content = self._path.read_range(start, stop, stop - start)
        if stop - start < self.size_bytes and read_version(self._path.info()) != self._version:
            raise OSError(errno.EREMCHG, "it was replaced while it was read", self._path.uri)
        return content


class _ObjectWriter(io.RawIOBase):
    """Stream that hands what is written to a driver's stream, which takes nothing a second time."""

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
        """Drop what was sent, and send nothing more; nothing happens the second time."""
        if self._is_discarded:
            return
        self._is_discarded = True
        if isinstance(self._stream, fsspec.spec.AbstractBufferedFile):
            self._stream.closed = True  # or it sends what it still has when it is forgotten
            with contextlib.suppress(OSError):
                self._call(self._stream.discard)

    def _call(self, work: Callable[[], Any]) -> None:
        """Call the driver, which sends what it has gathered when it likes, at most a block of its own."""
        block_bytes = int(getattr(self._stream, "blocksize", 0) or 0) + WRITE_BYTES
        _run_in_thread(work, deadline.seconds(block_bytes), self._uri)


def _run_in_thread(work: Callable[[], T], seconds: float, where: str) -> T:
    """Return what `work` returns, or raise what it raises.

    Raises TimeoutError at its deadline, and leaves the thread alone.
    """
    future = threads.start(work, "storage")
    try:
        return future.result(seconds)
    except FutureTimeoutError as error:
        if future.done():
            raise
        raise _make_late_error(seconds, where) from error


def _make_late_error(seconds: float, where: str) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:.0f} s", where)
