"""The journal of promotions: which version is champion, in files that are created once and never changed.

    <root>/registry/<model>/promotions/<n>.json     entry n; the last one is the truth
    <root>/registry/<model>/writers/<id>.json       somebody is between an entry and its alias

An entry is created exclusively, so of two promotions that both saw entry n exactly one becomes entry n + 1: a
compare-and-set, which MLflow's aliases lack. A writer's mark says that the alias in MLflow may lag behind the
journal; `promotion` says how it is used.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from kftrain import contracts, storage
from kftrain.contracts import Interval
from kftrain.errors import TrackingError

STALE_WRITER_SECONDS = 900.0
"""A writer that is this old is dead: no call to MLflow takes longer than a minute."""

Kind = Literal["promote", "rollback", "external"]


class Entry(contracts.Document):
    """`<n>.json`: a change of champion."""

    number: int
    kind: Kind
    """`external`: somebody changed the alias in MLflow by hand."""
    version: int | None
    """The champion from here on; None: there is none any more."""
    previous: int | None
    """The champion up to here."""
    reason: str
    time: str
    """UTC, ISO 8601."""
    entry_id: str = ""
    """Random: tells an entry of ours from an equal one of another process; empty in old journals."""
    evaluation_digest: str = ""
    improvement: Interval | None = None


@dataclass(frozen=True)
class Journal:
    """The journal of one model."""

    uri: str

    @classmethod
    def of(cls, storage_root: str, model_name: str) -> Journal:
        """The journal of a model below a storage root."""
        return cls(storage.join(storage_root, "registry", model_name))

    def entries(self) -> list[Entry]:
        """All entries in order. Raises TrackingError if one is damaged or missing in between."""
        folder = storage.join(self.uri, "promotions")
        names = {name for name in storage.list_names(folder) if name.endswith(".json")}
        expected = [f"{number}.json" for number in range(1, len(names) + 1)]
        if names != set(expected):
            lost = next(name for name in expected if name not in names)
            raise TrackingError(
                "an entry of the promotion journal is missing", where=folder, value=lost, fix="restore it"
            )
        return [contracts.read(Entry, storage.join(folder, name), TrackingError) for name in expected]

    def append(self, entry: Entry) -> None:
        """Adds an entry. Raises FileExistsError if somebody was faster."""
        storage.create_json(storage.join(self.uri, "promotions", f"{entry.number}.json"), entry.to_dict())

    def begin_writing(self) -> str:
        """Marks that the caller is about to write an entry and the alias. Returns the mark's name."""
        name = f"{uuid.uuid4().hex}.json"
        storage.create_json(storage.join(self.uri, "writers", name), {"time": time.time()})
        return name

    def end_writing(self, name: str) -> None:
        """Takes the mark away: call only when alias and journal were seen to agree, or nothing was written."""
        storage.remove(storage.join(self.uri, "writers", name))

    def writers(self) -> list[str]:
        """Marks of everybody who is writing, or died writing."""
        return storage.list_names(storage.join(self.uri, "writers"))

    def remove_stale_writers(self) -> None:
        """Takes the marks of the dead away: call only when alias and journal were seen to agree."""
        for name in self.writers():
            mark = storage.read_json_if_exists(storage.join(self.uri, "writers", name))
            if mark and time.time() - mark["time"] > STALE_WRITER_SECONDS:
                self.end_writing(name)


def next_entry(
    entries: list[Entry],
    kind: Kind,
    version: int | None,
    reason: str,
    evaluation_digest: str = "",
    improvement: Interval | None = None,
) -> Entry:
    """The entry that would follow."""
    return Entry(
        number=len(entries) + 1,
        kind=kind,
        version=version,
        previous=champion_version(entries),
        reason=reason,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        entry_id=uuid.uuid4().hex,
        evaluation_digest=evaluation_digest,
        improvement=improvement,
    )


def champion_version(entries: list[Entry]) -> int | None:
    """The champion according to the journal."""
    return entries[-1].version if entries else None


def predecessors(entries: list[Entry]) -> list[int]:
    """What rollbacks would restore, nearest first; a rollback undoes a promotion, the next one goes further back."""
    stack: list[int | None] = [None]
    for entry in entries:
        if entry.kind == "rollback" and entry.version in stack:
            del stack[len(stack) - stack[::-1].index(entry.version) :]
        else:
            stack.append(entry.version)
    return [version for version in reversed(stack[:-1]) if version is not None]
