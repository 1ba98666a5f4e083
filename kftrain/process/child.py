"""A process that works for this one: they exchange JSON over a pair of sockets that nobody prints to.

The process ends when its end of the socket is closed, or, if it calls `die_with_parent`, with the thread that has
started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from kftrain.errors import FailureClass, RetryableError

Message = dict[str, Any]

END_SECONDS = 10.0
"""Seconds that a process has to end by itself."""


class Child:
    """A process, from outside. One thread may send while another one receives."""

    def __init__(
        self, command: Sequence[str], descriptors: Sequence[int] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it. To the command are appended its socket, these descriptors, and the id of this process."""
        self.connection, theirs = Pipe()
        with theirs:  # closed here, or the end of the process would never be seen as the end of the stream
            passed = [theirs.fileno(), *descriptors]
            arguments = [*command, *map(str, passed), str(os.getpid())]
            self._process = subprocess.Popen(arguments, pass_fds=passed, stdin=subprocess.DEVNULL, env=environment)
        self.process_id = self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.end(END_SECONDS if error[0] is None else 0.0)

    def send(self, message: Message) -> None:
        """Send a message; nothing happens where the process is gone."""
        with contextlib.suppress(OSError):  # whoever waits for the answer hears why
            send(self.connection, message)

    def end(self, seconds: float = END_SECONDS) -> int:
        """Close the socket, wait so long until the process ends, and kill it then; return its exit code."""
        self.connection.close()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def make_lost_error(self, what: str, where: str, fix: str) -> RetryableError:
        """Say how the process has ended, which does not answer any more. `fix`: where it was killed."""
        code = self.end()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        killed = code == -signal.SIGKILL
        error = RetryableError(f"{what} {how}", where=where, fix=fix if killed else "see its last lines in the log")
        return error.of_class(FailureClass.HOST_MEMORY if killed else FailureClass.USER_CODE)


def send(connection: Connection, message: Message) -> None:
    """Send a message. Raises OSError where the other end is gone."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Message | None:
    """Wait for a message; None where the other end is gone."""
    try:
        message: Message = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return message
