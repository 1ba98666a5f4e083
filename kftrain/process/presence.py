"""The list of this user's processes on this machine and what they work on, in a folder of small locked files.

A lock ends with its process, however that ends, so a process id that another process has by now is never taken for the
one that was meant.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kftrain.process.machine import make_node_folder


@dataclass(frozen=True)
class WorkingProcess:
    """A process that works on something, as its file describes it."""

    subject: str
    """Thing that it works on, such as the URI of a run's folder."""
    task: str
    process_id: int
    since: float
    """Start of the work, in seconds since the epoch."""

    def is_there(self) -> bool:
        """Tell whether the process still works on that."""
        return _read_file(_make_folder() / f"{self.process_id}.json") == self

    def terminate(self) -> None:
        """Send the process SIGTERM, unless it has gone."""
        if self.is_there():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGTERM)


@contextlib.contextmanager
def show_process(subject: str, task: str) -> Iterator[None]:
    """Let others find this process during the block; where no file can be written, they do not, and that is all."""
    path = _make_folder() / f"{os.getpid()}.json"
    try:
        stream = path.with_suffix(".new").open("w")
    except OSError:
        yield
        return
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        json.dump(asdict(WorkingProcess(subject, task, os.getpid(), time.time())), stream)
        stream.flush()
        os.replace(stream.name, path)  # only now: who finds it without a lock takes it for one that was left behind
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def find_processes(subject: str = "") -> list[WorkingProcess]:
    """Find the processes that work on a subject, or on anything, in the order in which they began."""
    processes = [process for path in _make_folder().glob("*.json") if (process := _read_file(path)) is not None]
    return sorted(
        (process for process in processes if subject in ("", process.subject)), key=lambda process: process.since
    )


def _read_file(path: Path) -> WorkingProcess | None:
    """Read a process's file; where the lock can be had, the process has gone: remove the file and return None."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        with path.open() as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return WorkingProcess(**json.load(stream))
        path.unlink()
    return None


def _make_folder() -> Path:
    """Return this user's own folder on this machine, or one in which nothing can be."""
    return make_node_folder("", "") or Path(os.devnull)
