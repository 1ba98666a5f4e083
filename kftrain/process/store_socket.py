"""The place where the processes of a job meet: the job's name there, and the socket that rank 0 of one node inherits.

It inherits the socket so that no other process can take its port meanwhile.
"""

from __future__ import annotations

import os
import socket

STORE_ENV = "KFTRAIN_STORE_DESCRIPTOR"
"""Variable with the descriptor of the socket."""

JOB_ENV = "KFTRAIN_JOB"
"""Variable with the name of the job, the same on all of its nodes and on no other job's."""


def open_listener(num_processes: int) -> socket.socket:
    """Open the socket on a free port of this machine, before rank 0 starts, with room for so many processes."""
    return socket.create_server(("127.0.0.1", 0), backlog=max(128, num_processes))


def take_descriptor() -> int | None:
    """Take the descriptor that rank 0 was started with; only once. None on other ranks and on several nodes."""
    descriptor = os.environ.pop(STORE_ENV, "")
    return int(descriptor) if descriptor else None
