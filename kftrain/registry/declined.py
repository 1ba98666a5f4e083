"""Challengers that a person has declined: no champion, whatever the gate says, until a person promotes them.

    <root>/registry/<model>/declined/<digest of the export>.json     created exclusively; a promotion by hand removes it

It is known by the export, so a step that runs again, and another run with the same weights, are declined, too.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timezone

from kftrain import storage
from kftrain.errors import TrackingError
from kftrain.run import documents
from kftrain.run.documents import Document


class Declined(Document):
    """`<digest>.json`: that a person has declined a version."""

    version: int
    export_digest: str
    reason: str
    time: str
    """UTC, ISO 8601."""
    entry_id: str
    """Random: tells a document of ours from an equal one of another process."""


@dataclass(frozen=True)
class DeclinedModels:
    """All that were declined of one registered model."""

    uri: str

    @classmethod
    def of(cls, storage_root: str, model_name: str) -> DeclinedModels:
        """Those of a model below a storage root."""
        return cls(storage.join(storage_root, "registry", model_name, "declined"))

    def find(self, export_digest: str) -> Declined | None:
        """Why an export was declined; None: it was not. Raises TrackingError where that is damaged."""
        return documents.read_if_exists(Declined, self._document(export_digest), TrackingError)

    def add(self, version: int, export_digest: str, reason: str) -> Declined:
        """Declines an export; where somebody has done so before, theirs is returned."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        said = Declined(
            version=version, export_digest=export_digest, reason=reason, time=now, entry_id=uuid.uuid4().hex
        )
        try:
            storage.create_json(self._document(export_digest), said.to_dict())
        except FileExistsError:
            return self.find(export_digest) or said
        return said

    def remove(self, export_digest: str) -> None:
        """A person wants it after all."""
        if export_digest:
            storage.remove(self._document(export_digest))

    def _document(self, export_digest: str) -> str:
        return storage.join(self.uri, f"{export_digest[:16]}.json")
