"""Rounds of islands through servers, as one process of an island sees them: what it asks may be asked twice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kftrain.core.frames import Frame, FrameKeys, FrameKind, FrameSocket, FrameValues
from kftrain.core.row_encodings import RowEncoding
from kftrain.errors import LostPeerError, RetryableError
from kftrain.remote_parameters.link import CONNECT_SECONDS, RETRY_SECONDS, ServerAddress

ROW_NUMBERS = 64
"""Numbers that share an exponent as int8."""

BLOCK_NUMBERS = 2**20
"""Numbers of a vector that travel as one frame."""

BLOCKS_AT_A_TIME = 16
"""Most blocks that a server is asked for before its answers are read: of more both ends could wait in a send, each for
the other to read."""

PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Update:
    """The mean of some outer gradients."""

    number: int
    members: Sequence[int]
    """Islands and rounds of the gradients, in turn."""


class RoundLink:
    """A connection to one server that is made anew when it is lost: all questions are asked again then."""

    def __init__(self, address: ServerAddress, process: int, secret: bytes) -> None:
        self._address = address
        self._process = process
        self._secret = secret
        self._connection: FrameSocket | None = None
        self._frames: list[Frame] = []
        self._is_closed = False

    def start(self, frames: list[Frame]) -> None:
        """Begin to send frames; `finish` returns the answers."""
        self._frames = frames
        try:
            self._send()
        except LostPeerError:
            self._connection = None

    def finish(self, memories: Sequence[FrameValues | None] = ()) -> list[Frame]:
        """Return the answer to each frame, whose values lie in `memories`.

        Raises LostPeerError where the server is away for too long, RetryableError where it refuses.
        """
        deadline = 0.0
        while True:
            begun = time.monotonic()
            try:
                if self._connection is None:
                    self._send()
                return [self._receive(memory) for memory in memories or [None] * len(self._frames)]
            except LostPeerError as error:
                self._connection = None
                if isinstance(error.__cause__, ConnectionRefusedError):
                    raise  # its process is gone, and with it what it knew
                now = time.monotonic()
                if not deadline or now - begun > PATIENCE_SECONDS:  # it was there meanwhile: an island waits for long
                    deadline = now + PATIENCE_SECONDS
                if self._is_closed or now > deadline:
                    raise
                time.sleep(RETRY_SECONDS)

    def close(self) -> None:
        """Close the connection; whoever waits for an answer gets LostPeerError."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()

    def _send(self) -> None:
        if self._connection is None:
            where, address = f"server {self._address.name}", self._address
            connection = FrameSocket.connect(address.host, address.port, self._secret, where, CONNECT_SECONDS)
            connection.send(Frame(FrameKind.JOIN, worker=self._process))
            connection.receive()
            self._connection = connection
        for frame in self._frames:
            self._connection.send(frame)

    def _receive(self, memory: FrameValues | None) -> Frame:
        assert self._connection is not None
        answer = self._connection.receive(memory)
        if answer.kind is FrameKind.REFUSAL:
            fix = "its log says why; the next attempt goes on from the last checkpoint"
            raise RetryableError("a server refused what an island sent", where=self._address.name, fix=fix)
        assert memory is None or answer.values.size == memory.size, "a mean of another length"
        return answer


class RemoteRounds:
    """The servers that one process of an island exchanges its part of a vector through.

    Args:
        servers: The servers, the same for all processes.
        process: The number of this process among all.
        island: The number of its island.
        part: The number of its part of the island's vector.
        secret: What all processes of the run know.
        encoding: How numbers travel.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        process: int,
        island: int,
        part: int,
        secret: bytes,
        encoding: RowEncoding,
    ) -> None:
        self._links = [RoundLink(server, process, secret) for server in servers]
        self._process = process
        self._island = island
        self._part = part
        self._encoding = encoding

    def join(self) -> None:
        """Connect to all servers: those that are told to stop then wait for this process."""
        for link in self._links:
            link.start([])

    def send(self, number: int, vector: FrameValues) -> None:
        """Send this process's part of the outer gradient of a round, `[n]`, a multiple of ROW_NUMBERS."""
        keys = np.array([self._island], np.int64)
        values = [vector[start : start + BLOCK_NUMBERS] for start in range(0, len(vector), BLOCK_NUMBERS)]
        frames = [self._build(FrameKind.GRADIENT, piece, number, keys, block) for piece, block in enumerate(values)]
        self._ask(frames, [None] * len(frames))

    def meet(self, number: int, num_known: int, is_meeting: bool, wants_meeting: bool) -> tuple[list[Update], bool]:
        """Announce that all of an island's gradient of a round was sent; return the new updates, and if all have met.

        Waits until the island may go on. `num_known`: updates that it knows.
        """
        flags, keys = int(is_meeting) + 2 * int(wants_meeting), np.array([self._island, num_known], np.int64)
        self._links[0].start([Frame(FrameKind.MEET, flags, self._process, clock=number, keys=keys)])
        (answer,) = self._links[0].finish()
        updates: list[Update] = []
        numbers = answer.keys.tolist()
        while numbers:
            end = 1 + 2 * numbers[0]
            updates.append(Update(num_known + len(updates), numbers[1:end]))
            del numbers[:end]
        return updates, bool(answer.table)

    def fetch(self, update: Update, mean: FrameValues) -> None:
        """Put this process's part of an update, `[n]`, into `mean`."""
        memories = [mean[start : start + BLOCK_NUMBERS] for start in range(0, len(mean), BLOCK_NUMBERS)]
        keys, nothing = np.array([self._island, *update.members], np.int64), np.empty(0, np.float32)
        count = range(len(memories))
        frames = [self._build(FrameKind.MEAN, piece, update.number, keys, nothing) for piece in count]
        self._ask(frames, memories)

    def close(self) -> None:
        """Close the connections."""
        for link in self._links:
            link.close()

    def _build(self, kind: FrameKind, piece: int, clock: int, keys: FrameKeys, values: FrameValues) -> Frame:
        where = self._part, self._process, piece, clock
        return Frame(kind, *where, keys=keys, values=values, encoding=self._encoding, dim=ROW_NUMBERS)

    def _ask(self, frames: list[Frame], memories: Sequence[FrameValues | None]) -> None:
        """Ask each server for its share. The pieces go around, and each part begins at another server."""
        count = len(self._links)
        for start in range(0, len(frames), count * BLOCKS_AT_A_TIME):
            pieces = range(start, min(len(frames), start + count * BLOCKS_AT_A_TIME))
            shares = [[piece for piece in pieces if (piece + self._part) % count == number] for number in range(count)]
            for link, share in zip(self._links, shares, strict=True):
                link.start([frames[piece] for piece in share])
            for link, share in zip(self._links, shares, strict=True):
                link.finish([memories[piece] for piece in share])
