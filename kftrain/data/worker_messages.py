"""What a process and its data workers say to each other: JSON objects over a socket, with descriptors beside them."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("<I")


class WorkerConnection:
    """End of a pair of sockets.

    One thread may send while another one receives.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message with descriptors."""
        content = json.dumps(message).encode()
        packet = _LENGTH.pack(len(content)) + content
        sent = socket.send_fds(self._socket, [packet], descriptors) if descriptors else 0
        self._socket.sendall(packet[sent:])

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for a message and the descriptors that came with it; None where the other end is gone."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
            head += self._receive_rest(_LENGTH.size - len(head)) if head else b""
            if len(head) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(head)
            content = self._receive_rest(length)
        except OSError:  # reset, or closed by another thread
            return None
        return (json.loads(content), descriptors) if len(content) == length else None

    def close(self) -> None:
        """Close the connection: the other end receives None, and so does a thread that waits at this one."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive_rest(self, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            chunk = self._socket.recv(min(length - len(content), 1 << 20))
            if not chunk:
                break
            content += chunk
        return bytes(content)
