"""The state of one server: each change is a frame, and the same frames give the same state."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from kftrain.core.frames import Frame, FrameKeys, FrameKind, FrameValues
from kftrain.server.clock import count_finished
from kftrain.server.table import RowTable

RECORDED = frozenset({FrameKind.JOIN, FrameKind.PUSH, FrameKind.FINISH})
"""Frames that change the state."""


class ServerState:
    """Tables, clocks of the workers, and what each worker was last heard to have sent.

    Args:
        tables: The tables, by their numbers.
        max_ahead: The clock rule's; at 0 the gradients of a step are summed over the workers, in their order, and make
            one update when the last worker has finished the step. Else what a worker pushed in a step is one update
            when it has finished the step.

    Under every rule a worker's step is in the tables as a whole or not at all: of one who begins anew in the middle of
    a step nothing of that step stays, so that whoever does the step again does it once.
    """

    def __init__(self, tables: Sequence[RowTable], max_ahead: int | None) -> None:
        self.tables = tables
        self.max_ahead = max_ahead
        self.clocks: dict[int, int] = {}
        self.sequences: dict[int, int] = defaultdict(int)
        self._waiting: list[Frame] = []

    def find_flaw(self, frame: Frame) -> str:
        """Describe why a frame cannot be applied; empty if it can, or was already."""
        if frame.kind is FrameKind.JOIN or self.is_old(frame):  # a JOIN has no sequence, and does the same twice
            return ""
        if frame.worker not in self.clocks:
            return f"worker {frame.worker} has not joined"
        if frame.sequence != self.sequences[frame.worker] + 1:
            return f"sequence {frame.sequence} follows {self.sequences[frame.worker]}: a frame is lost"
        if frame.kind is FrameKind.PUSH:
            return self._find_flaw_of_push(frame)
        if frame.kind is FrameKind.FINISH and frame.clock != self.clocks[frame.worker]:
            return f"step {frame.clock} ends in step {self.clocks[frame.worker]}"
        return ""

    def is_old(self, frame: Frame) -> bool:
        """Return True if a frame came before: it is sent again after a lost connection and changes nothing."""
        return frame.kind is not FrameKind.JOIN and frame.sequence <= self.sequences[frame.worker]

    def apply(self, frame: Frame) -> None:
        """Apply a frame without a flaw; one that came before does nothing."""
        if self.is_old(frame):
            return
        if frame.kind is FrameKind.JOIN:
            self._drop_unfinished(frame.worker)
            self.clocks.setdefault(frame.worker, count_finished(self.clocks))
            return
        self.sequences[frame.worker] = frame.sequence
        if frame.kind is FrameKind.PUSH:
            # The clock is the step's, for a worker may push for the next step before the slowest has ended this one.
            self._waiting.append(dataclasses.replace(frame, clock=self.clocks[frame.worker]))
            return
        self.clocks[frame.worker] += 1
        self._update_finished_steps()

    def _drop_unfinished(self, worker: int) -> None:
        # Nobody was told that these pushes are safe, and whoever takes the worker's place makes them again.
        clock = self.clocks.get(worker)
        self._waiting = [frame for frame in self._waiting if (frame.worker, frame.clock) != (worker, clock)]

    def _find_flaw_of_push(self, frame: Frame) -> str:
        if frame.table >= len(self.tables):
            return f"there is no table {frame.table}"
        if frame.values.size != frame.keys.size * self.tables[frame.table].spec.dim:
            return f"{frame.values.size} values for {frame.keys.size} keys"
        # Workers send keys in ascending order, which is quicker to see than that they are distinct.
        is_distinct = (frame.keys[1:] > frame.keys[:-1]).all() or np.unique(frame.keys).size == frame.keys.size
        return "" if is_distinct else "a key comes twice in a push"

    def _update_finished_steps(self) -> None:
        groups = defaultdict(list)
        still_waiting = []
        for frame in self._waiting:
            if self._is_due(frame):
                worker = 0 if self.max_ahead == 0 else frame.worker
                groups[frame.clock, worker, frame.table].append(frame)
            else:
                still_waiting.append(frame)
        self._waiting = still_waiting
        for (_, _, number), frames in sorted(groups.items()):
            frames.sort(key=lambda frame: (frame.worker, frame.sequence))
            table = self.tables[number]
            table.update_in_parts(sum_pushes(frames, table.spec.dim))

    def _is_due(self, frame: Frame) -> bool:
        return frame.clock < (count_finished(self.clocks) if self.max_ahead == 0 else self.clocks[frame.worker])

    @property
    def is_between_steps(self) -> bool:
        """True if no gradients wait for the end of a step."""
        return not self._waiting


def sum_pushes(frames: Sequence[Frame], dim: int) -> list[tuple[FrameKeys, FrameValues]]:
    """Sum gradients of several pushes, in their order, to parts (keys, gradients (keys, dim)) without a common key."""
    all_keys = np.concatenate([frame.keys for frame in frames])
    if len(frames) == 1 or (all_keys[1:] > all_keys[:-1]).all():
        return [(frame.keys, frame.values.reshape(-1, dim)) for frame in frames]
    keys = np.unique(all_keys)
    total = np.zeros((len(keys), dim), np.float32)
    for frame in frames:
        total[np.searchsorted(keys, frame.keys)] += frame.values.reshape(-1, dim)
    return [(keys, total)]
