"""Checks tracking URIs without MLflow: the form, the credentials, and that a server or a database is there.

Nothing here imports MLflow, so a wrong address is found in milliseconds rather than after its import and
its retries.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from kftrain.core import credentials
from kftrain.core.credentials import redact as redact
from kftrain.errors import TrackingError
from kftrain.tracking.settings import TrackingConfig

PROBE_TIMEOUT_SECONDS = 5.0

_SQLITE = "sqlite:///"
_SQLITE_MAGIC = b"SQLite format 3\0"
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of a `sqlite:///` URI; None for other URIs."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def probe_database(path: Path) -> None:
    """Raise TrackingError unless the file is an sqlite database, or one can be created there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        head = b""
        if path.exists():
            with path.open("rb") as stream:
                head = stream.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise TrackingError(f"cannot use the database: {error}", where="tracking.uri", value=str(path)) from error
    if head not in (b"", _SQLITE_MAGIC):
        raise TrackingError("not an sqlite database", where="tracking.uri", value=str(path), fix="name another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise TrackingError("cannot write the database", where="tracking.uri", value=str(path), fix="check its rights")


def is_http(uri: str) -> bool:
    """Return True if the URI names an MLflow server."""
    return uri.startswith(("http://", "https://"))


def require_supported(uri: str) -> None:
    """Raise TrackingError for a file store, which MLflow no longer supports, and for anything that is no URI."""
    if is_http(uri) or (sqlite_path(uri) or Path()).name:
        return
    if "://" not in uri or uri.startswith(("file:", _SQLITE)):
        what, fix = (
            "MLflow does not keep runs in a plain folder any more",
            "use sqlite:///mlflow.db, or a server, http://…",
        )
        raise TrackingError(what, where="tracking.uri", value=redact(uri), fix=fix)


def require_private_credentials(tracking: TrackingConfig) -> None:
    """Raise TrackingError if a password or a token would cross a network in plain text."""
    address = urlsplit(tracking.uri)
    is_plain = address.scheme == "http" and not _LOOPBACK.fullmatch(address.hostname or "")
    if not is_plain or tracking.allow_credentials_over_http:
        return
    present = {name for name, value in os.environ.items() if value}
    if (
        credentials.TOKEN_VARIABLE in present
        or {credentials.USERNAME_VARIABLE, credentials.PASSWORD_VARIABLE} <= present
    ):
        what = "the credentials of MLflow would go over plain http, where anybody on the way reads them"
        fix = "use https, or set tracking.allow_credentials_over_http where the network is your own"
        raise TrackingError(what, where="tracking.uri", value=tracking.uri, fix=fix)


def probe(uri: str, timeout_seconds: float = PROBE_TIMEOUT_SECONDS) -> None:
    """Raise TrackingError unless an HTTP server answers at the URI, with whatever status."""
    parts = urlsplit(uri)
    address = urlunsplit((parts.scheme, parts.netloc.rsplit("@", 1)[-1], parts.path.rstrip("/") + "/health", "", ""))
    try:
        with urllib.request.urlopen(address, timeout=timeout_seconds):
            return
    except urllib.error.HTTPError as answer:
        answer.close()
    except (OSError, ValueError) as error:
        what = f"the MLflow server does not answer: {getattr(error, 'reason', error)}"
        raise TrackingError(what, where=redact(uri), fix="start it, or check tracking.uri and the network") from error


@contextlib.contextmanager
def database_lock(uri: str) -> Iterator[None]:
    """Hold other processes of this machine back while the database may be created; does nothing for servers.

    Two processes that create the tables of one file at the same time both fail in the middle of the migrations. The
    lock is on the folder, so that no lock file stays behind; the kernel releases it if this process dies.
    """
    path = sqlite_path(uri)
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise TrackingError(f"cannot create the database: {error}", where="tracking.uri", value=uri) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
