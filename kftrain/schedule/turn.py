"""The turn to change a schedule: Kubeflow knows no transactions, so two who apply a schedule take turns.

<root>/schedules/<name>/turns/<n>.json     created exclusively: taken, kept or given back; the highest number counts

Whoever holds a turn says so anew before it is old. One that nothing was heard of for `SILENT_SECONDS`, by the clock of
whoever waits, is over: its process was killed. What this cannot see is a process that is suspended for longer between
its last look and a call to Kubeflow, and then goes on.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.core.records import NumberedRecords, parse_number
from kftrain.errors import LaunchError
from kftrain.run import documents
from kftrain.run.best_effort import best_effort
from kftrain.run.documents import Document
from kftrain.run.heartbeat import Silence
from kftrain.schedule.state import FOLDER

SILENT_SECONDS = 240.0
"""Seconds without a word after which a turn is over; more than KEPT_SECONDS and a call to Kubeflow together."""

KEPT_SECONDS = 60.0
"""Age in seconds from which on a turn is taken anew before the next call."""

MAX_WAIT_SECONDS = 600.0
POLL_SECONDS = 5.0


class TurnTaken(Document):
    """`turns/<n>.json`: somebody changes the schedule, or has ended that."""

    owner: str
    """Random text that no other turn has."""
    host: str
    time: float
    """Seconds since the epoch, for people."""
    given_back: bool = False


@dataclass
class Turn:
    """The turns of a process to change a schedule: taken, kept while they are used, and given back."""

    uri: str
    progress: Progress
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _owner: str = field(default_factory=lambda: uuid.uuid4().hex)
    _number: int = 0
    """Number of the document that this process has written last."""
    _kept_at: float | None = None
    """Time of that on `clock`; None: this process holds no turn."""

    @classmethod
    def of(cls, storage_root: str, name: str, progress: Progress) -> Turn:
        """Build the turns for the schedule of this name; takes none yet."""
        return cls(storage.join(storage_root, FOLDER, name, "turns"), progress)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the turn for a block, so that nobody else changes the schedule. Raises LaunchError as `take` does."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def take(self) -> bool:
        """Wait for the turn; False where somebody else had one since the last. Raises LaunchError where none comes."""
        silence, until = Silence(), self.clock() + MAX_WAIT_SECONDS
        while True:
            start, number = self.clock(), self._records.last_number()
            holder = self._records.read(number) if number else None
            # The holder's clock may differ, so its times are not read: it is silent while the number stays the same.
            silence = silence.advance(str(number).encode(), start, self.clock())
            if holder is None or holder.given_back or silence.seconds >= SILENT_SECONDS:
                before = self._number
                if self._write_document(number + 1):
                    return number == before
            elif self.clock() >= until:
                raise self._build_lost_error(holder)
            else:
                if not silence.seconds:
                    self.progress(f"{holder.host} changes this schedule: waiting for it")
                self.sleep(POLL_SECONDS)

    def keep(self) -> None:
        """Take a turn that grows old anew; call this before each call to Kubeflow. Raises LaunchError if it is lost."""
        if self._kept_at is None or self.clock() - self._kept_at <= KEPT_SECONDS:
            return
        if not self._write_document(self._number + 1):
            self._kept_at = None
            raise self._build_lost_error(self._records.read_last())

    def give_back(self) -> None:
        """Let others have their turn; where that fails they wait for SILENT_SECONDS."""
        if self._kept_at is None:
            return
        with best_effort("the turn to change the schedule could not be given back"):
            older = [name for name in storage.list_names(self.uri) if parse_number(name) < self._number]
            # Removed only after the newer document is there: the highest number counts, and must never go down.
            if self._write_document(self._number + 1, given_back=True):
                for name in older:
                    storage.remove(storage.join(self.uri, name))
        self._kept_at = None

    def _write_document(self, number: int, given_back: bool = False) -> bool:
        """Write the next document; False where somebody was faster, or where others have gone on from this number."""
        start = self.clock()
        taken = TurnTaken(owner=self._owner, host=socket.gethostname(), time=time.time(), given_back=given_back)
        # Others who went on may have removed the document of this number, so that it could be created again.
        if not self._records.append(number, taken) or self._records.last_number() != number:
            return False
        self._number, self._kept_at = number, start
        return True

    @property
    def _records(self) -> NumberedRecords[TurnTaken | None]:
        """The documents of all turns; one that was removed because others went on is read as None."""
        return NumberedRecords(self.uri, lambda uri: documents.read_if_exists(TurnTaken, uri))

    def _build_lost_error(self, holder: TurnTaken | None) -> LaunchError:
        return LaunchError(
            "somebody changes this schedule at the same time",
            where=self.uri,
            value=holder.host if holder else None,
            fix="find out who, and apply it again",
        )
