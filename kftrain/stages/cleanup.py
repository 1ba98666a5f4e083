"""What each launch backend leaves behind, and how the exit handler removes it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kftrain import storage
from kftrain.config import Config
from kftrain.contracts import RunPaths

STALE_SECONDS = 3600.0
"""A temporary file that nobody has touched for so long belongs to a process that is gone."""


def clean_up(config: Config, paths: RunPaths) -> list[str]:
    """Removes what the run's jobs left behind; returns what was removed."""
    return CLEANERS[config.launch.backend](paths)


def remove_temporary_files(paths: RunPaths) -> list[str]:
    """Removes files and folders that a killed process was still writing, from a storage root on this machine."""
    if not storage.is_local(paths.uri):
        return []
    oldest = time.time() - STALE_SECONDS
    found = [path for path in storage.local_path(paths.uri).rglob(".tmp-*") if path.stat().st_mtime < oldest]
    for path in found:
        storage.remove(str(path))
    return [str(path) for path in found]


CLEANERS: dict[str, Callable[[RunPaths], list[str]]] = {"local": remove_temporary_files}
"""By `launch.backend`."""
