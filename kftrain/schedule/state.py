"""The history of a schedule: documents below its folder in the storage root, each created exclusively.

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

from kftrain.core import storage
from kftrain.core.progress import Progress, to_log
from kftrain.core.records import NumberedRecords
from kftrain.errors import DataError
from kftrain.run import documents
from kftrain.run.documents import Document

Result = Literal["trained", "skipped", "failed", "canceled"]

FOLDER = "schedules"

BACKFILL = "-backfill-"
"""Text in the key of every run of an earlier window, and in no other key."""


class Firing(Document):
    """`firings/<key>.json`: a run that works for an instant."""

    instant: str
    """Time at which it was due, in RFC 3339."""
    trigger: str
    job_id: str
    """Id of the pipeline run, the same in all its steps and their pods; without one, of the process."""
    run_uri: str
    created: float
    """Time of creation, in seconds since the epoch."""
    workflow: str = ""
    """Name of the pipeline run's Workflow; empty where the run is no pipeline run."""
    cluster: str = ""
    """Cluster and namespace that the Workflow is in."""


class FiringEnd(Document):
    """`outcomes/<key>.json`: the result of a firing that has ended."""

    result: Result
    line: str
    """The result in words, on one line."""
    job_id: str
    run_uri: str
    time: float
    identity: str = ""
    """Identity of what was trained: a later run with an equal one need not train again."""


class ScheduleEvent(Document):
    """`events/<n>.json`: the schedule was paused, or goes on."""

    kind: Literal["paused", "resumed"]
    line: str
    time: float


@dataclass(frozen=True)
class History:
    """The documents of one schedule; reads and creates them, and changes none."""

    uri: str

    @classmethod
    def of(cls, storage_root: str, name: str) -> History:
        """Build the history of the schedule of this name; creates nothing."""
        return cls(storage.join(storage_root, FOLDER, name))

    @property
    def name(self) -> str:
        """Name of the schedule, the last part of the URI."""
        return self.uri.rsplit("/", 1)[-1]

    def list_keys(self, folder: str = "firings") -> list[str]:
        """List the keys of all firings, or of those that have a document in another folder; the newest first."""
        names = storage.list_names(storage.join(self.uri, folder))
        return sorted((name.removesuffix(".json") for name in names), reverse=True)

    def read_firing(self, key: str) -> Firing:
        """Read a firing. Raises DataError where it is missing or damaged."""
        return documents.read(Firing, self._build_uri("firings", key))

    def claim(self, key: str, firing: Firing) -> Firing:
        """Claim a key for a firing; return the firing that has it: this one, or that of somebody who was faster."""
        try:
            storage.create_json(self._build_uri("firings", key), firing.to_dict())
        except FileExistsError:
            return self.read_firing(key)
        return firing

    def read_end(self, key: str) -> FiringEnd | None:
        """Read how a firing has ended; None where nobody has said so yet."""
        return documents.read_if_exists(FiringEnd, self._build_uri("outcomes", key))

    def write_end(self, key: str, ended: FiringEnd) -> bool:
        """Write how a firing has ended; False where somebody has said so before."""
        try:
            storage.create_json(self._build_uri("outcomes", key), ended.to_dict())
        except FileExistsError:
            return False
        return True

    def read_unended(self, progress: Progress = to_log) -> dict[str, Firing]:
        """Read the firings of which nobody has said how they ended, by key, the newest first; warn of damaged ones."""
        firings, ended = {}, set(self.list_keys("outcomes"))
        for key in self.list_keys():
            try:
                if key not in ended:
                    firings[key] = self.read_firing(key)
            except DataError as error:  # a damaged one stops no schedule for ever
                progress(f"warning: {error.line}")
        return firings

    def find_key(self, job_id: str) -> str:
        """Find the key of a pipeline run's firing that has not ended; empty where it has none."""
        return next((key for key, firing in self.read_unended().items() if firing.job_id == job_id), "")

    def iterate_ends(self) -> Iterator[FiringEnd]:
        """Yield the ends of all firings, the newest first, without runs of earlier windows that people wanted."""
        for key in self.list_keys():
            end = None if BACKFILL in key else self.read_end(key)
            if end is not None:
                yield end

    def read_last_trained(self) -> FiringEnd | None:
        """Read the end of the last firing that has trained; None where none has."""
        return next((self.read_end(key) for key, result in self._iterate_results() if result == "trained"), None)

    def count_failures_in_a_row(self) -> int:
        """Count failures since the last training, or since the schedule was told to go on; skipped runs are neither."""
        event = self.read_last_event()
        since = event.time if event is not None else 0.0
        ends = [self.read_end(key) for key, result in self._iterate_results() if result == "failed"]
        return sum(end is not None and end.time > since for end in ends)

    def read_last_event(self) -> ScheduleEvent | None:
        """Read the last pause or resumption; None where there was none."""
        return self._events.read_last()

    def read_pause(self) -> ScheduleEvent | None:
        """Return the pause that holds now; None where the schedule is not paused."""
        event = self.read_last_event()
        return event if event is not None and event.kind == "paused" else None

    def add_event(self, kind: Literal["paused", "resumed"], line: str, now: float | None = None) -> bool:
        """Pause the schedule, or let it go on; False where it is so already."""
        event = self.read_last_event()
        if (event.kind if event is not None else "resumed") == kind:
            return False
        new_event = ScheduleEvent(kind=kind, line=line, time=time.time() if now is None else now)
        # Where somebody was faster they may have written the same, or the opposite.
        return self._events.append(self._events.last_number() + 1, new_event) or self.add_event(kind, line, now)

    def _iterate_results(self) -> Iterator[tuple[str, str]]:
        """Yield key and result of the ended firings, the newest first, back to the last that has trained."""
        # The index is only names, so one listing replaces a read per outcome. It is no truth of its own: an entry that
        # is missing, as its writer died or was of a release before, is written here from the outcome.
        folder = storage.join(self.uri, "results")
        known = dict(name.split(".") for name in storage.list_names(folder))
        for key in self.list_keys("outcomes"):
            with contextlib.suppress(DataError):
                if BACKFILL not in key and key not in known:
                    known[key] = documents.read(FiringEnd, self._build_uri("outcomes", key)).result
                    storage.publish(storage.join(folder, f"{key}.{known[key]}"), "")
            if key in known:
                yield key, known[key]
            if known.get(key) == "trained":
                return

    @property
    def _events(self) -> NumberedRecords[ScheduleEvent]:
        return NumberedRecords(storage.join(self.uri, "events"), lambda uri: documents.read(ScheduleEvent, uri))

    def _build_uri(self, folder: str, key: str) -> str:
        return storage.join(self.uri, folder, f"{key}.json")


def list_schedules(storage_root: str) -> list[str]:
    """List the names of the schedules that a storage root knows."""
    return storage.list_names(storage.join(storage_root, FOLDER))


def build_key(instant: datetime, created: datetime, trigger: str, job_id: str) -> str:
    """Build the key of a firing: one for an instant by the schedule itself, any number at any time by people."""
    at = (instant if trigger == "cron" else created).astimezone(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return at if trigger == "cron" else f"{at}-{trigger}-{re.sub(r'[^a-z0-9]', '', job_id.lower())[:12]}"
