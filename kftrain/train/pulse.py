"""What a training process says of itself to its supervisor, from outside of the training thread.

A thread writes once a second how many collective operations the process has begun, and whether it waits in one: torch's
flight recorder counts them, on gloo as on NCCL. That is written into a file of a few bytes which the supervisor maps
too, so a process that is stopped, or that holds the GIL for ever, is told from one that waits for another.

Nothing here imports torch before the process has joined its group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

PULSE_ENV = "KFTRAIN_PULSE_FOLDER"
"""Folder of the files, each called by its process's local rank."""

BEAT_SECONDS = 1.0

MARGIN_SECONDS = 15.0
"""How much later collective operations time out by themselves: the supervisor is to be first, and names the cause."""

STACK_SIGNAL = signal.SIGUSR1
"""Makes a process write the stacks of all its threads into its log, also while it holds the GIL."""

RECORDERS = {"": "_dump_fr_trace_json", "nccl ": "_dump_nccl_trace_json"}
"""How torch tells of the groups of its backends: prefix of their names here -> function; the second on GPUs only."""

_FORMAT = struct.Struct("<dddq???x")


@dataclass(frozen=True)
class Beat:
    """The state of one process. Times are seconds on the machine's monotonic clock."""

    alive_at: float = 0.0
    """When this was written."""
    progress_at: float = 0.0
    """When it last began a collective operation, or was first watched."""
    watched_at: float = 0.0
    """Since when it has been watched, without a rest."""
    num_collectives: int = 0
    """Begun by the training thread so far; the same on all processes that are at the same place."""
    waits: bool = False
    """Whether one of them has not ended."""
    counted: bool = False
    """Whether torch counts them at all."""
    watched: bool = False
    """False before the first step, while a checkpoint is waited for, and after the last step."""

    def pack(self) -> bytes:
        """As it lies in the file."""
        return _FORMAT.pack(*astuple(self))

    @classmethod
    def unpack(cls, content: bytes) -> Beat:
        """The inverse of `pack`."""
        return cls(*_FORMAT.unpack(content))


SIZE_BYTES = _FORMAT.size


class Pulse:
    """Of this process; without a supervisor that wants it, it does nothing."""

    def __init__(self, background: str = "") -> None:
        """`background`: name of the group whose operations do not count."""
        folder = os.environ.get(PULSE_ENV)
        self._background = background
        self._watched, self._watched_at = False, 0.0
        self._last = Beat()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._map: mmap.mmap | None = None
        if folder:
            faulthandler.register(STACK_SIGNAL, all_threads=True)
            self._map = _map_file(Path(folder) / os.environ["LOCAL_RANK"])
            threading.Thread(target=self._run, daemon=True, name="pulse").start()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block the process has to make progress."""
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """A part of a `watched` block that may take as long as it takes."""
        self._set(False)
        try:
            yield
        finally:
            self._set(True)

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _set(self, watched: bool) -> None:
        with self._lock:
            self._watched, self._watched_at = watched, time.monotonic()
        self._write()

    def _run(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self._write()

    def _write(self) -> None:
        if self._map is None:
            return
        with self._lock:
            self._last = beat(self._last, _statuses(), self._background, self._watched, self._watched_at)
            self._map[:SIZE_BYTES] = self._last.pack()


def beat(last: Beat, statuses: dict[str, Any], background: str, watched: bool, watched_at: float) -> Beat:
    """What to write after `last`; `statuses` are those of the flight recorder, by name of the group."""
    now = time.monotonic()
    counts = [
        (int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))
        for name, status in statuses.items()
        if name != background
    ]
    begun = sum(enqueued for enqueued, _ in counts if enqueued > 0)
    moved = begun != last.num_collectives or watched_at > last.watched_at
    return Beat(
        alive_at=now,
        progress_at=now if moved else last.progress_at,
        watched_at=watched_at,
        num_collectives=begun,
        waits=any(enqueued > completed for enqueued, completed in counts),
        counted=bool(counts),
        watched=watched,
    )


def read(path: Path) -> Beat:
    """The beat of a process; of one that has not begun, one that is not watched."""
    try:
        return Beat.unpack(path.read_bytes())
    except (FileNotFoundError, struct.error):
        return Beat()


def _map_file(path: Path) -> mmap.mmap:
    with path.open("w+b") as file:
        file.write(Beat().pack())
        file.flush()
        return mmap.mmap(file.fileno(), SIZE_BYTES)


def _statuses() -> dict[str, Any]:
    from torch._C import _distributed_c10d

    found: dict[str, Any] = {}
    for prefix, name in RECORDERS.items():
        dump = getattr(_distributed_c10d, name, None)  # not public: where it is missing, nothing is counted
        if dump is not None:
            statuses = json.loads(dump(False)).get("pg_status", {})
            found |= {f"{prefix}{group}": status for group, status in statuses.items()}
    return found
