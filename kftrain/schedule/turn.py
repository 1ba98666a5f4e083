"""Whose turn it is to change a schedule: Kubeflow knows no transactions, so two who apply it take turns.

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

from kftrain import storage
from kftrain.errors import LaunchError
from kftrain.progress import Progress
from kftrain.run import documents
from kftrain.run.best_effort import best_effort
from kftrain.run.documents import Document
from kftrain.run.heartbeat import Silence
from kftrain.schedule.state import FOLDER

SILENT_SECONDS = 240.0
"""After so long without a word a turn is over. Longer than KEPT_SECONDS and a call to Kubeflow together."""

KEPT_SECONDS = 60.0
"""A turn that is older is taken anew before the next call."""

MAX_WAIT_SECONDS = 600.0
POLL_SECONDS = 5.0


class TurnTaken(Document):
    """`turns/<n>.json`: somebody changes the schedule, or has ended that."""

    owner: str
    """Of this turn alone."""
    host: str
    time: float
    """Seconds since the epoch, for people."""
    given_back: bool = False


@dataclass
class Turn:
    """A turn to change a schedule."""

    uri: str
    progress: Progress
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _owner: str = field(default_factory=lambda: uuid.uuid4().hex)
    _number: int = 0
    """Of the document that this process has written last."""
    _kept_at: float | None = None
    """When that was; None: it holds no turn."""

    @classmethod
    def of(cls, storage_root: str, name: str, progress: Progress) -> Turn:
        """For the schedule of this name."""
        return cls(storage.join(storage_root, FOLDER, name, "turns"), progress)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within the block nobody else changes the schedule. Raises LaunchError where somebody does all the time."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def take(self) -> bool:
        """Waits for the turn; False where somebody else had one since the last. Raises LaunchError."""
        silence, until = Silence(), self.clock() + MAX_WAIT_SECONDS
        while True:
            start, number = self.clock(), storage.last_number(self.uri)
            found = self._read(number)
            silence = silence.after(str(number).encode(), start, self.clock())
            if found is None or found.given_back or silence.seconds >= SILENT_SECONDS:
                before = self._number
                if self._put(number + 1):
                    return number == before
            elif self.clock() >= until:
                raise self._lost(found)
            else:
                if not silence.seconds:
                    self.progress(f"{found.host} changes this schedule: waiting for it")
                self.sleep(POLL_SECONDS)

    def keep(self) -> None:
        """Before each call: nothing, or a turn that grows old is taken anew. Raises LaunchError where it is lost."""
        if self._kept_at is None or self.clock() - self._kept_at <= KEPT_SECONDS:
            return
        if not self._put(self._number + 1):
            self._kept_at = None
            raise self._lost(self._read(storage.last_number(self.uri)))

    def give_back(self) -> None:
        """Lets others have their turn; where that fails they wait until nothing was heard for long."""
        if self._kept_at is None:
            return
        with best_effort("the turn to change the schedule could not be given back"):
            older = [name for name in storage.list_names(self.uri) if storage.number_of(name) < self._number]
            if self._put(self._number + 1, given_back=True):
                for name in older:
                    storage.remove(storage.join(self.uri, name))
        self._kept_at = None

    def _put(self, number: int, given_back: bool = False) -> bool:
        """Writes the next document; False where somebody was faster, which a listing shows that others went on from."""
        start = self.clock()
        taken = TurnTaken(owner=self._owner, host=socket.gethostname(), time=time.time(), given_back=given_back)
        try:
            storage.create_json(self._document(number), taken.to_dict())
        except FileExistsError:
            return False
        if storage.last_number(self.uri) != number:
            return False
        self._number, self._kept_at = number, start
        return True

    def _read(self, number: int) -> TurnTaken | None:
        """None where there is none, or it was removed because others went on."""
        return documents.read_if_exists(TurnTaken, self._document(number)) if number else None

    def _document(self, number: int) -> str:
        return storage.join(self.uri, f"{number}.json")

    def _lost(self, found: TurnTaken | None) -> LaunchError:
        return LaunchError(
            "somebody changes this schedule at the same time",
            where=self.uri,
            value=found.host if found else None,
            fix="find out who, and apply it again",
        )
