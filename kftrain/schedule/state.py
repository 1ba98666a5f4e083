"""What became of a schedule: documents below its folder in the storage root, each created exclusively.

<root>/schedules/<name>/firings/<key>.json     the first step of a run      -> later runs: who runs for an instant
<root>/schedules/<name>/outcomes/<key>.json    finish, or gc in its place   -> later runs, `kftrain schedule list`
<root>/schedules/<name>/events/<n>.json        pauses and their ends        -> later runs
<root>/schedules/<name>/watermarks/<n>.json    run/watermark.py             -> the window of later runs
<root>/schedules/<name>/results/<key>.<result>   the index: the outcomes' results as names, so that a listing tells

A key begins with the instant, or with the creation of a run by hand: names are in the order of time. It is the same for
every scheduler: two that fire for one instant, a backlog, and a pod that runs again meet in one document.

Decisions look at all firings, and read those that nobody has ended or that have failed since the last training. Whoever
decides puts into the index what it lacks: the newest outcomes, and those of releases before, which know none.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from kftrain import storage
from kftrain.errors import DataError
from kftrain.progress import Progress, to_log
from kftrain.run import documents
from kftrain.run.documents import Document

Result = Literal["trained", "skipped", "failed", "canceled"]

FOLDER = "schedules"

BACKFILL = "-backfill-"
"""In the key of a run of an earlier window."""


class Firing(Document):
    """`firings/<key>.json`: a run that works for an instant."""

    instant: str
    """When it was due, in RFC 3339."""
    trigger: str
    job_id: str
    """Of the pipeline run, the same in all its steps and their pods; else of the process."""
    run_uri: str
    created: float
    """Seconds since the epoch."""
    workflow: str = ""
    """Of the pipeline run, where it is one."""
    cluster: str = ""
    """Which cluster and namespace the Workflow is in."""


class FiringEnd(Document):
    """`outcomes/<key>.json`: how a firing has ended."""

    result: Result
    line: str
    """In words."""
    job_id: str
    run_uri: str
    time: float
    identity: str = ""
    """Of what was trained: what is equal need not be trained again."""


class ScheduleEvent(Document):
    """`events/<n>.json`: the schedule was paused, or goes on."""

    kind: Literal["paused", "resumed"]
    line: str
    time: float


@dataclass(frozen=True)
class History:
    """A schedule's documents."""

    uri: str

    @classmethod
    def of(cls, storage_root: str, name: str) -> History:
        """Of the schedule of this name."""
        return cls(storage.join(storage_root, FOLDER, name))

    @property
    def name(self) -> str:
        """Of the schedule."""
        return self.uri.rsplit("/", 1)[-1]

    def keys(self, folder: str = "firings") -> list[str]:
        """Of all firings, or of those that have a document in another folder; the newest first."""
        names = storage.list_names(storage.join(self.uri, folder))
        return sorted((name.removesuffix(".json") for name in names), reverse=True)

    def firing(self, key: str) -> Firing:
        """A firing. Raises DataError where it is damaged."""
        return documents.read(Firing, self._place("firings", key))

    def claim(self, key: str, firing: Firing) -> Firing:
        """The firing of a key: this one where nobody was faster, else the other."""
        try:
            storage.create_json(self._place("firings", key), firing.to_dict())
        except FileExistsError:
            return self.firing(key)
        return firing

    def ended(self, key: str) -> FiringEnd | None:
        """How a firing has ended; None: nobody has said so yet."""
        return documents.read_if_exists(FiringEnd, self._place("outcomes", key))

    def end(self, key: str, ended: FiringEnd) -> bool:
        """Says how a firing has ended; False where somebody has said so before."""
        try:
            storage.create_json(self._place("outcomes", key), ended.to_dict())
        except FileExistsError:
            return False
        return True

    def unended(self, progress: Progress = to_log) -> dict[str, Firing]:
        """Firings of which nobody has said how they ended, by key, the newest first; a damaged one is a warning."""
        found, ended = {}, set(self.keys("outcomes"))
        for key in self.keys():
            try:
                if key not in ended:
                    found[key] = self.firing(key)
            except DataError as error:  # a damaged one stops no schedule for ever
                progress(f"warning: {error.line}")
        return found

    def key_of(self, job_id: str) -> str:
        """The key of a pipeline run's firing that has not ended; empty where it has none."""
        return next((key for key, firing in self.unended().items() if firing.job_id == job_id), "")

    def outcomes(self) -> Iterator[FiringEnd]:
        """How all firings have ended, the newest first; without runs of earlier windows that people wanted."""
        for key in self.keys():
            found = None if BACKFILL in key else self.ended(key)
            if found is not None:
                yield found

    def last_trained(self) -> FiringEnd | None:
        """The last firing that has trained."""
        return next((self.ended(key) for key, result in self._results() if result == "trained"), None)

    def failures_in_a_row(self) -> int:
        """Failures since the last training, or since the schedule was told to go on; skipped runs are neither."""
        event = self.last_event()
        since = event.time if event is not None else 0.0
        ends = [self.ended(key) for key, result in self._results() if result == "failed"]
        return sum(found is not None and found.time > since for found in ends)

    def last_event(self) -> ScheduleEvent | None:
        """The last time that it was paused or resumed."""
        number = storage.last_number(storage.join(self.uri, "events"))
        return documents.read(ScheduleEvent, self._place("events", str(number))) if number else None

    def paused(self) -> ScheduleEvent | None:
        """Since when and why it is paused; None: it is not."""
        event = self.last_event()
        return event if event is not None and event.kind == "paused" else None

    def add(self, kind: Literal["paused", "resumed"], line: str, now: float | None = None) -> bool:
        """Pauses it, or lets it go on; False where it is so already."""
        event = self.last_event()
        if (event.kind if event is not None else "resumed") == kind:
            return False
        number = storage.last_number(storage.join(self.uri, "events")) + 1
        said = ScheduleEvent(kind=kind, line=line, time=time.time() if now is None else now)
        try:
            storage.create_json(self._place("events", str(number)), said.to_dict())
        except FileExistsError:  # somebody has said something at the same time: what they said may be the same
            return self.add(kind, line, now)
        return True

    def _results(self) -> Iterator[tuple[str, str]]:
        """Key and result of each firing, the newest first, back to the last that has trained."""
        folder = storage.join(self.uri, "results")
        known = dict(name.split(".") for name in storage.list_names(folder))
        for key in self.keys("outcomes"):
            with contextlib.suppress(DataError):
                if BACKFILL not in key and key not in known:
                    known[key] = documents.read(FiringEnd, self._place("outcomes", key)).result
                    storage.publish(storage.join(folder, f"{key}.{known[key]}"), "")
            if key in known:
                yield key, known[key]
            if known.get(key) == "trained":
                return

    def _place(self, folder: str, key: str) -> str:
        return storage.join(self.uri, folder, f"{key}.json")


def names_below(storage_root: str) -> list[str]:
    """The schedules that a storage root knows."""
    return storage.list_names(storage.join(storage_root, FOLDER))


def key_of(instant: datetime, created: datetime, trigger: str, job_id: str) -> str:
    """What names a firing: of the schedule's own there is one for an instant, of people's any number at any time."""
    at = (instant if trigger == "cron" else created).astimezone(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return at if trigger == "cron" else f"{at}-{trigger}-{re.sub(r'[^a-z0-9]', '', job_id.lower())[:12]}"
