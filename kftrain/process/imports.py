"""Imports that stay for as long as the process does."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def imports_for_good() -> Iterator[None]:
    """Import within the block what is never searched for garbage, neither now nor at the end of the process.

    torch is a million objects: that takes a second of a core, on every rank.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # before the collector may run again: else it searches all of it once
        gc.enable()
