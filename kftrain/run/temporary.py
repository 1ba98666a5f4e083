"""What a killed process leaves half-written in a run's folder."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kftrain import storage
from kftrain.run.paths import RunPaths

STALE_SECONDS = 3600.0
"""A temporary file that nobody has touched for so long belongs to a process that is gone."""


def remove_temporary_files(paths: RunPaths) -> list[str]:
    """Removes files and folders that a killed process was still writing, from a storage root on this machine."""
    if not storage.is_local(paths.uri):
        return []
    oldest = time.time() - STALE_SECONDS
    found = [path for path in _temporary(storage.local_path(paths.uri)) if _modified(path) < oldest]
    for path in found:
        storage.remove(str(path))
    return [str(path) for path in found]


def _temporary(folder: Path) -> Iterator[Path]:
    """Files and folders that are being written; others may finish or delete theirs meanwhile."""
    for parent, folders, files in os.walk(folder):  # leaves out a folder that has vanished
        yield from (Path(parent, name) for name in sorted([*folders, *files]) if name.startswith(".tmp-"))


def _modified(path: Path) -> float:
    """Seconds since the epoch; infinite for what has vanished."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf
