"""The servers of a run as a whole: where they are, and what one process asks of all of them at once."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from kftrain.core import storage
from kftrain.core.frames import Frame, FrameKind, FrameSocket
from kftrain.errors import LostPeerError, RetryableError
from kftrain.remote_parameters.link import ServerAddress

LOOK_SECONDS = 0.2

CONNECT_SECONDS = 5.0


def find_servers(folder: str, num_servers: int, timeout_seconds: float) -> list[ServerAddress]:
    """Wait until the addresses of all servers are there, and somebody answers at each. Raises LostPeerError.

    An address may be that of an attempt before: then nobody answers there, or the secret is another one.
    """
    deadline = time.monotonic() + timeout_seconds
    servers: list[ServerAddress] = []
    while len(servers) < num_servers:
        where = storage.join(folder, f"{len(servers)}.json")
        document = storage.read_json_if_exists(where)
        if document is not None and (address := ServerAddress(**document)) and _answers(address):
            servers.append(address)
        elif time.monotonic() > deadline:
            raise LostPeerError(f"a server did not come within {timeout_seconds:g} s", where=where)
        else:
            time.sleep(LOOK_SECONDS)
    return servers


def ask_all(servers: Sequence[ServerAddress], secret: bytes, frame: Frame) -> None:
    """Have all servers do, at the same time, what a frame asks for, and wait until they have.

    Raises LostPeerError where one is gone, RetryableError where one refuses.
    """
    with contextlib.ExitStack() as stack:
        connections = []
        for server in servers:
            raw = _connect(server)
            connection = FrameSocket(raw, f"server {server.name}")
            stack.callback(connection.close)
            connection.authenticate(secret, is_server=False)
            connection.send(frame)
            connections.append(connection)
        for server, connection in zip(servers, connections, strict=True):
            if connection.receive().kind is FrameKind.REFUSAL:
                what = f"a server could not {frame.kind.name.lower()} its tables"
                raise RetryableError(what, where=server.name, value=frame.clock, fix="its log says why")


def _connect(server: ServerAddress) -> socket.socket:
    try:
        return socket.create_connection((server.host, server.port), CONNECT_SECONDS)
    except OSError as error:
        raise LostPeerError(f"cannot be reached: {error}", where=f"server {server.name}") from error


def _answers(server: ServerAddress) -> bool:
    with contextlib.suppress(LostPeerError):
        _connect(server).close()
        return True
    return False
