"""Rows that go to the servers of another ring while the training goes on: copied in passes, at last between two steps.

Until the next ring is agreed, the server that has a row answers for it, and what others have of it is a copy that
nobody reads. So whoever dies in between, either ring has all rows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kftrain.core.frames import Frame, FrameKind, FrameSocket
from kftrain.core.ring import Ring
from kftrain.errors import RetryableError
from kftrain.server.rows import Keys, build_row_type
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable

PIECE_ROWS = 16_384
"""Rows for which a server does not answer anybody at a time."""


def name_server(number: int) -> str:
    """Return the name of a server on the ring."""
    return f"server-{number}"


def build_ring(num_servers: int) -> Ring:
    """Build the ring of a run with this many servers."""
    return Ring([name_server(number) for number in range(num_servers)])


def pack_rows(table: int, rows: NDArray[np.void], are_candidates: bool, change: int) -> Frame:
    """Put rows into a frame, bit by bit."""
    numbers = rows.view(np.float32).reshape(len(rows), -1)[:, 2:]  # behind the key
    keys = rows["key"].copy()
    return Frame(FrameKind.ROWS, table, sequence=are_candidates, clock=change, keys=keys, values=numbers.ravel())


def unpack_rows(frame: Frame) -> NDArray[np.void]:
    """Return the rows of a frame of at least one."""
    numbers = frame.values.reshape(len(frame.keys), -1)
    whole = np.concatenate([frame.keys.view(np.float32).reshape(-1, 2), numbers], axis=1)
    rows: NDArray[np.void] = whole.view(build_row_type(numbers.shape[1] - 2))[:, 0]
    return rows


class RowMove:
    """The part of one server in a move to a ring of `num_servers`.

    Args:
        state: Its state.
        changed: What guards the state.
        number: The number of the server.
        num_servers: Servers of the next ring.
        connect: Connects to the server of a number.
        change: The number of the change.
    """

    def __init__(
        self,
        state: ServerState,
        changed: threading.Condition,
        number: int,
        num_servers: int,
        connect: Callable[[int], FrameSocket],
        change: int,
    ) -> None:
        self.change = change
        self._is_over = False
        self._state = state
        self._changed = changed
        self._number = number
        self._ring = build_ring(num_servers)
        others = [other for other in range(num_servers) if other != number]
        with contextlib.ExitStack() as stack:
            self._receivers = {other: stack.enter_context(contextlib.closing(connect(other))) for other in others}
            self._stack = stack.pop_all()

    def copy(self) -> int:
        """Copy what was updated since the last pass, or everything; return the number of rows. The servers go on."""
        num_rows = 0
        for number, table in enumerate(self._state.tables):
            with self._changed:
                if self._is_over:  # what it takes would be missing in the change that has begun since
                    raise build_late_error(self._number, self.change)
                updated = table.take_updated()
            keys = np.unique(np.concatenate(updated)) if updated else np.empty(0, np.int64)
            for start in range(0, len(keys), PIECE_ROWS):
                num_rows += self._copy_piece(number, table, keys[start : start + PIECE_ROWS])
        return num_rows

    def finish(self) -> int:
        """Copy the rest between two steps, with the clocks. Raises RetryableError in the middle of one.

        The lock is free meanwhile, for servers wait for each other here; a step that comes all the same is noticed.
        """
        cut = self._find_cut()
        num_rows = self.copy()
        num_tables = len(self._state.tables)
        frame = Frame(FrameKind.CLOCKS, num_tables, clock=self.change, keys=np.array(cut, np.int64))
        for other in self._receivers:
            self._send(other, frame)
        if self._find_cut() != cut:
            raise RetryableError("a step came between", where=name_server(self._number))
        return num_rows

    def _find_cut(self) -> list[int]:
        """Return the updates of each table, then workers and their clocks in turn."""
        with self._changed:
            clocks = self._state.clocks
            if not self._state.is_between_steps or len(set(clocks.values())) > 1:
                raise RetryableError("a step is not over", where=name_server(self._number), value=clocks)
            numbers = [table.num_updates for table in self._state.tables]
            return numbers + [number for item in sorted(clocks.items()) for number in item]

    def close(self) -> None:
        """End the connections; the next move begins anew."""
        self._stack.close()
        with self._changed:
            self._is_over = True
            for table in self._state.tables:
                table.forget_updated()

    def _copy_piece(self, number: int, table: RowTable, keys: Keys) -> int:
        owners = self._ring.find_owners(keys)
        num_rows = 0
        for other in np.setdiff1d(owners, [self._number]).tolist():
            with self._changed:
                copies = table.copy_rows(keys[owners == other])
            for are_candidates, rows in enumerate(copies):
                if rows.size:
                    self._send(other, pack_rows(number, rows, bool(are_candidates), self.change))
                    num_rows += len(rows)
        return num_rows

    def _send(self, other: int, frame: Frame) -> None:
        connection = self._receivers[other]
        connection.send(frame)
        if connection.receive().kind is FrameKind.REFUSAL:
            raise RetryableError("it takes no rows", where=name_server(other), fix="its log says why")


def build_late_error(number: int, change: int) -> RetryableError:
    """Build what a server of this number answers to a message of a change that is over."""
    fix = "nothing is lost; ask for the servers again if they are still wanted"
    return RetryableError("the change is over", where=name_server(number), value=change, fix=fix)


def take_clocks(state: ServerState, frame: Frame) -> str:
    """Take the clocks and counts of updates that came with rows into a state; return why they do not fit, or ''."""
    updates, pairs = frame.keys[: frame.table].tolist(), frame.keys[frame.table :].tolist()
    clocks = dict(zip(pairs[::2], pairs[1::2], strict=True))
    counts = [table.num_updates for table in state.tables]
    if state.clocks and (state.clocks, counts) != (clocks, updates):
        return f"it is at {state.clocks}, {counts} where others are at {clocks}, {updates}"
    state.clocks.update(clocks)
    for table, num_updates in zip(state.tables, updates, strict=True):
        table.take_num_updates(num_updates)
    return ""


def drop_foreign_rows(
    tables: Sequence[RowTable], changed: threading.Condition, is_owned: Callable[[Keys], NDArray[np.bool_]]
) -> None:
    """Remove the rows of other servers, a piece at a time."""
    for table in tables:
        with changed:
            all_keys = np.concatenate([rows["key"] for rows in table.view().values()])
        for start in range(0, len(all_keys), PIECE_ROWS):
            keys = all_keys[start : start + PIECE_ROWS]
            with changed:
                table.remove_keys(keys[~is_owned(keys)])
