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


def find(config: Config, entries: Sequence[Entry], export_digest: str, content: str = "") -> Declined | None:
    """Why an export, or one with its content, was declined; None: it was not. Raises TrackingError where damaged."""
    promoted = set[str]()
    for entry in reversed(entries):
        said = entry.declined
        if said and not promoted & {said.export_digest, export_digest} and _is_of(said, export_digest, content):
            return said
        promoted |= {entry.export_digest} if entry.kind == "promote" else set()
    return documents.read_if_exists(Declined, _document(config, export_digest), TrackingError)


def _is_of(said: Declined, export_digest: str, content: str) -> bool:
    return said.export_digest == export_digest or "" != said.content_digest == content


def remove_document(config: Config, export_digest: str) -> None:
    """Removes what an older kftrain has left: a person wants the export after all."""
    storage.remove(_document(config, export_digest))


def _document(config: Config, export_digest: str) -> str:
    folder = storage.join(config.run.storage_root, "registry", config.model_name, "declined")
    return storage.join(folder, f"{export_digest[:16]}.json")
