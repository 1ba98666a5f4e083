"""The page of protocol that parameter servers and workers share: frames over TCP, a fixed header and raw arrays.

Nothing is unpickled. A connection begins with a proof by both sides that they know the run's secret, without showing
it; sizes are bounded before memory is taken for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import socket
import struct
import weakref
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kftrain.core import row_encodings
from kftrain.core.row_encodings import RowEncoding
from kftrain.errors import ConfigError, LostPeerError

HEADER = struct.Struct("<4sBBHIIQQII")
MAGIC = b"kft1"
MAX_BODY_BYTES = 2**30
HANDSHAKE_SECONDS = 10.0

PART_BYTES = 2**21
"""Bytes of rows after which a new frame begins, so that one end works on a part while the next one travels."""

FrameKeys = NDArray[np.int64]
FrameValues = NDArray[np.float32]


def split_rows(num_rows: int, dim: int) -> list[slice]:
    """Split rows of `dim` numbers into the parts that travel as a frame each; there is one at least."""
    num_part_rows = max(1, PART_BYTES // (4 * dim))
    return [slice(start, start + num_part_rows) for start in range(0, max(1, num_rows), num_part_rows)]


class FrameKind(IntEnum):
    """The kind of a frame: what it asks for, or answers."""

    JOIN = 1
    """A new process of a worker is there, which knows nothing of a step that an earlier one began; answered by
    POSITION: the worker's last sequence and its clock."""
    PULL = 2
    """Read the keys' weights as of `clock`; answered, once the clock rule allows it, by a WEIGHTS for each part of
    `split_rows`, whose `clock` tells how many steps all workers have finished."""
    PUSH = 3
    """Gradients of distinct keys, `values` (keys, dim); several in a step are summed. Not answered: the FINISH is."""
    FINISH = 4
    """The worker's step `clock` is over; answered by POSITION when all up to it is safe."""
    POSITION = 7
    WEIGHTS = 8
    REFUSAL = 9
    """The frame before was wrong; the server says why in its log and closes."""
    RESUME = 10
    """The same process of a worker is there again, over another connection; answered by POSITION."""
    FOLLOW = 12
    """To a copy: what changes the server that it stands by for comes over this connection. Answered by POSITION, or by
    REFUSAL once the copy has taken over, which any frame of a worker makes it do."""
    SAVE = 20
    """Write the tables beside the checkpoint of step `clock` and attempt `sequence`; answered by POSITION."""
    LOAD = 21
    """Forget everything, and take the tables of that checkpoint; of none where `clock` is 0. Answered by POSITION."""
    MOVE = 22
    """Copy the rows that are not there yet to the servers that have them on a ring of `table` servers; with `sequence`
    1, between two steps of all workers, the last of them, and the clocks. `clock` is the number of the change: a higher
    one begins anew, a lower one is over. Answered by POSITION: `clock` rows."""
    ROWS = 23
    """Rows of a table, or with `sequence` 1 candidates, of a server that moves them in change `clock`: what stands
    behind each key, as numbers. Answered by POSITION."""
    CLOCKS = 24
    """Clocks of a server that has sent all rows that it moves: `keys` are the updates of each table, then workers and
    their clocks in turn; `table` is the number of tables, `clock` that of the change. Answered by POSITION."""
    SETTLE = 25
    """Change `clock` is over: the ring in the run's folder is agreed, or goes on. Drop the rows of others. Answered by
    POSITION."""
    GRADIENT = 30
    """A block of the outer gradient of round `clock` of the island in `keys`: piece `sequence` of part `table` of its
    vector. Answered by POSITION."""
    MEET = 31
    """Announces round `clock`, whose gradient is on the servers; `keys` are the island, and how many updates it knows.
    `table` is 1 where all islands meet in this round, 2 where they are to do so soon. Answered by UPDATES, once
    the island may go on: `table` is 1 where they have met, `keys` has for each update that it does not know the number
    of its gradients, then their islands and rounds in turn."""
    UPDATES = 32
    MEAN = 33
    """The block of update `clock`, for the island that is first in `keys`; behind it are those of the gradients that
    the update is the mean of. Answered by MEAN with values."""


@dataclass(frozen=True)
class Frame:
    """A message.

    Args:
        kind: What it is.
        table: The number of the table.
        worker: The number of the worker.
        sequence: The number of a PUSH or FINISH among those of this worker to this server, from 1.
        clock: A step of the worker, from 0.
        keys: Keys of rows.
        values: Numbers of those rows, one row after another.
        encoding: How the numbers travel; those of a WEIGHTS as its PULL says.
        dim: Numbers of a row; needed where the encoding is one of rows.
    """

    kind: FrameKind
    table: int = 0
    worker: int = 0
    sequence: int = 0
    clock: int = 0
    keys: FrameKeys = field(default_factory=lambda: np.empty(0, np.int64))
    values: FrameValues = field(default_factory=lambda: np.empty(0, np.float32))
    encoding: RowEncoding = RowEncoding.FP32
    dim: int = 0

    def encode(self) -> list[memoryview]:
        """Return what goes over the wire, in parts that are not copied."""
        # Keys are packed where the numbers are, too: as they are, they take less time than what they are beside.
        key_bytes = row_encodings.KEY_BYTES
        if self.encoding is RowEncoding.INT8:
            key_bytes = row_encodings.choose_key_bytes(self.keys)
        numbers = self.table, self.worker, self.encoding + 4 * self.dim, self.sequence, self.clock
        header = HEADER.pack(MAGIC, self.kind, key_bytes, *numbers, self.keys.size, self.values.size)
        bodies = [row_encodings.encode_keys(self.keys, key_bytes)]
        if self.values.size:
            bodies.append(row_encodings.encode(self.values, self.encoding, self.dim))
        return [memoryview(header), *(body for body in bodies if body.nbytes)]


@dataclass(frozen=True)
class FrameHeader:
    """A decoded header, and how long the two arrays behind it are."""

    frame: Frame
    num_keys: int
    key_bytes: int
    """Bytes of a key on the wire; see `row_encodings.encode_keys`."""
    num_values: int

    @property
    def keys_bytes(self) -> int:
        """Bytes of the keys."""
        return row_encodings.count_keys_bytes(self.num_keys, self.key_bytes)

    @property
    def values_bytes(self) -> int:
        """Bytes of the values."""
        return row_encodings.count_bytes(self.frame.encoding, self.num_values, self.frame.dim)


def decode_header(header: bytes | bytearray | memoryview) -> FrameHeader | None:
    """Decode a header; None if it is none, or of a body that is too large."""
    magic, kind, key_bytes, table, worker, encoding, sequence, clock, num_keys, num_values = HEADER.unpack(header)
    dim, number = divmod(encoding, 4)
    is_known = magic == MAGIC and kind in FrameKind._value2member_map_ and number in RowEncoding._value2member_map_
    if not is_known or 8 * num_keys + 4 * num_values > MAX_BODY_BYTES:
        return None
    if not 0 < key_bytes <= row_encodings.KEY_BYTES:
        return None
    if number == RowEncoding.INT8 and (not dim or num_values % dim):
        return None
    frame = Frame(FrameKind(kind), table, worker, sequence, clock, encoding=RowEncoding(number), dim=dim)
    return FrameHeader(frame, num_keys, key_bytes, num_values)


def open_connection(host: str, port: int, timeout_seconds: float) -> socket.socket:
    """Connect to whoever listens there. Raises OSError."""
    connection = socket.create_connection((host, port), timeout_seconds)
    if connection.getsockname() == connection.getpeername():
        # Where nobody listens on this machine, TCP connects a socket to itself if it was given that port by chance.
        connection.close()
        raise ConnectionRefusedError("nobody listens")
    return connection


class FrameSocket:
    """A connection that carries frames. One thread may send while another one receives."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._connection = connection
        # Closed when nobody has this object any more: a thread that is about to read would else take what comes to the
        # next connection of that number.
        weakref.finalize(self, connection.close)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._peer = peer
        self._header = bytearray(HEADER.size)

    @classmethod
    def connect(cls, host: str, port: int, secret: bytes, peer: str, timeout_seconds: float) -> FrameSocket:
        """Connect to a server. Raises LostPeerError where nobody is there, ConfigError for another secret."""
        try:
            connection = cls(open_connection(host, port, timeout_seconds), peer)
        except OSError as error:
            raise LostPeerError(f"cannot be reached: {error}", where=peer) from error
        connection.authenticate(secret, is_server=False)
        return connection

    def send(self, frame: Frame) -> None:
        """Send a frame. Raises LostPeerError where the other end is gone."""
        parts = frame.encode()
        try:
            while parts:
                num_sent = self._connection.sendmsg(parts)
                while parts and num_sent >= len(parts[0]):
                    num_sent -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][num_sent:]
        except OSError as error:
            raise self._lose(f"the connection broke: {error}") from error

    def receive(self, values_memory: FrameValues | None = None) -> Frame:
        """Wait for a frame. Its values lie in `values_memory` if that has room, else in memory of their own.

        Raises LostPeerError where the other end is gone, or sends what is no frame.
        """
        self._fill(memoryview(self._header))
        header = decode_header(self._header)
        if header is None:
            raise self._lose("something else than a frame came, or one that is too large")
        keys = np.empty(header.keys_bytes, np.uint8)
        if values_memory is None or values_memory.size < header.num_values:
            values_memory = np.empty(header.num_values, np.float32)
        values = values_memory[: header.num_values]
        is_plain = header.frame.encoding is RowEncoding.FP32
        wire = values.view(np.uint8) if is_plain else np.empty(header.values_bytes, np.uint8)
        for memory in (keys.data, wire.data):
            if memory.nbytes:
                self._fill(memory.cast("B"))
        if not is_plain:
            row_encodings.decode(wire, header.frame.encoding, header.frame.dim, values)
        return dataclasses.replace(header.frame, keys=row_encodings.decode_keys(keys, header.key_bytes), values=values)

    def authenticate(self, secret: bytes, is_server: bool) -> None:
        """Prove to the other end that this one knows the secret, and have it prove the same, before any frame.

        Each side signs both random numbers and its own role, so that neither an old proof nor one's own is of use.

        Raises ConfigError if the other end has another secret.
        """
        self._connection.settimeout(HANDSHAKE_SECONDS)
        ours, theirs = os.urandom(32), memoryview(bytearray(32))
        self._send_bytes(ours)
        self._fill(theirs)
        numbers = (ours + theirs) if is_server else (bytes(theirs) + ours)
        roles = (b"server", b"worker") if is_server else (b"worker", b"server")
        proofs = [hmac.digest(secret, role + numbers, "sha256") for role in roles]
        self._send_bytes(proofs[0])
        self._fill(theirs)
        if not hmac.compare_digest(proofs[1], theirs):
            self.close()
            raise ConfigError("the other end has another secret than this run's", where=self._peer)
        self._connection.settimeout(None)

    @property
    def is_over(self) -> bool:
        """True where the other end has closed the connection, and all that it sent was received."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # it broke
            return True

    def close(self) -> None:
        """End the connection; whoever waits in `receive` gets LostPeerError."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def _lose(self, what: str) -> LostPeerError:
        self.close()
        return LostPeerError(what, where=self._peer)

    def _send_bytes(self, content: bytes) -> None:
        try:
            self._connection.sendall(content)
        except OSError as error:
            raise self._lose(f"the connection broke: {error}") from error

    def _fill(self, memory: memoryview) -> None:
        try:
            while memory:
                # The kernel waits for all of it: else Python wakes up for every 64 KiB.
                num_received = self._connection.recv_into(memory, 0, socket.MSG_WAITALL)
                if not num_received:
                    raise self._lose("the other end closed the connection")
                memory = memory[num_received:]
        except OSError as error:
            raise self._lose(f"the connection broke: {error}") from error
