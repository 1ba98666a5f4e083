"""Services that are away: how often they are tried again, how that is told, and of storage, how long it is ridden out.

Every call of `storage` goes through `ride_out`. A store that has answered this process before is waited for as long as
a launcher waits for the API server, one that never has for a minute: its address or credentials may be wrong. Then
there is one line and an exit code that asks for another attempt. Who has a person waiting, or something better to do
than to wait, says so by `retry_for`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kftrain.core import traffic
from kftrain.core.credentials import redact
from kftrain.core.progress import Progress, to_log
from kftrain.errors import ConfigError, KftrainError, StorageAwayError, StorageError

ANSWERED_SECONDS = 600.0
"""Seconds that a store is waited for that has answered this process before."""

UNANSWERED_SECONDS = 60.0
"""Seconds that a store is waited for that has never answered this process."""

SAID_AFTER_SECONDS = 2.0
"""Seconds below which an outage is not worth a line."""

FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.5, 15.0

_RANDOM = Random()  # not Python's own: threads that wait would change what the user's code draws from it

T = TypeVar("T")

_CODES = {errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EHOSTUNREACH}
"""Codes of an object store that asks for fewer requests, and of a network file system that lost its server."""

_NAMES = re.compile(
    "Connect|Timeout|PayloadError|IncompleteRead|ChecksumError|HTTPClientError|ResponseParserError|ServiceRe(quest|spon)"
)
"""Classes of exceptions, of Python and of the drivers of object stores, that speak of a service that is away, or of an
answer that was cut off or comes from a proxy in front of it."""

_EXPIRED = frozenset(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"))
"""S3's error codes of credentials that were good and are being replaced."""

_REFUSED = re.compile("NoCredentials|PartialCredentials|CredentialRetrieval|TokenRetrieval")
"""Classes of exceptions of drivers that found no credentials, perhaps because the service that gives them is away."""

_PASSING = frozenset((HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS))

_FULL_CODES = {errno.ENOSPC, errno.EDQUOT}

_REFUSING_CODES = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
}
"""Codes of a path that may not be used, or cannot be one."""

_DRIVERS = ("botocore", "aiobotocore", "aiohttp", "s3fs", "gcsfs", "google", "adlfs", "azure", "fsspec")
"""Packages that speak to object stores."""


def is_full(error: BaseException) -> bool:
    """Tell whether an exception says that a disk, or a quota of it, is full."""
    return isinstance(error, OSError) and error.errno in _FULL_CODES


def make_full_error(error: BaseException, where: str = "") -> StorageError:
    """Make the error for an exception for which `is_full` holds; `where` if it names no file itself."""
    assert isinstance(error, OSError)
    place = str(error.filename2 or error.filename or where)
    folder, _, name = place.rpartition("/")
    return StorageError(
        "no space is left on the device",
        where=folder if name.startswith(".tmp-") else place,
        fix="free some; nothing that was there is lost",
    )


@contextlib.contextmanager
def explain_disk_errors(where: str) -> Iterator[None]:
    """Turn what a disk cannot do within the block into our errors. Raises StorageError where it is full.

    Raises ConfigError for a path that may not be used; an OSError that names none passes.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise make_full_error(error, where) from error
        if error.errno in _REFUSING_CODES and error.filename:
            what, place = f"the system refuses it: {error.strerror}", str(error.filename2 or error.filename)
            raise ConfigError(what, where=place, fix="check the path and its permissions") from error
        raise


@contextlib.contextmanager
def refuse_missing_folder(folder: Path) -> Iterator[None]:
    """Turn a folder that cannot be made, or cannot hold a new file, into a refusal as others are."""
    try:
        yield
    except (FileNotFoundError, FileExistsError) as error:  # a file in its place, or a system of files as /proc
        raise NotADirectoryError(errno.ENOTDIR, "no folder for files", str(folder)) from error


@contextlib.contextmanager
def simplify_errors(where: str, what: str = "") -> Iterator[None]:
    """Let storage fail within the block by two kinds of exceptions only, whatever its driver raises; bugs pass.

    Raises StorageError where it is away for now, which begins with `what` if that is given, and OSError where it
    answers that this cannot be done.
    """
    try:
        yield
    except KftrainError:
        raise
    except Exception as error:  # drivers of object stores raise what they like
        if is_outage(error):
            kind = StorageError if what else StorageAwayError
            raise kind(f"{what or UNREACHABLE}: {one_line(error)}", where=where) from error
        if isinstance(error, OSError) or not is_from_driver(error):
            raise
        code = errno.EACCES if is_refusal(error) else errno.EREMOTE
        raise OSError(code, one_line(error), where) from error


def is_from_driver(error: BaseException) -> bool:
    """Tell whether an object store's driver raised it, or it came on its way through one."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [
        *(kind.__module__ for kind in type(error).__mro__),
        *(str(f.f_globals.get("__name__")) for f, _ in frames),
    ]
    return any(module.split(".")[0] in _DRIVERS for module in modules)


def is_outage(error: BaseException) -> bool:
    """Tell whether an exception of a read or a write says that the storage is away for now: later it may succeed."""
    if isinstance(error, OSError) and error.errno in _CODES:
        return True
    status = _read_status(error)
    if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR or _read_s3_code(error) in _EXPIRED:
        return True
    return _is_named(error, _NAMES)


def is_refusal(error: BaseException) -> bool:
    """Tell whether an exception says that this may not be done; where it was done before, that passes.

    A HEAD is answered without a body: S3 says 400 then of a token that has expired.
    """
    if isinstance(error, PermissionError) or _is_named(error, _REFUSED):
        return True
    return _read_status(error) in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) or _read_s3_code(error) == "400"


def one_line(error: BaseException) -> str:
    """Write an exception of a driver on one line."""
    return redact(" ".join(f"{type(error).__name__}: {error}".split()))[:300]


def iterate_pauses() -> Iterator[float]:
    """Yield the seconds to wait before each further try: ever more, and by chance, so that not all come at once."""
    pause = FIRST_DELAY_SECONDS
    while True:
        yield pause * _RANDOM.uniform(0.5, 1.0)
        pause = min(2 * pause, MAX_DELAY_SECONDS)


class OutageNews:
    """Tells once that a service does not answer, and once that it does again, however many threads ask."""

    def __init__(self, say: Progress, prefix: str = "") -> None:
        """Start with every service at work. `prefix` stands before a line that tells of an outage."""
        self._say = say
        self._prefix = prefix
        self._lock = threading.Lock()
        self._away: set[str] = set()

    def tell(self, service: str, problem: str = "") -> None:
        """Tell of the problem of a service; without a problem, that the service is back."""
        with self._lock:
            is_news = (service in self._away) != bool(problem)
            (self._away.add if problem else self._away.discard)(service)
        if is_news and problem:
            self._say(f"{self._prefix}{service} does not answer ({problem}): trying again")
        elif is_news:
            self._say(f"{service} answers again")


class OutagePolicy:
    """Knowledge of the stores that this process uses: which have answered, and which are away."""

    def __init__(
        self,
        say: Progress = to_log,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._news = OutageNews(say, "warning: ")
        self._clock = clock
        self._sleep = sleep
        self.answered_seconds = ANSWERED_SECONDS
        self._answered: set[tuple[str, str]] = set()

    def call(self, uri: str, kind: str, work: Callable[[], T]) -> T:
        """Return what `work` does, once the store answers; it is called again, whatever became of it before.

        `kind`: what it does; rights are given for that. Raises StorageError where the store is away for longer than it
        is waited for.
        """
        store = _name_store(uri)
        began, pauses, was_away = self._clock(), iterate_pauses(), False
        while True:
            try:
                answer = work()
            except Exception as error:  # drivers of object stores raise what they like
                if not self._passes(error, store, kind):
                    # A store that says that something is not there, or is there already, has answered all the same.
                    if isinstance(error, (FileNotFoundError, FileExistsError)):
                        self._note_answer(store, kind, was_away)
                    raise
                away_seconds = self._clock() - began
                limit_seconds = self._limit_seconds(store)
                if away_seconds >= limit_seconds:
                    raise _make_away_error(error, uri, away_seconds) from error
                if away_seconds >= SAID_AFTER_SECONDS:
                    self._news.tell(store or STORAGE, one_line(error))
                was_away = True
                traffic.count(retries=1)
                self._sleep(max(0.0, min(next(pauses), limit_seconds - away_seconds)))
            else:
                self._note_answer(store, kind, was_away)
                return answer

    def _passes(self, error: Exception, store: str, kind: str) -> bool:
        return is_outage(error) or (is_refusal(error) and "://" in store and (store, kind) in self._answered)

    def _limit_seconds(self, store: str) -> float:
        chosen = _chosen_seconds.get()
        if chosen is not None:
            return chosen
        has_answered = any(known == store for known, _ in list(self._answered))
        return self.answered_seconds if has_answered else min(UNANSWERED_SECONDS, self.answered_seconds)

    def _note_answer(self, store: str, kind: str, was_away: bool) -> None:
        """Note an answer. Only a call that had failed says that the store is back: others may never have met that."""
        self._answered.add((store, kind))  # no lock: threads only add to the set, and copy it whole
        if was_away:
            self._news.tell(store or STORAGE)


_chosen_seconds: ContextVar[float | None] = ContextVar("retry_seconds", default=None)
_retry_policy = OutagePolicy()


@contextlib.contextmanager
def retry_for(seconds: float) -> Iterator[None]:
    """Wait this long for storage that is away, within the block; 0: make each call once."""
    token = _chosen_seconds.set(seconds)
    try:
        yield
    finally:
        _chosen_seconds.reset(token)


def limit(seconds: float) -> None:
    """Wait no longer than this from now on: others wait for this process, and would take it for hung."""
    _retry_policy.answered_seconds = min(_retry_policy.answered_seconds, seconds)


def is_hurried() -> bool:
    """Tell whether nobody waits for storage that is away."""
    return _chosen_seconds.get() == 0


def ride_out(uri: str, kind: str, work: Callable[[], T]) -> T:
    """Call `work` until storage answers, by the policy of this process."""
    return _retry_policy.call(uri, kind, work)


def retried(kind: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Ride out outages in a function whose first argument is a URI, and that may be called again at any time."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def retrying(uri: str, *arguments: Any, **options: Any) -> T:
            return ride_out(uri, kind, lambda: function(uri, *arguments, **options))

        return retrying

    return decorate


def _name_store(uri: str) -> str:
    """Return scheme and bucket; empty for paths of this machine, whose mounts are not told apart."""
    parts = urlsplit(uri if "://" in uri else "")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc and parts.scheme != "file" else ""


def _make_away_error(error: Exception, uri: str, away_seconds: float) -> StorageError:
    lasted = f" for {away_seconds:.0f} s" if away_seconds >= 1 else ""
    what = f"{UNREACHABLE}{lasted}: {one_line(error)}"
    return StorageAwayError(what, where=uri, fix="see that the store runs, and check its address and the credentials")


STORAGE = "the storage"
"""The name of storage without a scheme, in lines about outages."""

UNREACHABLE = "storage cannot be reached"
"""First words of an error of storage that is away, after its URI."""


def _is_named(error: BaseException, names: re.Pattern[str]) -> bool:
    return any(names.search(kind.__name__) for kind in type(error).__mro__)


def _read_status(error: BaseException) -> int:
    """Read the HTTP status that a driver's error stands for; 0 where it names none."""
    for attribute in ("status", "status_code", "code"):
        value = getattr(error, attribute, None)
        if isinstance(value, int):
            return value
    metadata = _read_s3_answer(error).get("ResponseMetadata", {})
    return int(metadata.get("HTTPStatusCode", 0))


def _read_s3_code(error: BaseException) -> str:
    return str(_read_s3_answer(error).get("Error", {}).get("Code", ""))


def _read_s3_answer(error: BaseException) -> dict[str, Any]:
    """Return what botocore read, from its own error or from the one that s3fs has made of it."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            return response
    return {}
