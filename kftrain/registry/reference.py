"""What a registered version holds instead of tensors: where the export lies, and its digest."""

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
    """Raises TrackingError unless the export is whole, see `run.export.require_whole`."""
    try:
        export.require_whole(uri, digest, contents=contents)
    except CheckpointError as error:
        raise TrackingError(error.what, where=error.where, value=error.value, fix=error.fix) from error
