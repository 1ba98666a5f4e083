"""The manifest of an export, and the checks that an export is whole. Nothing here reads tensors.

export/<checkpoint digest>/
model.safetensors …
manifest.json          every file's bytes and sha256; written last; its own digest is the export's digest
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from kftrain.core import storage
from kftrain.errors import CheckpointError
from kftrain.run import commit, documents

MANIFEST = "manifest.json"
"""Name of the file that is written last into an export, so that it stands only in a whole one."""


class ExportManifest(documents.Document):
    """`manifest.json` of an export: its files, and the checkpoint, training and dataset that it comes from."""

    checkpoint_digest: str
    training_digest: str
    dataset_digest: str
    step: int
    files: Annotated[commit.Files, Field(min_length=1)]


def build_manifest_uri(uri: str) -> str:
    """Return the URI of the manifest of the export at `uri`."""
    return storage.join(uri, MANIFEST)


def is_export(uri: str) -> bool:
    """Tell whether a whole export is there: its manifest, and all its files by size. Reads only the manifest."""
    try:
        manifest = documents.read(ExportManifest, build_manifest_uri(uri), CheckpointError)
        return commit.has_files(uri, manifest.files)
    except (CheckpointError, NotADirectoryError):
        return False


def compute_export_digest(uri: str) -> str:
    """Compute the digest of an export: the sha256 of its manifest. Raises CheckpointError where there is none."""
    return storage.sha256_bytes(_read_manifest_content(uri))


def read_export_manifest(uri: str, digest: str) -> ExportManifest:
    """Read the manifest of the export with this digest. Raises CheckpointError where another one, or none, is there."""
    content = _read_manifest_content(uri)
    if (actual := storage.sha256_bytes(content)) != digest:
        raise CheckpointError(f"the export is not the expected one, {digest[:16]}", where=uri, value=actual[:16])
    return documents.parse_document(ExportManifest, content, build_manifest_uri(uri), CheckpointError)


def require_whole(uri: str, digest: str, *, contents: bool = False) -> ExportManifest:
    """Read the manifest of the export with this digest and check that all files have their size.

    `contents`: check their sha256 too, which reads all of them. Without it only the manifest is read. Raises
    CheckpointError.
    """
    manifest = read_export_manifest(uri, digest)
    if contents:
        commit.verify_files(uri, manifest.files)
    elif not commit.has_files(uri, manifest.files):
        raise CheckpointError("files of the export are missing or have another size", where=uri)
    return manifest


def list_tensor_entries(uri: str, files: Mapping[str, commit.FileEntry]) -> dict[str, commit.FileEntry]:
    """Select the files of an export that hold the model's tensors, sorted by name; those of tables are others.

    Raises CheckpointError where none does.
    """
    names = sorted(name for name in files if name.endswith(".safetensors") and not name.startswith("table-"))
    if not names:
        raise CheckpointError("the export holds no tensors", where=uri, fix="export the checkpoint again")
    return {name: files[name] for name in names}


def _read_manifest_content(uri: str) -> bytes:
    try:
        return storage.read_bytes(build_manifest_uri(uri))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError("no export here", where=uri, fix="export the checkpoint again, or train") from error
