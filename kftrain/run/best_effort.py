"""Storage that is down for a while: what can go on without it goes on, what cannot is tried again.

`storage` itself rides an outage out. What can go on without it does not wait for that: it has better things to do.
What is no failure of storage, nor of what it holds, is a bug, and passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kftrain.core.outages import one_line, retry_for, simplify_errors
from kftrain.core.progress import to_log
from kftrain.errors import KftrainError, StorageError

REPORT_SECONDS = 10.0
"""Seconds for which a process that ends retries to leave its reason behind; once told to stop, it has 30 in all."""


@contextlib.contextmanager
def best_effort(what: str, retry_seconds: float = 0.0) -> Iterator[None]:
    """Run a block that may fail: a failure of storage, or of what it holds, is a warning that begins with `what`."""
    try:
        with retry_for(retry_seconds), simplify_errors(""):
            yield
    except (KftrainError, OSError, ValueError) as error:  # ValueError: what was read is damaged
        why = error.line if isinstance(error, KftrainError) else one_line(error)
        to_log(f"warning: {what}: {why}")


@contextlib.contextmanager
def retryable(what: str, where: str) -> Iterator[None]:
    """Run a block in which a failure of storage is a StorageError that says `what`; errors of ours pass."""
    try:
        with simplify_errors(where, what):
            yield
    except OSError as error:
        raise StorageError(f"{what}: {one_line(error)}", where=where) from error
