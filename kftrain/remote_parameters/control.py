"""The servers of a run as a whole: where they are, and what one process asks of all of them at once."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

from kftrain.core import storage
from kftrain.core.frames import Frame, FrameKind, FrameSocket, open_connection
from kftrain.errors import LostPeerError, RetryableError
from kftrain.remote_parameters.link import ServerAddress

LOOK_SECONDS = 0.2

CONNECT_SECONDS = 5.0

START_SECONDS = 120.0
"""Seconds that servers may take to start: they and the workers start at the same time."""


def find_servers(folder: str, num_servers: int, timeout_seconds: float, copies: int = 1) -> list[ServerAddress]:
    """Wait until the addresses of all servers and copies are there, and all answer. Raises LostPeerError.

    An address may be that of an attempt before: then nobody answers there, or the secret is another one.
    """
    deadline = time.monotonic() + timeout_seconds
    servers = []
    for number in range(num_servers):
        server = _find_server(storage.join(folder, f"{number}.json"), deadline)
        copy = _find_server(storage.join(folder, f"{number}-copy.json"), deadline) if copies > 1 else None
        servers.append(dataclasses.replace(server, copy=copy))
    return servers


def _find_server(where: str, deadline: float) -> ServerAddress:
    while True:
        document = storage.read_json_if_exists(where)
        if document is not None and (address := ServerAddress(**document)) and _answers(address):
            return address
        if time.monotonic() > deadline:
            raise LostPeerError("a server did not come in time", where=where)
        time.sleep(LOOK_SECONDS)


def load_all(servers: Sequence[ServerAddress], secret: bytes, frame: Frame) -> None:
    """Have all servers load what a LOAD names, copies first: a server sends to its copy from then on."""
    ask_all([server.copy for server in servers if server.copy is not None], secret, frame)
    ask_all(servers, secret, frame)


def ask_all(servers: Sequence[ServerAddress], secret: bytes, frame: Frame) -> list[Frame]:
    """Have all servers do, at the same time, what a frame asks for, wait until they have, and return their answers.

    Raises LostPeerError where one is gone, RetryableError where one refuses.
    """
    answers = []
    with contextlib.ExitStack() as stack:
        connections = [_ask_or_copy(server, secret, frame, stack) for server in servers]
        for server, connection in zip(servers, connections, strict=True):
            try:
                answer = connection.receive()
            except LostPeerError:
                if server.copy is None:
                    raise
                answer = _ask(server.copy, secret, frame, stack).receive()
            if answer.kind is FrameKind.REFUSAL:
                what = f"a server could not {frame.kind.name.lower()} its tables"
                raise RetryableError(what, where=server.name, value=frame.clock, fix="its log says why")
            answers.append(answer)
    return answers


def check_answers(servers: Sequence[ServerAddress]) -> None:
    """Raise LostPeerError where nobody answers at the address of one."""
    for server in servers:
        if not _answers(server):
            raise LostPeerError("nobody answers", where=f"server {server.name}")


def _ask_or_copy(server: ServerAddress, secret: bytes, frame: Frame, stack: contextlib.ExitStack) -> FrameSocket:
    try:
        return _ask(server, secret, frame, stack)
    except LostPeerError:
        if server.copy is None:
            raise
        return _ask(server.copy, secret, frame, stack)


def _ask(server: ServerAddress, secret: bytes, frame: Frame, stack: contextlib.ExitStack) -> FrameSocket:
    where = f"server {server.name}"
    connection = FrameSocket.connect(server.host, server.port, secret, where, CONNECT_SECONDS)
    stack.callback(connection.close)
    connection.send(frame)
    return connection


def _answers(server: ServerAddress) -> bool:
    with contextlib.suppress(OSError):
        open_connection(server.host, server.port, CONNECT_SECONDS).close()
        return True
    return False
