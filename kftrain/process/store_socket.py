"""The listening socket that rank 0 of a single node inherits, so that no other process can take its port meanwhile."""

from __future__ import annotations

import os
import socket

STORE_ENV = "KFTRAIN_STORE_DESCRIPTOR"
"""Its descriptor."""


def listen(num_processes: int) -> socket.socket:
    """Made before rank 0 is started, on a free port of this machine, with room for so many processes."""
    return socket.create_server(("127.0.0.1", 0), backlog=max(128, num_processes))


def take_descriptor() -> int | None:
    """Rank 0's: the descriptor that it was started with, once. None on other ranks and on several nodes."""
    descriptor = os.environ.pop(STORE_ENV, "")
    return int(descriptor) if descriptor else None
