"""Messages from a stage to the `kftrain run` that it belongs to, in a file that nobody prints to.

Standard output is shared with kfp, with libraries and with a user's own code: whatever is read there may be anybody's.
So which run this is, and why a stage failed, go into a file of a private folder, which the environment names: a JSON
object on each line. On a cluster, and at a shell, there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "KFTRAIN_CHANNEL"
"""Variable with the path of the file; not set where nobody reads messages."""

RUN, ERROR = "run", "error"
"""Kinds of messages: the URI of the run's folder, and what error.json holds."""


def tell(kind: str, content: Any) -> bool:
    """Leave a message; return whether it was written, which it is only where somebody asked for messages."""
    try:
        descriptor = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND)
    except (KeyError, OSError):
        return False
    try:  # one write to a file that is open to append: lines of several processes do not mix
        line = json.dumps({kind: content}).encode() + b"\n"
        return os.write(descriptor, line) == len(line)
    except OSError:  # a full disk: the caller says it elsewhere
        return False
    finally:
        os.close(descriptor)


class Channel:
    """The reading end of the file; remembers how far it has read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read_messages(self) -> Iterator[tuple[str, Any]]:
        """Yield the messages that came since the last call as (kind, content); pass over lines that are none."""
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            content = stream.read()
        whole, newline, _ = content.rpartition(b"\n")  # a line that is being written is left for the next call
        self._position += len(whole) + len(newline)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield from ((kind, body) for kind, body in message.items() if _is_sound(kind, body))


@contextlib.contextmanager
def open_channel(folder: Path) -> Iterator[Channel]:
    """Open a channel for the processes that this one starts in the block: their environment names it."""
    path = folder / "channel"
    path.touch(mode=0o600)
    os.environ[VARIABLE] = str(path)
    try:
        yield Channel(path)
    finally:
        del os.environ[VARIABLE]


def _is_sound(kind: str, content: Any) -> bool:
    if kind == RUN:
        return isinstance(content, str)
    return kind == ERROR and isinstance(content, dict) and isinstance(content.get("line"), str)
