"""The beats of a training process, by which its supervisor sees that it lives and whether it makes progress.

A thread beside the training writes once a second how many collective operations the training has begun and ended:
torch's flight recorder counts them, on gloo as on NCCL. The supervisor reads the numbers from a file of a few bytes. So
it tells a process that is stopped, or that holds the GIL for ever, from one that waits for another.

Nothing here imports torch before the process has joined its group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

LIVENESS_ENV = "KFTRAIN_LIVENESS_FOLDER"
"""Variable with the folder of the files, each called by its process's local rank."""

BEAT_SECONDS = 1.0

MARGIN_SECONDS = 15.0
"""Seconds by which collective operations time out later than the supervisor, which is to name the cause first."""

STACK_SIGNAL = signal.SIGUSR1
"""Makes a process write the stacks of all its threads into its log, also while it holds the GIL."""

RECORDERS = {"": "_dump_fr_trace_json", "nccl ": "_dump_nccl_trace_json"}
"""Prefix of a backend's keys here -> torch's function that dumps its recorder; the second is there on GPUs only."""

Statuses = dict[str, tuple[int, int]]
"""Key of a group -> numbers of the last operations that have begun and ended."""

_OPERATION_BYTES = 32
_FORMAT = struct.Struct(f"<dddqq??6x{_OPERATION_BYTES}s")
_RECORDED = re.compile(rb'"process_group":\["(\d+)",[^]]*\],"profiling_name":"\w+:(\w+)"')
"""Pattern of an operation in torch's dump: the key of its group, and its name after the backend's."""


@dataclass(frozen=True)
class Beat:
    """The state of one process. Times are seconds on the machine's monotonic clock."""

    alive_at: float = 0.0
    """Time at which this beat was written."""
    progress_at: float = 0.0
    """Time of the last progress: a collective operation began or ended, or a rest did."""
    watched_at: float = 0.0
    """Time at which `watched` last changed, or the process last said that it goes on; 0: never watched so far."""
    num_collectives: int = 0
    """Operations that the training thread has begun so far; equal on all processes that are at the same place."""
    num_ended: int = 0
    """Operations that have ended; not reliable to the last one, as gloo's may end in another order than they began."""
    counted: bool = False
    """True where torch counts operations at all."""
    watched: bool = False
    """True while the process must make progress: neither before the first step or after the last, nor in a rest."""
    operation: str = ""
    """The collective operation that was begun last; named only once the process stands still."""

    def pack(self) -> bytes:
        """Return the beat as the bytes of the file."""
        *numbers, operation = astuple(self)
        return _FORMAT.pack(*numbers, operation.encode()[:_OPERATION_BYTES])

    @classmethod
    def unpack(cls, content: bytes) -> Beat:
        """Read the bytes of the file, the inverse of `pack`. Raises struct.error for another length."""
        alive_at, progress_at, watched_at, begun, ended, counted, watched, name = _FORMAT.unpack(content)
        operation = name.rstrip(b"\0").decode(errors="replace")
        return cls(alive_at, progress_at, watched_at, begun, ended, counted, watched, operation)


SIZE_BYTES = _FORMAT.size


class Liveness:
    """The beats of this process; without a supervisor that wants them, nothing is written."""

    def __init__(
        self, in_background: Callable[[], object], timeout_seconds: float, counts_always: bool = False
    ) -> None:
        """Start the thread that writes. Collective.

        Args:
            in_background: An operation in the group of the checkpoint thread, whose operations do not count.
            timeout_seconds: How long a process may wait for another one. Half of it is long enough to ask torch where
                this one stands, which takes a moment.
            counts_always: Whether the process must make progress also while it has no process group.
        """
        folder = os.environ.get(LIVENESS_ENV)
        before = _read_statuses()
        in_background()
        # Only what has begun counts: another group's operation may be noted as ended just now, on one process alone.
        self._background = frozenset(
            key for key, (begun, _) in _read_statuses().items() if begun != before.get(key, (-1, -1))[0]
        )
        self._watched = False
        self._watched_at = 0.0
        self._last = Beat()
        self._still_seconds = timeout_seconds / 2
        self._counts_always = counts_always
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._map: mmap.mmap | None = None
        if folder:
            faulthandler.register(STACK_SIGNAL, all_threads=True)
            self._map = _map_file(Path(folder) / os.environ["LOCAL_RANK"])
            threading.Thread(target=self._run, daemon=True, name="liveness").start()

    def mark_watched(self) -> contextlib.AbstractContextManager[None]:
        """Mark a block in which the process has to make progress."""
        return self._set_within(True)

    def mark_resting(self) -> contextlib.AbstractContextManager[None]:
        """Mark a part of a `watched` block that may take as long as it takes."""
        return self._set_within(False)

    def note_progress(self) -> None:
        """Say that the process has made progress, where no collective operation shows it."""
        with self._lock:
            self._watched_at = time.monotonic()

    def close(self) -> None:
        """End the thread that writes; the last beat stays in the file."""
        self._closed.set()

    @contextlib.contextmanager
    def _set_within(self, watched: bool) -> Iterator[None]:
        self._set(watched)
        try:
            yield
        finally:
            self._set(not watched)

    def _set(self, watched: bool) -> None:
        with self._lock:
            self._watched = watched
            self._watched_at = time.monotonic()
        # Written at once: the supervisor must know of a rest before it begins. `_write` takes the lock itself.
        self._write()

    def _run(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self._write()

    def _write(self) -> None:
        if self._map is None:
            return
        with self._lock:
            now = compute_beat(self._last, _read_statuses(), self._background, self._watched, self._watched_at)
            now = replace(now, counted=now.counted or self._counts_always)
            if now.watched and now.alive_at - now.progress_at >= self._still_seconds:
                # Asked once per stand, as this takes torch a moment; a new beat has no name, so `_last` keeps it.
                now = replace(now, operation=self._last.operation or find_last_operation(self._background))
            self._last = now
            self._map[:SIZE_BYTES] = now.pack()


def compute_beat(last: Beat, statuses: Statuses, background: Collection[str], watched: bool, watched_at: float) -> Beat:
    """Compute the beat to write after `last`; groups whose keys are in `background` do not count."""
    now = time.monotonic()
    counts = [numbers for key, numbers in statuses.items() if key not in background]
    begun, ended = (sum(max(0, numbers[place]) for numbers in counts) for place in (0, 1))
    moved = (begun, ended) != (last.num_collectives, last.num_ended) or watched_at > last.watched_at
    return Beat(
        alive_at=now,
        progress_at=now if moved else last.progress_at,
        watched_at=watched_at,
        num_collectives=begun,
        num_ended=ended,
        counted=bool(counts),
        watched=watched,
    )


def find_last_operation(background: Collection[str]) -> str:
    """Find the name of the collective operation that was begun last, in groups other than these; empty if unknown."""
    from torch._C import _distributed_c10d

    for prefix, name in reversed(RECORDERS.items()):
        dump = getattr(_distributed_c10d, name, None)
        recorded = _RECORDED.findall(dump(True)) if dump else []
        names: list[str] = [
            operation.decode() for key, operation in recorded if f"{prefix}{key.decode()}" not in background
        ]
        if names:
            return names[-1]
    return ""


def read_beat(path: Path) -> Beat:
    """Read the beat of a process; for one that has not begun, a beat that is not watched."""
    try:
        return Beat.unpack(path.read_bytes())
    except (FileNotFoundError, struct.error):
        return Beat()


def _map_file(path: Path) -> mmap.mmap:
    with path.open("w+b") as file:
        file.write(Beat().pack())
        file.flush()
        return mmap.mmap(file.fileno(), SIZE_BYTES)


def _read_statuses() -> Statuses:
    """Read the numbers of the last operations that each group has begun and ended.

    torch's dumps are no public interface: a form that is not understood is not counted.
    """
    from torch._C import _distributed_c10d

    statuses = {}
    for prefix, name in RECORDERS.items():
        dump = getattr(_distributed_c10d, name, None)
        if dump is None:
            continue
        with contextlib.suppress(TypeError, ValueError, KeyError):
            for key, status in json.loads(dump(False))["pg_status"].items():
                numbers = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
                statuses[f"{prefix}{key}"] = numbers
    return statuses
