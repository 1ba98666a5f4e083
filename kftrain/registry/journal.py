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
from typing import Literal

from kftrain import storage
from kftrain.errors import RetryableError, TrackingError
from kftrain.run import documents
from kftrain.run.documents import GateReason, Interval

BEAT_SECONDS = 5.0
"""How often a writer changes its mark."""

WATCH_SECONDS = 120.0
"""A writer whose mark does not change for this long is dead; one of an older kftrain, which never changes its mark, is
done by then: no call to MLflow takes longer than a minute."""

Kind = Literal["promote", "rollback", "external", "decline"]


class Declined(documents.Document):
    """That a person has declined a version."""

    version: int
    export_digest: str
    reason: str
    time: str
    """UTC, ISO 8601."""
    entry_id: str
    content_digest: str = ""
    """Of the export's files, as the version's tag has it; declines of before do not say."""


class Entry(documents.Document):
    """`<n>.json`: a change of champion."""

    number: int
    kind: Kind
    """`external`: somebody changed the alias in MLflow by hand; `decline`: the champion stays."""
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
    export_digest: str = ""
    """Of the version, to tell it from another one of this number; empty in old journals and for foreign versions."""
    reasons: tuple[GateReason, ...] = ()
    """Why, as data, where the gate decided it."""
    num_tries: int = 0
    """Which try against the champion before it was; 0: none was counted."""
    confidence: float = 0.0
    """Of the interval of `improvement`; 0: not known."""
    declined: Declined | None = None
    """What a person has declined with this entry."""


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
            what = "an entry of the promotion journal is missing"
            raise TrackingError(what, where=folder, value=lost, fix="restore it")
        try:
            return [documents.read(Entry, storage.join(folder, name), TrackingError) for name in expected]
        except TrackingError as error:
            fix = "restore it, never delete it; or upgrade, if a newer kftrain wrote it"
            raise TrackingError(error.what, where=error.where, value=error.value, fix=fix) from error

    def append(self, entry: Entry) -> None:
        """Adds an entry. Raises FileExistsError if somebody was faster."""
        storage.create_json(storage.join(self.uri, "promotions", f"{entry.number}.json"), entry.to_dict())

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Marks that the caller is writing an entry and the alias.

        The mark goes when the block ends, that is when alias and journal were seen to agree or nothing was written. An
        exception leaves it: the alias may lag behind.
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
            heart.join()
        storage.remove(uri)

    def writers(self) -> list[str]:
        """Marks of everybody who is writing, or died writing."""
        return storage.list_names(storage.join(self.uri, "writers"))

    def dead_writers(self) -> list[str]:
        """Marks that do not change: watches those that are there for up to `WATCH_SECONDS`, if there are any.

        So many looks, not so much time: who writes on a machine that pauses does not beat either.
        """
        first = self._marks(self.writers())
        for _ in range(max(1, round(WATCH_SECONDS / BEAT_SECONDS))):
            if not first:
                break
            time.sleep(min(BEAT_SECONDS, WATCH_SECONDS))
            now = self._marks(list(first))
            first = {name: mark for name, mark in first.items() if now[name] == mark}
        return sorted(first)

    def remove_writers(self, names: list[str]) -> None:
        """Takes marks of the dead away: call only when alias and journal were seen to agree after their death."""
        for name in names:
            storage.remove(storage.join(self.uri, "writers", name))

    def _marks(self, names: list[str]) -> dict[str, bytes]:
        """Name -> content; one that went meanwhile has a content of its own."""
        found = {}
        for name in names:
            try:
                found[name] = storage.read_bytes(storage.join(self.uri, "writers", name))
            except FileNotFoundError:
                found[name] = b"gone"
        return found


def _beat(uri: str, ended: threading.Event) -> None:
    """Changes a mark until its writer has ended."""
    for beat in itertools.count(1):
        if ended.wait(BEAT_SECONDS):
            return
        try:
            storage.publish_json(uri, {"beat": beat})
        except (OSError, RetryableError) as error:  # the storage is away: the writer itself will see it
            logging.getLogger(__name__).warning("the mark of a promotion was not renewed: %s", error)


def next_entry(
    entries: list[Entry],
    kind: Kind,
    version: int | None,
    reason: str,
    evaluation_digest: str = "",
    improvement: Interval | None = None,
    export_digest: str = "",
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
        export_digest=export_digest,
    )


def champion_version(entries: list[Entry]) -> int | None:
    """The champion according to the journal."""
    return entries[-1].version if entries else None


def is_champion(entries: list[Entry], version: int, export_digest: str) -> bool:
    """Whether a version is champion, and not another one of its number."""
    return champion_version(entries) == version and entered_digest(entries, version) in ("", export_digest)


def last_change(entries: list[Entry]) -> Entry:
    """The entry that made the champion of the moment; of several, by hand, the last."""
    return next(entry for entry in reversed(entries) if entry.kind != "decline")


def taken_back(entries: list[Entry], version: int, export_digest: str) -> str:
    """Why a version is champion no more, where a person has taken that back; else empty."""
    ends = (
        each for each in reversed(entries) if each.previous != each.version and version in (each.previous, each.version)
    )
    last = next(ends, None)
    is_same = entered_digest(entries, version) in ("", export_digest)
    return last.reason if last and is_same and last.previous == version and last.kind != "promote" else ""


def predecessors(entries: list[Entry]) -> list[int]:
    """What rollbacks would restore, nearest first; a rollback undoes a promotion, the next one goes further back."""
    stack: list[int | None] = [None]
    for entry in entries:
        if entry.kind == "rollback" and entry.version in stack:
            del stack[len(stack) - stack[::-1].index(entry.version) :]
        elif entry.version != stack[-1]:
            stack.append(entry.version)
    return [version for version in reversed(stack[:-1]) if version is not None]


def former_champions(entries: list[Entry]) -> list[Entry]:
    """The last entry of every version that was champion, newest first."""
    last = {entry.version: entry for entry in entries if entry.version is not None}
    return sorted(last.values(), key=lambda entry: -entry.number)


def entered_digest(entries: list[Entry], version: int | None) -> str:
    """Digest of the export that a version had when it became champion; empty where the journal does not say."""
    return next((entry.export_digest for entry in reversed(entries) if entry.version == version), "")
