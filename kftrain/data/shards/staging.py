"""Publishes a folder whose name is known only when its content is complete: shards, named by their digest.

Local store: the folder is filled aside, synced, and appears with one rename. Killed at any point, nothing or all of
it is there. Object store: the files are uploaded one by one, the manifest last; without a manifest the rest is not
looked at.

What a killed process left aside is removed by a later one when nobody has written to it for `ABANDONED_SECONDS`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kftrain.core import storage

ABANDONED_SECONDS = 6 * 3600.0
"""A live sharding writes to its folder every few MiB, so that a folder silent for hours has no owner."""

_PREFIX = ".tmp-sharding-"


@contextlib.contextmanager
def staging_folder(parent_uri: str) -> Iterator[Path]:
    """Yield an empty local folder, in `parent_uri` if that is local, else a temporary one; remove it afterwards."""
    parent = storage.local_path(parent_uri) if storage.is_local(parent_uri) else Path(tempfile.gettempdir())
    storage.make_folder(parent)
    _remove_abandoned(parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as aside:
        content = Path(aside) / "content"
        content.mkdir()
        yield content


def publish_folder(content: Path, uri: str, last: str, is_good: Callable[[str], bool]) -> None:
    """Make the files of the staged folder `content` appear at `uri`, the file called `last` after all others.

    What is already at `uri` stays if `is_good` says so (another process was faster) and is replaced if not (it is
    damaged).
    """
    if storage.exists(storage.join(uri, last)) and is_good(uri):
        return
    if storage.is_local(uri):
        _rename(content, storage.local_path(uri), lambda: is_good(uri))
        return
    for path in sorted(content.iterdir(), key=lambda path: (path.name == last, path.name)):
        storage.publish(storage.join(uri, path.name), path.read_bytes())


def _rename(content: Path, target: Path, is_good: Callable[[], bool]) -> None:
    for path in content.iterdir():
        storage.finish_file(path)
    storage.sync_folder(content)
    storage.make_folder(target.parent)
    try:
        os.rename(content, target)
    except OSError:  # something is there: who reads it may not find it gone, unless it is damaged
        if not is_good():
            _replace(content, target, is_good)
    storage.sync_folder(target.parent)


def _replace(content: Path, target: Path, is_good: Callable[[], bool]) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, content.parent / "replaced")
    try:
        os.rename(content, target)
    except OSError:
        if not is_good():  # nobody else published it meanwhile
            raise


def _remove_abandoned(parent: Path) -> None:
    for folder, status in storage.entries(parent, _PREFIX):
        below = (inner for path, _, _ in os.walk(folder) for _, inner in storage.entries(Path(path)))
        if max(entry.st_mtime for entry in (status, *below)) < time.time() - ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
