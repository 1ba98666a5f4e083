"""A server: a thread for each connection around one state, and a copy that has it all before an acknowledgement."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np

from kftrain.core.frames import Frame, FrameKind, FrameSocket, split_rows
from kftrain.errors import ConfigError, LostPeerError, StorageError
from kftrain.server.chain import Chain, NoCopy
from kftrain.server.clock import count_finished, may_begin
from kftrain.server.state import RECORDED, ServerState

logger = logging.getLogger(__name__)

NO_KEYS = np.empty(0, np.int64)

LOOK_SECONDS = 0.1


class Server:
    """Serves a state to everyone who knows the secret.

    Args:
        state: What it serves.
        secret: What all processes of the run know.
        host: The address to listen on.
        port: The port; 0 picks a free one.
    """

    def __init__(self, state: ServerState, secret: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        self._state = state
        self._secret = secret
        self._copy: Chain | NoCopy = NoCopy()
        self._readable_position = 0  # what the copy has to have for what the tables hold to be read
        self._changed = threading.Condition()
        self._is_stopped = False
        self._sockets: set[FrameSocket] = set()
        self._connections: dict[int, FrameSocket] = {}  # of each worker, the one that may change the state
        self._leader: FrameSocket | None = None  # of a copy, the connection of the server that it stands by for
        self._leaders: set[FrameSocket] = set()  # also those before it, whose last frames may still be on their way
        self._has_taken_over = False
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((host, port))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def start(self) -> None:
        """Begin to answer, in threads."""
        self._start_thread(self._accept)

    def wait_for_workers(self) -> None:
        """Wait until no worker has a connection for changes, or this server is stopped."""
        # Asked again and again: a thread that waits for other workers does not see its own one's end.
        while not self._is_stopped and self._has_workers():
            time.sleep(LOOK_SECONDS)

    def _has_workers(self) -> bool:
        with self._changed:
            return any(one in self._sockets and not one.is_over for one in self._connections.values())

    def stop(self) -> None:
        """Close all connections and wait for the threads."""
        self._hang_up()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._copy.close()

    def _hang_up(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            for connection in self._sockets:
                connection.close()
        with contextlib.suppress(OSError):  # it may have retired before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`

    def _start_thread(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        # Closed by this thread alone: else it might accept what comes to the next listener of this number.
        with self._listener, contextlib.suppress(OSError):  # stopped
            while True:
                connection, peer = self._listener.accept()
                self._start_thread(self._serve, FrameSocket(connection, f"{peer[0]}:{peer[1]}"))

    def _serve(self, connection: FrameSocket) -> None:
        with self._changed:
            self._sockets.add(connection)
            if self._is_stopped:
                connection.close()
        try:
            connection.authenticate(self._secret, is_server=True)
            is_refused = False
            while not (is_refused or self._is_stopped):
                for answer in self._answer(connection.receive(), connection):
                    connection.send(answer)
                    is_refused = answer.kind is FrameKind.REFUSAL
        except (LostPeerError, ConfigError) as error:
            if not self._is_stopped:
                logger.info("a worker's connection ended: %s", error)
        except StorageError as error:  # what waits for an acknowledgement does not get one
            logger.error("%s", error)
        finally:
            with self._changed:
                self._sockets.discard(connection)
            connection.close()

    def _answer(self, frame: Frame, connection: FrameSocket) -> Iterator[Frame]:
        """Do what a frame asks for and yield the answers: none to a PUSH, none once stopped."""
        if frame.kind is FrameKind.FOLLOW:
            yield self._begin_to_follow(frame, connection)
        elif frame.kind is FrameKind.PULL:
            yield from self._pull(frame)
        elif frame.kind in RECORDED:
            answer = self._record(frame, connection)
            if answer is not None:
                yield answer
        elif frame.kind is FrameKind.RESUME:
            yield self._resume(frame, connection)
        else:
            yield self._refuse(frame, "it is no request")

    def _begin_to_follow(self, frame: Frame, connection: FrameSocket) -> Frame:
        with self._changed:
            if self._has_taken_over:
                return self._refuse(frame, "this copy has taken over")
            self._leader = connection
            self._leaders.add(connection)
        return Frame(FrameKind.POSITION)

    def _take_over(self) -> None:
        """Hear the server that this one stands by for no longer: workers have turned to this one."""
        if self._leader is not None and not self._has_taken_over:
            logger.warning("takes over: the server that it stands by for is gone")
            self._has_taken_over = True
            self._leader.close()

    def _record(self, frame: Frame, connection: FrameSocket) -> Frame | None:
        with self._changed:
            if connection is self._leader:
                if self._has_taken_over:
                    return self._refuse(frame, "this copy has taken over")
            elif connection in self._leaders:
                return self._refuse(frame, "its server has another connection by now")
            elif frame.kind is FrameKind.JOIN:
                self._take_over()
                self._connections[frame.worker] = connection
            elif self._connections.get(frame.worker) is not connection:
                # What a dead process left in the network would else be taken for its successor's.
                return self._refuse(frame, "the worker has another connection by now")
            if flaw := self._state.find_flaw(frame):
                return self._refuse(frame, flaw)
            # Under one lock with the state's own change: the copy applies the same frames in the same order.
            # One that comes again may not have been there the first time: its acknowledgement waits all the same.
            copy = self._copy
            position = copy.position if self._state.is_old(frame) else copy.append(frame)
            self._state.apply(frame)
            if frame.kind is FrameKind.PUSH:
                return None
            self._readable_position = position
            self._changed.notify_all()
            answer = self._describe_position(frame.worker)
        copy.sync(position)
        return answer

    def _resume(self, frame: Frame, connection: FrameSocket) -> Frame:
        with self._changed:
            self._take_over()
            if frame.worker in self._state.clocks:
                self._connections[frame.worker] = connection
                return self._describe_position(frame.worker)
        return self._refuse(frame, "it has not joined")

    def _pull(self, frame: Frame) -> Iterator[Frame]:
        state = self._state
        if frame.table >= len(state.tables):
            yield self._refuse(frame, f"there is no table {frame.table}")
            return
        table = state.tables[frame.table]
        revision = -1
        for part in split_rows(len(frame.keys), table.spec.dim):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_stopped or may_begin(state.clocks, frame.clock, state.max_ahead)
                )
                if self._is_stopped:
                    return
                self._take_over()
                finished = count_finished(state.clocks) if state.clocks else frame.clock
                copy, position = self._copy, self._readable_position
                if table.revision != revision:
                    numbers, revision = table.find(frame.keys), table.revision
                weights = table.read(frame.keys[part], numbers[part]).reshape(-1)
            # Nobody reads what a server's end may take back: a later read would see an older row.
            copy.sync(position)
            yield dataclasses.replace(
                frame, kind=FrameKind.WEIGHTS, clock=finished, keys=NO_KEYS, values=weights, dim=table.spec.dim
            )

    def _describe_position(self, worker: int) -> Frame:
        sequence, clock = self._state.sequences[worker], self._state.clocks.get(worker, 0)
        return Frame(FrameKind.POSITION, worker=worker, sequence=sequence, clock=clock)

    def _refuse(self, frame: Frame, flaw: str) -> Frame:
        logger.error("refused a %s of worker %d: %s", frame.kind.name, frame.worker, flaw)
        return Frame(FrameKind.REFUSAL, worker=frame.worker, keys=NO_KEYS)
