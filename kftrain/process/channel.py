"""What a stage tells the `kftrain run` that it belongs to: a file that nobody prints to.

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
"""Path of the file."""

RUN, ERROR = "run", "error"
"""Kinds of messages: the URI of the run's folder, and what error.json holds."""


def tell(kind: str, content: Any) -> bool:
    """Leaves a message; whether there is somebody who asked for it."""
    try:
        descriptor = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND)
    except (KeyError, OSError):
        return False
    try:
        line = json.dumps({kind: content}).encode() + b"\n"
        return os.write(descriptor, line) == len(line)
    except OSError:  # a full disk: the caller says it elsewhere
        return False
    finally:
        os.close(descriptor)


class Channel:
    """The reading end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What has come since the last time: (kind, content). A line that is no message is passed over."""
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            content = stream.read()
        whole, newline, _ = content.rpartition(b"\n")
        self._position += len(whole) + len(newline)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield from ((kind, said) for kind, said in message.items() if _is_sound(kind, said))


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Channel]:
    """Within the block, processes that this one starts tell what they have to say to the channel."""
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
