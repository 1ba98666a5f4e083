"""The removal of files that killed processes have left half-written in a run's folder."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kftrain.core import storage
from kftrain.run.paths import RunPaths

STALE_SECONDS = 3600.0
"""Age in seconds beyond which a temporary file belongs to a process that is gone."""


def remove_temporary_files(paths: RunPaths) -> list[str]:
    """Remove what killed processes were still writing and return its paths; in an object store files appear whole."""
    if not storage.is_local(paths.uri):
        return []
    oldest = time.time() - STALE_SECONDS
    stale = [path for path in _iterate_temporary(storage.local_path(paths.uri)) if _read_modified_at(path) < oldest]
    for path in stale:
        storage.remove(str(path))
    return [str(path) for path in stale]


def _iterate_temporary(folder: Path) -> Iterator[Path]:
    """Yield files and folders that are being written; others may finish or delete theirs meanwhile."""
    for parent, folders, files in os.walk(folder):  # leaves out a folder that has vanished
        yield from (Path(parent, name) for name in sorted([*folders, *files]) if name.startswith(".tmp-"))


def _read_modified_at(path: Path) -> float:
    """Read when a path was last changed, in seconds since the epoch; infinite for what has vanished."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf
