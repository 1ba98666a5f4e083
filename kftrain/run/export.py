"""Whether an export is whole: its manifest, and the files that this lists. Nothing here reads tensors.

export/<checkpoint digest>/
model.safetensors …
manifest.json          every file's bytes and sha256; written last; its own digest is the export's digest
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from kftrain import storage
from kftrain.errors import CheckpointError
from kftrain.run import commit, documents

MANIFEST = "manifest.json"
"""The file that is written last into an export."""


class ExportManifest(documents.Document):
    """`manifest.json` of an export."""

    checkpoint_digest: str
    training_digest: str
    dataset_digest: str
    step: int
    files: Annotated[commit.Files, Field(min_length=1)]


def manifest_uri(uri: str) -> str:
    """Where the manifest of the export at `uri` lies."""
    return storage.join(uri, MANIFEST)


def is_export(uri: str) -> bool:
    """Whether a whole export is there: its manifest, and every file of it with its size. Only the manifest is read."""
    try:
        manifest = documents.read(ExportManifest, manifest_uri(uri), CheckpointError)
        return commit.has_files(uri, manifest.files)
    except (CheckpointError, NotADirectoryError):
        return False


def digest_of_export(uri: str) -> str:
    """The sha256 of an export's manifest. Raises CheckpointError where there is none."""
    return storage.sha256_bytes(_manifest_content(uri))


def read_export_manifest(uri: str, digest: str) -> ExportManifest:
    """The manifest of the export with this digest. Raises CheckpointError where another one, or none, is there."""
    content = _manifest_content(uri)
    if (actual := storage.sha256_bytes(content)) != digest:
        raise CheckpointError(f"the export is not the expected one, {digest[:16]}", where=uri, value=actual[:16])
    return documents.parse(ExportManifest, content, manifest_uri(uri), CheckpointError)


def require_whole(uri: str, digest: str, *, contents: bool = False) -> ExportManifest:
    """The manifest of the export with this digest, whose every file is there with its size. Raises CheckpointError.

    `contents`: their sha256 is checked too, which reads all of them. Without it only the manifest is read.
    """
    manifest = read_export_manifest(uri, digest)
    if contents:
        commit.verify_files(uri, manifest.files)
    elif not commit.has_files(uri, manifest.files):
        raise CheckpointError("files of the export are missing or have another size", where=uri)
    return manifest


def tensor_entries(uri: str, files: Mapping[str, commit.FileEntry]) -> dict[str, commit.FileEntry]:
    """Those of an export's files that hold tensors, in order. Raises CheckpointError where none does."""
    names = sorted(name for name in files if name.endswith(".safetensors"))
    if not names:
        raise CheckpointError("the export holds no tensors", where=uri, fix="export the checkpoint again")
    return {name: files[name] for name in names}


def _manifest_content(uri: str) -> bytes:
    try:
        return storage.read_bytes(manifest_uri(uri))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError("no export here", where=uri, fix="export the checkpoint again, or train") from error
