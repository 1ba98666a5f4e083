"""Challengers that a person has declined: the gate passes them over until a person promotes them.

A decline is an entry of the journal, so of a decline and a promotion at the same moment one sees the other. It names
the export, so a step that runs again, and another run with the same weights, are declined, too.

    <root>/registry/<model>/declined/<digest of the export>.json     of an older kftrain; a promotion by hand removes it
"""

from __future__ import annotations

from collections.abc import Sequence

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import TrackingError
from kftrain.registry.journal import Declined, Entry
from kftrain.run import documents


def find(config: Config, entries: Sequence[Entry], export_digest: str, content: str = "") -> Declined | None:
    """Return the decline of an export, or of one with the same content; None if there is none.

    Raises TrackingError if the document of an older kftrain is damaged.
    """
    # From the newest entry back: a promotion that is met first came later, and lifts the declines before it.
    promoted = set[str]()
    for entry in reversed(entries):
        decline = entry.declined
        if (
            decline
            and not promoted & {decline.export_digest, export_digest}
            and _is_of(decline, export_digest, content)
        ):
            return decline
        promoted |= {entry.export_digest} if entry.kind == "promote" else set()
    return documents.read_if_exists(Declined, _document_uri(config, export_digest), TrackingError)


def _is_of(decline: Declined, export_digest: str, content: str) -> bool:
    # Declines of an older kftrain have no content: an empty one must not equal that of a version without the tag.
    return decline.export_digest == export_digest or "" != decline.content_digest == content


def remove_document(config: Config, export_digest: str) -> None:
    """Remove the document with which an older kftrain declined an export; newer declines are entries and stay."""
    storage.remove(_document_uri(config, export_digest))


def _document_uri(config: Config, export_digest: str) -> str:
    folder = storage.join(config.run.storage_root, "registry", config.model_name, "declined")
    return storage.join(folder, f"{export_digest[:16]}.json")
