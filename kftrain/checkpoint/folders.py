"""Checkpoints of a foreign trainer: any folder of files on this machine, copied into a checkpoint of ours and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from kftrain.checkpoint.files import HashingStream
from kftrain.core import storage
from kftrain.errors import CheckpointError
from kftrain.run.commit import FileEntry

PREFIX = "files/"
"""Folder of the script's files, so that none of them has the name of one of ours."""


def encode_name(relative: str) -> str:
    """Encode a path below the folder as the plain name that a manifest has: `a/b.pt` is `files=2Fa=2Fb.pt`."""
    return quote(PREFIX + relative, safe="").replace("%", "=")


def decode_name(name: str) -> tuple[str, ...]:
    """Return the parts of the path, () for a file of ours: the inverse of `encode_name`.

    Raises CheckpointError for a path that leads out of its folder.
    """
    path = unquote(name.replace("=", "%"))
    if not path.startswith(PREFIX):
        return ()
    parts = tuple(path.removeprefix(PREFIX).split("/"))
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise CheckpointError("a file of the checkpoint leads out of its folder", value=name)
    return parts


def store_folder(folder: Path, uri: str) -> dict[str, FileEntry]:
    """Copy all files of a local folder into the checkpoint's at `uri`; return their entries, by name there.

    Raises CheckpointError for a folder without files, and for a file that is still being written.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not paths:
        raise CheckpointError("there is no file to commit", where=str(folder), fix="write the state there first")
    entries = {}
    for path in paths:
        name = encode_name(path.relative_to(folder).as_posix())
        before = _read_version(path)
        with path.open("rb") as source, storage.open_write(storage.join(uri, name)) as stream:
            target = HashingStream(stream)
            shutil.copyfileobj(source, target)
        if _read_version(path) != before:
            fix = "call commit when all writers have closed their files"
            raise CheckpointError("a file has changed while it was committed", where=str(path), fix=fix)
        entries[name] = target.entry
    return entries


def fetch_folder(uri: str, files: dict[str, FileEntry], folder: Path) -> None:
    """Copy the script's files of a checkpoint into a local folder. Raises CheckpointError for a damaged one."""
    for name, entry in files.items():
        parts = decode_name(name)
        if not parts:
            continue
        path = folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        with storage.open_read(storage.join(uri, name)) as source, path.open("wb") as stream:
            target = HashingStream(stream)
            shutil.copyfileobj(source, target)
        if target.entry != entry:
            what = "a file is damaged: its sha256 differs from the manifest"
            raise CheckpointError(what, where=storage.join(uri, name))


def _read_version(path: Path) -> Any:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
