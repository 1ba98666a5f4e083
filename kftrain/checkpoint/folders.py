"""Checkpoints of a script: any folder of files on this machine, copied into a checkpoint of ours and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import quote, unquote

from kftrain.checkpoint.files import HashingStream
from kftrain.core import storage
from kftrain.errors import CheckpointError
from kftrain.run.commit import FileEntry

PREFIX = "files/"
"""Folder of the script's files in a checkpoint, so that none has the name of one of ours."""


def encode_name(path: str) -> str:
    """Encode a path below the folder as a plain name: `a/b.pt` is `files=2Fa=2Fb.pt`."""
    return quote(PREFIX + path, safe="").replace("%", "=")


def decode_name(name: str) -> str:
    """Return the path, the inverse of `encode_name`; empty for a file of ours. Raises CheckpointError."""
    path = unquote(name.replace("=", "%"))
    if path.startswith(PREFIX) and {"", ".", ".."}.intersection(path.split("/")):
        raise CheckpointError("a file of the checkpoint leads out of its folder", value=name)
    return path.removeprefix(PREFIX) if path.startswith(PREFIX) else ""


def copy_file(source: str, target: str) -> FileEntry:
    """Copy a file from storage to storage; return its entry."""
    with storage.open_read(source) as stream, storage.open_write(target) as written:
        hashing = HashingStream(written)
        shutil.copyfileobj(stream, hashing)
    return hashing.entry


def store_folder(folder: Path, uri: str) -> dict[str, FileEntry]:
    """Copy all files of a local folder into the checkpoint at `uri`; return their entries, by name there.

    Raises CheckpointError for a folder without files, and for a file that somebody still writes.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not paths:
        raise CheckpointError("there is no file to commit", where=str(folder), fix="write the state there first")
    entries = {}
    for path in paths:
        name = encode_name(path.relative_to(folder).as_posix())
        before = storage.size_and_version(str(path))
        entries[name] = copy_file(str(path), storage.join(uri, name))
        if storage.size_and_version(str(path)) != before:
            fix = "call commit when all writers have closed their files"
            raise CheckpointError("a file has changed while it was committed", where=str(path), fix=fix)
    return entries


def fetch_folder(uri: str, files: dict[str, FileEntry], folder: Path) -> None:
    """Copy the script's files of a checkpoint into a local folder. Raises CheckpointError for a damaged one."""
    for name, path in ((name, decode_name(name)) for name in files):
        if path and copy_file(storage.join(uri, name), str(folder / path)) != files[name]:
            what = "a file is damaged: its sha256 differs from the manifest"
            raise CheckpointError(what, where=storage.join(uri, name))
