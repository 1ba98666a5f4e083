"""A chain of two (van Renesse and Schneider 2004): what changes a server goes to its copy before it is acknowledged.

A copy is a server like any other that gets the same frames in the same order. When a worker turns to it, because the
first one is gone, it takes over and hears the first one no longer: there are never two that acknowledge.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from kftrain.core.frames import Frame, FrameKind, FrameSocket
from kftrain.errors import ConfigError, KftrainError, LostPeerError, StorageError

CONNECT_SECONDS = 2.0

RETRY_SECONDS = 0.05

logger = logging.getLogger(__name__)


class Chain:
    """The server's side of a chain: a frame is safe when the copy has applied it.

    Where the copy is gone, its server goes on alone; where the copy has taken over, `retire` is called, and nothing is
    acknowledged any more.
    """

    def __init__(self, host: str, port: int, secret: bytes, retire: Callable[[], None]) -> None:
        self._address = (host, port)
        self._secret = secret
        self._retire = retire
        self._changed = threading.Condition()
        self._unacknowledged: list[Frame] = []
        self._num_sent = 0
        self._safe_position = 0
        self.position = 0
        self._is_alone = False
        self._is_closed = False
        self._connection = self._follow()
        for work in (self._send_behind, self._receive_answers):
            threading.Thread(target=work, daemon=True).start()

    def append(self, frame: Frame) -> int:
        """Send a frame behind its user; return the position for `sync` to have it safe."""
        with self._changed:
            if not self._is_alone:
                self._unacknowledged.append(frame)
            self.position += 1
            self._changed.notify_all()
            return self.position

    def sync(self, position: int) -> None:
        """Wait until the copy has everything up to a position. Raises StorageError if it has taken over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_alone or self._is_closed or self._safe_position >= position)
            if self._is_closed:
                raise StorageError("another process has taken over", where=f"the copy at port {self._address[1]}")

    def close(self) -> None:
        """Send nothing more; whoever waits in `sync` gets StorageError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._connection.close()

    def _follow(self) -> FrameSocket:
        """Connect. Raises LostPeerError where nobody is there, StorageError where the copy has taken over."""
        where = f"the copy at {self._address[0]}:{self._address[1]}"
        connection = FrameSocket.connect(*self._address, self._secret, where, CONNECT_SECONDS)
        connection.send(Frame(FrameKind.FOLLOW))
        if connection.receive().kind is FrameKind.REFUSAL:
            connection.close()
            raise StorageError("another process has taken over", where=where)
        return connection

    @property
    def _is_over(self) -> bool:
        return self._is_alone or self._is_closed

    def _send_behind(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._num_sent < len(self._unacknowledged))
                if self._is_over:
                    return
                connection, frame = self._connection, self._unacknowledged[self._num_sent]
                self._num_sent += 1
            with contextlib.suppress(LostPeerError):  # `_receive_answers` sees it, and sends all of it again
                connection.send(frame)

    def _receive_answers(self) -> None:
        while not self._is_over:
            try:
                if self._connection.receive().kind is FrameKind.REFUSAL:
                    raise StorageError("the copy refused a frame", where=f"port {self._address[1]}")
                self._note_answer()
            except LostPeerError:
                self._connect_again()
            except StorageError as error:
                self._end(error)

    def _note_answer(self) -> None:
        with self._changed:
            kinds = [frame.kind for frame in self._unacknowledged]
            # A PUSH has no answer: the one to what follows it holds for it, too.
            num_safe = 1 + next(number for number, kind in enumerate(kinds) if kind is not FrameKind.PUSH)
            del self._unacknowledged[:num_safe]
            self._num_sent -= num_safe
            self._safe_position += num_safe
            self._changed.notify_all()

    def _connect_again(self) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        self._connection.close()
        while not self._is_closed:
            try:
                connection = self._follow()
            except (LostPeerError, ConfigError) as error:
                is_gone = isinstance(error.__cause__, ConnectionRefusedError)
                if is_gone or time.monotonic() > deadline:
                    self._go_on_alone(error)
                    return
                time.sleep(RETRY_SECONDS)
            except StorageError as error:
                self._end(error)
            else:
                with self._changed:  # what came is known by its sequence, and does nothing the second time
                    self._connection, self._num_sent = connection, 0
                    self._changed.notify_all()
                return

    def _go_on_alone(self, error: KftrainError) -> None:
        logger.warning("goes on without its copy: %s", error)
        with self._changed:
            self._is_alone = True
            self._unacknowledged.clear()
            self._changed.notify_all()

    def _end(self, error: StorageError) -> None:
        logger.warning("serves nobody any more: %s", error)
        self.close()
        self._retire()


class NoCopy:
    """Stands in the place of a chain where a server has no copy."""

    position = 0

    def append(self, frame: Frame) -> int:  # noqa: D102
        return 0

    def sync(self, position: int) -> None:  # noqa: D102
        pass

    def close(self) -> None:  # noqa: D102
        pass
