"""The reference that a registered version holds instead of tensors: the place of its export, and the digest."""

from __future__ import annotations

from kftrain.errors import CheckpointError, TrackingError
from kftrain.run import documents, export

FILE_NAME = "reference.json"

EXPORT_DIGEST_TAG = "kftrain.export_digest"
EXPORT_URI_TAG = "kftrain.export_uri"
CHECKPOINT_DIGEST_TAG = "kftrain.checkpoint_digest"
EVALUATION_DIGEST_TAG = "kftrain.evaluation_digest"
DATASET_DIGEST_TAG = "kftrain.dataset_digest"
TRAINING_DIGEST_TAG = "kftrain.training_digest"
RUN_URI_TAG = "kftrain.run_uri"
LOGGED_MODEL_TAG = "kftrain.logged_model_id"
"""Tag with the id of a version's LoggedModel, which MLflow's SQL store forgets."""

PROMOTED_TAG = "kftrain.promoted"
GATE_TAG = "kftrain.gate"


class Reference(documents.Document):
    """`reference.json` of a registered version: its export, and the digests of what led to it."""

    export_uri: str
    export_digest: str
    run_uri: str
    checkpoint_digest: str
    dataset_digest: str
    training_digest: str
    evaluation_digest: str

    def tags(self) -> dict[str, str]:
        """Return the fields as tags, by which versions are searched and which MLflow shows."""
        return {f"kftrain.{name}": str(value) for name, value in self.to_dict().items() if name != "schema_version"}


def require_export(uri: str, digest: str, *, contents: bool = False) -> None:
    """Raise TrackingError unless the export is whole, see `run.export.require_whole`."""
    try:
        export.require_whole(uri, digest, contents=contents)
    except CheckpointError as error:
        raise TrackingError(error.what, where=error.where, value=error.value, fix=error.fix) from error
