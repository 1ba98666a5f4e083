"""Challengers that a person has declined: no champion, whatever the gate says, until a person promotes them.

It is an entry of the journal, so of a decline and a promotion at the same moment one sees the other. It is known by the
export, so a step that runs again, and another run with the same weights, are declined, too.

    <root>/registry/<model>/declined/<digest of the export>.json     of an older kftrain; a promotion by hand removes it
"""

from __future__ import annotations

from collections.abc import Sequence

from kftrain import storage
from kftrain.config import Config
from kftrain.errors import TrackingError
from kftrain.registry.journal import Declined, Entry
from kftrain.run import documents


def find(config: Config, entries: Sequence[Entry], export_digest: str) -> Declined | None:
    """Why an export was declined; None: it was not. Raises TrackingError where that is damaged."""
    for entry in reversed(entries):
        if entry.declined is not None and entry.declined.export_digest == export_digest:
            return entry.declined
        if entry.kind == "promote" and entry.export_digest == export_digest:
            break
    return documents.read_if_exists(Declined, _document(config, export_digest), TrackingError)


def remove_document(config: Config, export_digest: str) -> None:
    """Removes what an older kftrain has left: a person wants the export after all."""
    storage.remove(_document(config, export_digest))


def _document(config: Config, export_digest: str) -> str:
    folder = storage.join(config.run.storage_root, "registry", config.model_name, "declined")
    return storage.join(folder, f"{export_digest[:16]}.json")
