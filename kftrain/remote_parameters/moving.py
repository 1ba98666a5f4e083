"""Other servers for a run that goes on: a thread has their rows copied, which change hands between two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kftrain.core.frames import Frame, FrameKind
from kftrain.core.progress import to_log
from kftrain.errors import KftrainError
from kftrain.remote_parameters.control import ask_all, check_answers
from kftrain.remote_parameters.link import ServerAddress

LOOK_SECONDS = 0.5

FEW_ROWS = 4_096
"""Rows that may be left to copy when the steps stop."""

MAX_PASSES = 12

Servers = Sequence[ServerAddress]


class ServerChange:
    """Changes the servers of a run, on its first worker.

    Args:
        servers: The servers that have the rows.
        secret: What all processes of the run know.
        find_wanted: Returns the servers that somebody has asked for, once for each time; None where nobody has.
        agree: Makes the ring of this many servers the run's, for good.
    """

    def __init__(
        self,
        servers: Servers,
        secret: bytes,
        find_wanted: Callable[[], Servers | None],
        agree: Callable[[int], None],
    ) -> None:
        self._servers = servers
        self._secret = secret
        self._find_wanted = find_wanted
        self._agree = agree
        self._wanted: Servers = ()
        self._is_settled = True
        # Numbers grow over attempts: a server that comes to know of a change does nothing more for an earlier one.
        self._change = int(time.time())
        self.is_ready = False
        """True when little is left to copy: `finish` may be called between two steps."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="server-change")

    def start(self) -> None:
        """Begin to look for what is wanted."""
        self._thread.start()

    def close(self) -> None:
        """Look no longer; a change that has begun comes to nothing."""
        self._is_over.set()

    def finish(self) -> Servers:
        """Have the rest copied, and return the servers from now on: those before where one was lost meanwhile.

        All workers have finished the same step, and none has begun another one.
        """
        before, wanted = self._servers, self._wanted
        try:
            # Where one was started again, the owners have sent its rows to another address than this.
            check_answers(wanted[len(before) :])
            ask_all(before, self._secret, Frame(FrameKind.MOVE, len(wanted), clock=self._change, sequence=1))
        except KftrainError as error:
            self._give_up(error)
            return before
        self._agree(len(wanted))
        longer = max(before, wanted, key=len)
        ask_all(longer, self._secret, self._settle_frame)
        to_log(f"goes on with {len(wanted)} servers in place of {len(before)}")
        self._servers, self.is_ready = wanted, False
        return wanted

    def _work(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            if self.is_ready:
                continue
            try:
                if not self._is_settled:  # what was on its way when the last change ended may have come after that
                    ask_all(self._servers, self._secret, self._settle_frame)
                    self._is_settled = True
                wanted = self._find_wanted()
                if wanted is not None and len(wanted) != len(self._servers):
                    self._wanted = wanted
                    self._copy()
            except KftrainError as error:
                self._give_up(error)

    def _copy(self) -> None:
        num_rows, num_passes = FEW_ROWS + 1, 0
        self._change += 1
        while num_rows > FEW_ROWS and num_passes < MAX_PASSES:
            move = Frame(FrameKind.MOVE, len(self._wanted), clock=self._change)
            num_rows = sum(answer.clock for answer in ask_all(self._servers, self._secret, move))
            num_passes += 1
        self.is_ready = True

    @property
    def _settle_frame(self) -> Frame:
        return Frame(FrameKind.SETTLE, clock=self._change)

    def _give_up(self, error: KftrainError) -> None:
        to_log(f"goes on with {len(self._servers)} servers: {error.line}")
        for server in max(self._servers, self._wanted, key=len):
            try:
                ask_all([server], self._secret, self._settle_frame)
            except KftrainError as lost:  # the training sees it where it needs the server
                to_log(f"{server.name} was not told: {lost.line}")
        self._is_settled = False
        self.is_ready = False  # at last: a new change would else begin with rows that are being dropped
