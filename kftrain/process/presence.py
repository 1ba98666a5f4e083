"""Which processes of this user and machine work on something: shown in a folder of small files that are locked.

A lock ends with its process, however that ends, so a number that was given to another process by now is never taken
for the one that was meant.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Present:
    """A process that works on something."""

    subject: str
    """What it works on, such as the URI of a run's folder."""
    task: str
    process_id: int
    since: float
    """Seconds since the epoch."""

    def is_there(self) -> bool:
        """Whether it still works on that."""
        return _read(_folder() / f"{self.process_id}.json") == self

    def terminate(self) -> None:
        """Sends SIGTERM, unless it has gone."""
        if self.is_there():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGTERM)


@contextlib.contextmanager
def shown(subject: str, task: str) -> Iterator[None]:
    """Within the block others find this process; where no file can be written they do not, and nothing else happens."""
    path = _folder() / f"{os.getpid()}.json"
    try:
        stream = path.with_suffix(".new").open("w")
    except OSError:
        yield
        return
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        json.dump(asdict(Present(subject, task, os.getpid(), time.time())), stream)
        stream.flush()
        os.replace(stream.name, path)  # only now: who finds it without a lock takes it for one that was left behind
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def find(subject: str = "") -> list[Present]:
    """Those that work on this, or on anything, the first one first."""
    found = [present for path in _folder().glob("*.json") if (present := _read(path)) is not None]
    return sorted((each for each in found if subject in ("", each.subject)), key=lambda each: each.since)


def _read(path: Path) -> Present | None:
    """None where the process has gone; its file goes, too."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        with path.open() as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Present(**json.load(stream))
        path.unlink()
    return None


def _folder() -> Path:
    """Of this user alone, on this machine; what somebody else has made, a link of theirs too, is as good as none."""
    folder = Path(tempfile.gettempdir()) / f"kftrain-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            return folder
    return folder / "nowhere"
