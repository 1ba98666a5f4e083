"""The journal of promotions: which version is champion, in files that are created once and never changed.

    <root>/registry/<model>/promotions/<n>.json     entry n; the last one is the truth
    <root>/registry/<model>/writers/<id>.json       somebody is between an entry and its alias

An entry is created exclusively, so of two promotions that both saw entry n exactly one becomes entry n + 1: a
compare-and-set, which MLflow's aliases lack. A writer's mark says that the alias in MLflow may lag behind the
journal; `champion_alias` says how it is used. The mark of a writer that lives changes all the time: whether one is
dead is seen by watching it, without comparing the clocks of two machines.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from kftrain.core import storage
from kftrain.core.records import NumberedRecords
from kftrain.errors import RetryableError, TrackingError
from kftrain.run import documents
from kftrain.run.documents import GateReason, Interval

BEAT_SECONDS = 5.0
"""Seconds between two changes of a living writer's mark."""

WATCH_SECONDS = 120.0
"""A writer whose mark does not change for this long is dead; one of an older kftrain, which never changes its mark, is
done by then: no call to MLflow takes longer than a minute."""

Kind = Literal["promote", "rollback", "external", "decline"]


class Declined(documents.Document):
    """A person's decision against a version."""

    version: int
    export_digest: str
    reason: str
    time: str
    """Time of the decision in UTC, ISO 8601."""
    entry_id: str
    content_digest: str = ""
    """Digest of the export's files alone, from the version's tag; empty in declines of an older kftrain."""


class Entry(documents.Document):
    """`<n>.json`: a change of champion, or a decline, which leaves the champion as it is."""

    number: int
    kind: Kind
    """`external`: somebody changed the alias in MLflow by hand; `decline`: the champion stays."""
    version: int | None
    """The champion from this entry on; None: there is none any more."""
    previous: int | None
    """The champion until this entry; None: there was none."""
    reason: str
    time: str
    """Time of the change in UTC, ISO 8601."""
    entry_id: str = ""
    """Random: tells an entry of ours from an equal one of another process; empty in old journals."""
    evaluation_digest: str = ""
    improvement: Interval | None = None
    export_digest: str = ""
    """Digest of the version's export, which tells it from another version of the same number; empty in old journals
    and for versions of other programs."""
    reasons: tuple[GateReason, ...] = ()
    """The gate's reasons as data; empty where a person or somebody outside decided."""
    num_tries: int = 0
    """Number of the try against the previous champion that this promotion was; 0: none was counted."""
    confidence: float = 0.0
    """Confidence level of the interval of `improvement`; 0: not known."""
    declined: Declined | None = None
    """The decline that this entry records, if it is one."""


@dataclass(frozen=True)
class Journal:
    """The journal of one registered model: its entries and the marks of its writers."""

    uri: str

    @classmethod
    def of(cls, storage_root: str, model_name: str) -> Journal:
        """Return the journal of a model below a storage root."""
        return cls(storage.join(storage_root, "registry", model_name))

    @property
    def _records(self) -> NumberedRecords[Entry]:
        folder = storage.join(self.uri, "promotions")
        return NumberedRecords(folder, lambda uri: documents.read(Entry, uri, TrackingError))

    def entries(self) -> list[Entry]:
        """Read all entries in order. Raises TrackingError if one is damaged, or missing in between."""
        names = self._records.list_names()
        missing = [name for name in (f"{number}.json" for number in range(1, len(names) + 1)) if name not in names]
        if missing:
            what = "an entry of the promotion journal is missing"
            raise TrackingError(what, where=self._records.uri, value=missing[0], fix="restore it")
        try:
            return [self._records.read(number) for number in range(1, len(names) + 1)]
        except TrackingError as error:
            fix = "restore it, never delete it; or upgrade, if a newer kftrain wrote it"
            raise TrackingError(error.what, where=error.where, value=error.value, fix=fix) from error

    def append(self, entry: Entry) -> bool:
        """Create the file of an entry; return False if another process has created that number."""
        return self._records.append(entry.number, entry)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep a mark of the caller on storage while it writes an entry and the alias.

        The mark is removed when the block ends, which it does only after alias and journal were seen to agree, or if
        nothing was written. An exception leaves the mark: the alias may lag behind the journal.
        """
        name, ended = f"{uuid.uuid4().hex}.json", threading.Event()
        uri = storage.join(self.uri, "writers", name)
        storage.create_json(uri, {"beat": 0})
        heart = threading.Thread(target=_beat, args=(uri, ended), name="kftrain-writer", daemon=True)
        heart.start()
        try:
            yield
        finally:
            ended.set()
            heart.join()  # before the mark is removed: a late beat would write it again
        storage.remove(uri)  # not in `finally`: after an exception the mark must stay, see above

    def writers(self) -> list[str]:
        """List the marks of all processes that are writing, or died while writing."""
        return storage.list_names(storage.join(self.uri, "writers"))

    def dead_writers(self) -> list[str]:
        """Watch the marks that are there for up to `WATCH_SECONDS` and return those that never changed.

        Rounds are counted, not seconds: while a machine is paused, time passes in which neither we look nor a writer
        beside us changes its mark. A mark that appears meanwhile is of a living writer and is not watched.
        """
        silent = self._read_marks(self.writers())
        for _ in range(max(1, round(WATCH_SECONDS / BEAT_SECONDS))):
            if not silent:
                break
            time.sleep(min(BEAT_SECONDS, WATCH_SECONDS))
            now = self._read_marks(list(silent))
            silent = {name: mark for name, mark in silent.items() if now[name] == mark}
        return sorted(silent)

    def remove_writers(self, names: list[str]) -> None:
        """Remove the marks of dead writers; safe only after alias and journal were seen to agree since they died."""
        for name in names:
            storage.remove(storage.join(self.uri, "writers", name))

    def _read_marks(self, names: list[str]) -> dict[str, bytes]:
        """Name -> content; a mark that was removed reads as `gone`, which counts as a change."""
        marks = {}
        for name in names:
            try:
                marks[name] = storage.read_bytes(storage.join(self.uri, "writers", name))
            except FileNotFoundError:
                marks[name] = b"gone"
        return marks


def _beat(uri: str, ended: threading.Event) -> None:
    """Change a mark every `BEAT_SECONDS` until its writer has ended; storage that is away only costs a warning."""
    for beat in itertools.count(1):
        if ended.wait(BEAT_SECONDS):
            return
        try:
            storage.publish_json(uri, {"beat": beat})
        except (OSError, RetryableError) as error:  # the storage is away: the writer itself will see it
            logging.getLogger(__name__).warning("the mark of a promotion was not renewed: %s", error)


def make_next_entry(entries: list[Entry], kind: Kind, version: int | None, reason: str, **fields: Any) -> Entry:
    """Make the entry that follows these, without writing it: number, previous champion, time and id are filled in.

    `fields`: further fields of the entry.
    """
    return Entry(
        number=len(entries) + 1,
        kind=kind,
        version=version,
        previous=find_champion_version(entries),
        reason=reason,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        entry_id=uuid.uuid4().hex,
        **fields,
    )


def find_champion_version(entries: list[Entry]) -> int | None:
    """Return the champion according to the journal, or None."""
    return entries[-1].version if entries else None


def is_champion(entries: list[Entry], version: int, export_digest: str) -> bool:
    """Return True if the version is champion and has the export that the journal names for it."""
    return find_champion_version(entries) == version and find_entered_digest(entries, version) in ("", export_digest)


def find_last_change(entries: list[Entry]) -> Entry:
    """Return the last entry that is no decline: the one that made the present champion."""
    return next(entry for entry in reversed(entries) if entry.kind != "decline")


def find_reason_taken_back(entries: list[Entry], version: int, export_digest: str) -> str:
    """Return the reason for which a version is champion no more, if a rollback or a change by hand ended that.

    Empty if a promotion ended it, or if the version was not champion with this export.
    """
    changes = (
        entry
        for entry in reversed(entries)
        if entry.previous != entry.version and version in (entry.previous, entry.version)
    )
    last = next(changes, None)
    is_same = find_entered_digest(entries, version) in ("", export_digest)
    return last.reason if last and is_same and last.previous == version and last.kind != "promote" else ""


def list_predecessors(entries: list[Entry]) -> list[int]:
    """Return the versions that rollbacks would restore, nearest first.

    A rollback undoes a promotion, so that the next rollback goes further back instead of forward again.
    """
    # Undo history: a change of champion pushes a version, a rollback pops all above the one that it returns to.
    stack: list[int | None] = [None]
    for entry in entries:
        if entry.kind == "rollback" and entry.version in stack:
            del stack[len(stack) - stack[::-1].index(entry.version) :]
        elif entry.version != stack[-1]:
            stack.append(entry.version)
    return [version for version in reversed(stack[:-1]) if version is not None]


def list_former_champions(entries: list[Entry]) -> list[Entry]:
    """Return the last entry of every version that was champion, newest first."""
    last = {entry.version: entry for entry in entries if entry.version is not None}
    return sorted(last.values(), key=lambda entry: -entry.number)


def find_entered_digest(entries: list[Entry], version: int | None) -> str:
    """Return the digest of the export that a version had when it became champion; empty if the journal has none."""
    return next((entry.export_digest for entry in reversed(entries) if entry.version == version), "")
