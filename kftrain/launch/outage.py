"""Storage that is down for a while: what can go on without it goes on, what cannot is tried again.

`storage` itself rides an outage out. What can go on without it does not wait for that: it has better things to do.
Drivers of object stores raise whatever their HTTP client raises, so this is the one place that takes any exception.
Only reading and writing stands inside these blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kftrain.errors import KftrainError, StorageError
from kftrain.outages import patience, shown
from kftrain.progress import to_log

REPORT_SECONDS = 10.0
"""How long a process that ends waits to leave its reason behind: told to stop, it has half a minute."""


@contextlib.contextmanager
def tolerated(what: str, patience_seconds: float = 0.0) -> Iterator[None]:
    """A block that may fail: a failure is a warning that begins with `what`."""
    try:
        with patience(patience_seconds):
            yield
    except Exception as error:  # noqa: BLE001 - drivers of object stores raise what they like
        to_log(f"warning: {what}: {shown(error)}")


@contextlib.contextmanager
def retryable(what: str, where: str) -> Iterator[None]:
    """A block whose failure is a StorageError that says `what`; errors of ours pass."""
    try:
        yield
    except KftrainError:
        raise
    except Exception as error:
        raise StorageError(f"{what}: {shown(error)}", where=where) from error
