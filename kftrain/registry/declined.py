"""Challengers that a person has declined: no champion, whatever the gate says, until a person promotes them.

It is an entry of the journal, so of a decline and a promotion at the same moment one sees the other. It is known by the
export, so a step that runs again, and another run with the same weights, are declined, too.

    <root>/registry/<model>/declined/<digest of the export>.json     of an older kftrain; a promotion by hand removes it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kftrain import storage
from kftrain.errors import TrackingError
from kftrain.registry.journal import Declined, Entry
from kftrain.run import documents


@dataclass(frozen=True)
class DeclinedModels:
    """All that were declined of one registered model."""

    uri: str

    @classmethod
    def of(cls, storage_root: str, model_name: str) -> DeclinedModels:
        """Those of a model below a storage root."""
        return cls(storage.join(storage_root, "registry", model_name, "declined"))

    def find(self, entries: Sequence[Entry], export_digest: str) -> Declined | None:
        """Why an export was declined; None: it was not. Raises TrackingError where that is damaged."""
        for entry in reversed(entries):
            if entry.declined is not None and entry.declined.export_digest == export_digest:
                return entry.declined
            if entry.kind == "promote" and entry.export_digest == export_digest:
                break
        return documents.read_if_exists(Declined, self._document(export_digest), TrackingError)

    def remove(self, export_digest: str) -> None:
        """A person wants it after all."""
        if export_digest:
            storage.remove(self._document(export_digest))

    def _document(self, export_digest: str) -> str:
        return storage.join(self.uri, f"{export_digest[:16]}.json")
