"""Reads what a version was made of from its LoggedModel's `reference.json`, never from tags, which anybody can edit.

A version names its LoggedModel in `source`, which MLflow never changes. Tags are for people and filters.
"""

from __future__ import annotations

from pydantic import ValidationError

from kftrain.core import storage
from kftrain.errors import TrackingError
from kftrain.registry.reference import (
    EVALUATION_DIGEST_TAG,
    EXPORT_DIGEST_TAG,
    FILE_NAME,
    LOGGED_MODEL_TAG,
    Reference,
)
from kftrain.run.documents import SCHEMA_VERSION
from kftrain.tracking import model_client
from kftrain.tracking.model_client import LoggedModel, ModelVersion

_SOURCE = "models:/"


def read_reference(uri: str, version: ModelVersion) -> Reference:
    """Return the reference of a version. Raises TrackingError if kftrain did not register it, or it is damaged."""
    return _read_model_and_reference(uri, version)[1]


def find_reference(uri: str, version: ModelVersion | None) -> Reference | None:
    """Return the reference of a version, or None if there is none to be used. Raises TrackingError if MLflow fails."""
    return find_model_reference(uri, parse_logged_model_id(version)) if version else None


def find_model_reference(uri: str, model_id: str) -> Reference | None:
    """Return the reference in a LoggedModel, or None if none can be used. Raises TrackingError if MLflow fails."""
    model = model_client.get_logged_model(uri, model_id) if model_id else None
    text = _read_text(uri, model) if model else None
    try:
        return None if text is None else _parse_reference(text, model_id)
    except TrackingError:
        return None


def parse_logged_model_id(version: ModelVersion) -> str:
    """Return the id of the LoggedModel that a version was made of; empty if it was made of something else."""
    model_id = version.source.removeprefix(_SOURCE)
    return model_id if version.source.startswith(_SOURCE) and "/" not in model_id and "@" not in model_id else ""


def find_differing_tags(uri: str, version: ModelVersion) -> list[str]:
    """Return the names of tags, of a version or its LoggedModel, that contradict the version's reference.

    The evaluation's digest is not compared: its tag follows the last evaluation.
    """
    model, reference = _read_model_and_reference(uri, version)
    expected = {**reference.tags(), LOGGED_MODEL_TAG: model.model_id}
    expected.pop(EVALUATION_DIGEST_TAG)
    tags = (version.tags, model.tags)
    return sorted(name for name, value in expected.items() if any(own.get(name, value) != value for own in tags))


def find_last_evaluation(uri: str, version: ModelVersion, reference: Reference) -> str:
    """Return the digest of the evaluation under which a version was registered the last time."""
    if EVALUATION_DIGEST_TAG in version.tags:  # registered by an older kftrain
        return version.tags[EVALUATION_DIGEST_TAG]
    model = _get_logged_model(uri, version)
    return model.tags.get(EVALUATION_DIGEST_TAG, reference.evaluation_digest) if model else reference.evaluation_digest


def read_content_digest(export_uri: str, export_digest: str) -> str:
    """Return the digest of an export's files alone: equal for equal weights and settings, whichever run trained them.

    Raises TrackingError if the export is gone, or is another one than `export_digest` names.
    """
    manifest = storage.join(export_uri, "manifest.json")
    try:
        content = storage.read_bytes(manifest)
    except FileNotFoundError as error:
        raise TrackingError("the export is gone", where=export_uri, fix="train again") from error
    if storage.sha256_bytes(content) != export_digest:
        raise TrackingError(f"the export is not the one with digest {export_digest[:16]}", where=export_uri)
    return storage.digest_json(storage.read_json(manifest)["files"])


def _get_logged_model(uri: str, version: ModelVersion) -> LoggedModel | None:
    model_id = parse_logged_model_id(version)
    return model_client.get_logged_model(uri, model_id) if model_id else None


def _read_model_and_reference(uri: str, version: ModelVersion) -> tuple[LoggedModel, Reference]:
    where = f"version {version.version}"
    if not parse_logged_model_id(version):
        raise TrackingError("not registered by kftrain: not made of a LoggedModel", where=where, value=version.source)
    model = _get_logged_model(uri, version)
    if model is None:
        raise TrackingError("its LoggedModel was deleted", where=where, value=version.source, fix="register it again")
    text = _read_text(uri, model)
    if text is None:
        raise TrackingError(f"not registered by kftrain: its LoggedModel has no {FILE_NAME}", where=where)
    return model, _parse_reference(text, where)


def _read_text(uri: str, model: LoggedModel) -> str | None:
    """Return the text of a LoggedModel's `reference.json`; None if it has none, or lacks the tag of our models.

    Files of a model without the tag are not read: its place may be anything. The tag can only keep us from reading, it
    decides nothing.
    """
    return model_client.read_model_file(uri, model, FILE_NAME) if EXPORT_DIGEST_TAG in model.tags else None


def _parse_reference(text: str, where: str) -> Reference:
    try:
        reference = Reference.model_validate_json(text)
    except ValidationError as error:
        raise TrackingError(f"{FILE_NAME} of its LoggedModel is damaged", where=where) from error
    if reference.schema_version != SCHEMA_VERSION:
        raise TrackingError(f"{FILE_NAME} has another schema version", where=where, value=reference.schema_version)
    return reference
