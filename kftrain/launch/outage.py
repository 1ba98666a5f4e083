"""Storage that is down for a while: what can go on without it goes on, what cannot is tried again.

Drivers of object stores raise whatever their HTTP client raises, so this is the one place that takes any exception.
Only reading and writing stands inside these blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kftrain.errors import KftrainError, RetryableError
from kftrain.progress import to_log


@contextlib.contextmanager
def tolerated(what: str) -> Iterator[None]:
    """A block that may fail: a failure is a warning that begins with `what`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - drivers of object stores raise what they like
        to_log(f"warning: {what}: {_shown(error)}")


@contextlib.contextmanager
def retryable(what: str, where: str) -> Iterator[None]:
    """A block whose failure is a RetryableError that says `what`; errors of ours pass."""
    try:
        yield
    except KftrainError:
        raise
    except Exception as error:
        raise RetryableError(f"{what}: {_shown(error)}", where=where) from error


def _shown(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
