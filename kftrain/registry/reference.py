"""What a registered version holds instead of tensors: where the export lies, and its digest."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from kftrain import storage
from kftrain.errors import TrackingError
from kftrain.run import documents
from kftrain.run.commit import Files

FILE_NAME = "reference.json"

EXPORT_DIGEST_TAG = "kftrain.export_digest"
EXPORT_URI_TAG = "kftrain.export_uri"
CHECKPOINT_DIGEST_TAG = "kftrain.checkpoint_digest"
EVALUATION_DIGEST_TAG = "kftrain.evaluation_digest"
DATASET_DIGEST_TAG = "kftrain.dataset_digest"
TRAINING_DIGEST_TAG = "kftrain.training_digest"
RUN_URI_TAG = "kftrain.run_uri"
LOGGED_MODEL_TAG = "kftrain.logged_model_id"
"""MLflow's SQL store forgets which LoggedModel a version was made of."""

PROMOTED_TAG = "kftrain.promoted"
GATE_TAG = "kftrain.gate"


class Reference(documents.Document):
    """`reference.json` of a registered version."""

    export_uri: str
    export_digest: str
    run_uri: str
    checkpoint_digest: str
    dataset_digest: str
    training_digest: str
    evaluation_digest: str

    def tags(self) -> dict[str, str]:
        """The same as tags of the version, to be searched and shown."""
        return {f"kftrain.{name}": str(value) for name, value in self.to_dict().items() if name != "schema_version"}


def require_export(uri: str, digest: str, *, contents: bool = False) -> None:
    """Raises TrackingError unless the export is there: its manifest has the digest, its files their sizes.

    `contents`: their sha256 too, which reads all of them. Without it only the manifest is read.
    """
    manifest_uri = storage.join(uri, "manifest.json")
    try:
        content = storage.read_bytes(manifest_uri)
    except FileNotFoundError as error:
        raise TrackingError("the export is gone", where=uri, fix="export the checkpoint again, or train") from error
    if (actual := storage.sha256_bytes(content)) != digest:
        raise TrackingError(f"the export is not the one with digest {digest[:16]}", where=uri, value=actual[:16])
    try:
        files = _Listing.model_validate_json(content).files
    except ValidationError as error:
        raise TrackingError("the manifest of the export is damaged", where=manifest_uri) from error
    for name, entry in files.items():
        _require_file(storage.join(uri, name), entry.bytes, entry.sha256 if contents else "")


class _Listing(BaseModel):
    """What a manifest says of files."""

    files: Annotated[Files, Field(min_length=1)]


def _require_file(uri: str, num_bytes: int, sha256: str) -> None:
    try:
        size = storage.size_bytes(uri)
    except FileNotFoundError as error:
        raise TrackingError("a file of the export is missing", where=uri) from error
    if size != num_bytes:
        raise TrackingError(f"a file of the export should have {num_bytes} bytes", where=uri, value=size)
    if sha256 and storage.sha256_file(uri) != sha256:
        raise TrackingError("a file of the export is damaged: its sha256 differs", where=uri)
