"""A worker's link to one server, which survives lost connections: what was not acknowledged is sent again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kftrain.core.frames import Frame, FrameKind, FrameSocket, FrameValues, open_connection, split_rows
from kftrain.errors import LostPeerError, RetryableError

Answer = TypeVar("Answer")

RETRY_SECONDS = 0.05

CONNECT_SECONDS = 2.0


@dataclass(frozen=True)
class ServerAddress:
    """The name of a server, and where it listens."""

    name: str
    host: str
    port: int
    copy: ServerAddress | None = None
    """The server that takes over when this one dies."""


class Link:
    """The connections of one worker to one server: for what it changes, and for what it reads, which may wait.

    `patience_seconds`: how long a server may be away. One whose process is gone, without a copy, is waited for no
    longer: it would not come back with what it knew.
    """

    def __init__(self, address: ServerAddress, worker: int, secret: bytes, patience_seconds: float) -> None:
        self.address = address
        self._worker = worker
        self._secret = secret
        self._patience_seconds = patience_seconds
        self._changes: FrameSocket | None = None
        self._reads: FrameSocket | None = None
        self._unacknowledged: list[Frame] = []
        self._is_closed = False
        self._has_joined = False
        self._acknowledged_sequence = 0
        position = self._persist(self._connect_for_changes)
        self._has_joined = True
        self._sequence = position.sequence
        self._acknowledged_sequence = position.sequence
        self.clock = position.clock

    def push(self, frame: Frame) -> None:
        """Send a change; its memory must stay as it is until `finish` returns."""
        self._sequence += 1
        frame = dataclasses.replace(frame, worker=self._worker, sequence=self._sequence)
        self._unacknowledged.append(frame)
        if self._changes is not None:
            try:
                self._changes.send(frame)
            except LostPeerError:
                self._changes = None  # `finish` connects anew and sends everything again that did not arrive

    def finish(self) -> None:
        """Wait until the server has acknowledged everything that was pushed."""
        position = self._persist(self._receive_position)
        assert position.sequence == self._sequence, "an acknowledgement of something else"
        self._unacknowledged.clear()
        self._acknowledged_sequence = position.sequence
        self.clock = position.clock

    def start_read(self, frame: Frame) -> None:
        """Ask for weights; `finish_read` takes them."""
        if self._reads is not None:
            try:
                self._reads.send(frame)
            except LostPeerError:
                self._reads = None

    def finish_read(self, frame: Frame, weights: FrameValues) -> int:
        """Put the answer to the frame of `start_read` into `weights` (keys, dim).

        Returns how many steps all workers had finished at the oldest of its parts.
        """
        return self._persist(lambda: self._receive_weights(frame, weights))

    def close(self) -> None:
        """Close the connections; a read that waits raises LostPeerError."""
        self._is_closed = True
        for connection in (self._changes, self._reads):
            if connection is not None:
                connection.close()

    def _persist(self, attempt: Callable[[], Answer]) -> Answer:
        deadline = time.monotonic() + self._patience_seconds
        while True:
            try:
                return attempt()
            except LostPeerError as error:
                is_gone = isinstance(error.__cause__, ConnectionRefusedError)
                if is_gone or self._is_closed or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)

    def _connect(self) -> FrameSocket:
        address = self.address
        where = f"server {address.name} at {address.host}:{address.port}"
        try:
            raw = open_connection(address.host, address.port, min(CONNECT_SECONDS, self._patience_seconds))
        except OSError as error:
            lost = LostPeerError(f"cannot be reached: {error}", where=where)
            if address.copy is None:
                raise lost from error
            self.address = address.copy  # for good: once a worker has been there, the first one is out
            raise lost from None
        connection = FrameSocket(raw, where)
        connection.authenticate(self._secret, is_server=False)
        if self._is_closed:  # while another thread was connecting: nobody else would close this one
            connection.close()
            raise LostPeerError("this worker has closed its connections", where=where)
        return connection

    def _connect_for_changes(self) -> Frame:
        """Join, or resume and send what the server says it has not."""
        connection = self._connect()
        connection.send(Frame(FrameKind.RESUME if self._has_joined else FrameKind.JOIN, worker=self._worker))
        position = self._require_answer(connection, FrameKind.POSITION)
        if position.sequence < self._acknowledged_sequence:
            connection.close()
            fix = "the next attempt goes on from the last checkpoint"
            raise RetryableError("a server lacks what was acknowledged", where=self.address.name, fix=fix)
        for frame in self._unacknowledged:
            if frame.sequence > position.sequence:
                connection.send(frame)
        self._changes = connection
        return position

    def _receive_position(self) -> Frame:
        if self._changes is None:
            position = self._connect_for_changes()
            if position.sequence == self._sequence:
                return position  # everything had arrived, only the acknowledgement was lost
        assert self._changes is not None
        try:
            return self._require_answer(self._changes, FrameKind.POSITION)
        except LostPeerError:
            self._changes = None
            raise

    def _receive_weights(self, frame: Frame, weights: FrameValues) -> int:
        if (connection := self._reads) is None:
            connection = self._connect()
            connection.send(frame)
            self._reads = connection
        try:
            finished = []
            for part in split_rows(*weights.shape):
                memory = weights[part].reshape(-1)
                answer = self._require_answer(connection, FrameKind.WEIGHTS, memory)
                assert answer.values.size == memory.size, "weights of other keys"
                finished.append(answer.clock)
            return min(finished)
        except LostPeerError:
            self._reads = None
            raise

    def _require_answer(self, connection: FrameSocket, kind: FrameKind, memory: FrameValues | None = None) -> Frame:
        answer = connection.receive(memory)
        if answer.kind is FrameKind.REFUSAL:
            connection.close()
            fix = "its log says why"
            raise RetryableError("the server refused what this worker sent", where=self.address.name, fix=fix)
        assert answer.kind is kind, f"a {answer.kind.name} where {kind.name} is due"
        return answer
