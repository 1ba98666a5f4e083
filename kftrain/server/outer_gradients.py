"""Outer gradients of islands on a server: it keeps the blocks that it is sent until they are in a mean."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict

import numpy as np

from kftrain.core.frames import Frame, FrameKind, FrameValues
from kftrain.core.row_encodings import RowEncoding, round_up_or_down
from kftrain.errors import RetryableError
from kftrain.server.rounds import RoundRules, Rounds

Block = tuple[int, int]
"""The part of an island's vector that one of its processes has, and a piece of that."""

ISLAND_KINDS = (FrameKind.GRADIENT, FrameKind.MEET, FrameKind.MEAN)
"""Kinds of the frames that islands send."""

FIX = "the next attempt goes on from the last checkpoint"


class OuterGradients:
    """Rounds and gradients of one attempt of a run with islands.

    Args:
        rules: The rules of the rounds.
        first_round: Rounds of all islands before this attempt.
        seed: What the noise that rounds means to int8 follows from, with the block and the update.
    """

    def __init__(self, rules: RoundRules, first_round: int, seed: int) -> None:
        self._num_islands = rules.num_islands
        self._seed = seed
        self._rounds = Rounds(rules, first_round)
        self._changed = threading.Condition()
        self._is_closed = False
        self._gradients: dict[tuple[Block, int, int], FrameValues] = {}
        self._means: dict[Block, dict[int, FrameValues]] = defaultdict(dict)
        self._wanted: dict[Block, list[int]] = defaultdict(lambda: [-1] * rules.num_islands)
        """The last update of each block that each island has asked for."""

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def answer(self, frame: Frame) -> Frame:
        """Do what a frame of ISLAND_KINDS asks for; return the answer. Raises RetryableError where that cannot be."""
        if flaw := self._find_flaw(frame):
            raise RetryableError(flaw, where="an island", fix=FIX)
        methods = {FrameKind.GRADIENT: self._take, FrameKind.MEET: self._meet, FrameKind.MEAN: self._send_mean}
        return methods[frame.kind](frame)

    def _find_flaw(self, frame: Frame) -> str:
        """Describe why the keys of a frame mean nothing; empty where they do."""
        keys, is_odd = frame.keys, frame.keys.size % 2 == 1
        if not keys.size or not 0 <= keys[0] < self._num_islands:
            return f"there is no island {keys[:1].tolist()}"
        is_whole = {FrameKind.GRADIENT: keys.size == 1, FrameKind.MEET: keys.size == 2, FrameKind.MEAN: is_odd}
        has_members = frame.kind is not FrameKind.MEAN or keys.size > 1
        return (
            "" if is_whole[frame.kind] and has_members and keys.min() >= 0 else f"{keys.size} keys are not what it has"
        )

    def _take(self, frame: Frame) -> Frame:
        """Keep a block of a gradient."""
        island, block = int(frame.keys[0]), (frame.table, frame.sequence)
        with self._changed:
            # One that comes again after a lost connection may be in a mean by now.
            if frame.clock > self._rounds.announced[island]:
                self._gradients[block, island, frame.clock] = frame.values
        return Frame(FrameKind.POSITION, clock=frame.clock)

    def _meet(self, frame: Frame) -> Frame:
        """Announce a round, and answer once the island may go on. Raises RetryableError."""
        island, num_known = frame.keys.tolist()
        number, rounds = frame.clock, self._rounds
        with self._changed:
            if flaw := rounds.find_flaw(island, number):
                raise RetryableError(flaw, where="an island", fix=FIX)
            rounds.announce(island, number, bool(frame.table & 1), bool(frame.table & 2))
            self._changed.notify_all()  # the others may have waited for this one
            while not self._is_closed and rounds.announced[island] == number and not rounds.is_answered(island):
                if rounds.merge(time.monotonic()):
                    self._changed.notify_all()
                else:
                    seconds = rounds.count_grace(time.monotonic())
                    self._changed.wait(None if seconds is None else min(seconds, threading.TIMEOUT_MAX))
            if self._is_closed:
                raise RetryableError("another attempt has begun", where=f"island {island}", fix=FIX)
            updates, is_meeting = rounds.list_updates(num_known), int(rounds.is_meeting(number))
        keys = [number for members in updates for number in (len(members), *np.ravel(members).tolist())]
        return Frame(FrameKind.UPDATES, is_meeting, clock=number, keys=np.array(keys, np.int64))

    def _send_mean(self, frame: Frame) -> Frame:
        """Answer with the mean of the gradients of an update. Raises RetryableError where one is not there."""
        island, *members = frame.keys.tolist()
        block, update = (frame.table, frame.sequence), frame.clock
        with self._changed:
            wanted, means = self._wanted[block], self._means[block]
            if update not in means:
                means[update] = self._average(frame, list(zip(members[::2], members[1::2], strict=True)))
            # One that is asked for once more after a lost connection is still there: it goes with the one behind it.
            wanted[island] = update
            for old in [number for number in means if number < min(wanted)]:
                del means[old]
        return dataclasses.replace(frame, kind=FrameKind.MEAN, keys=frame.keys[:0], values=means[update])

    def _average(self, frame: Frame, members: list[tuple[int, int]]) -> FrameValues:
        block = frame.table, frame.sequence
        parts = [self._gradients[key] for member in members if (key := (block, *member)) in self._gradients]
        if len(parts) < len(members):
            raise RetryableError("an outer gradient is not there", where=f"block {block}", value=members, fix=FIX)
        if len({part.size for part in parts}) > 1 or parts[0].size % (frame.dim or 1):
            raise RetryableError("outer gradients have other lengths", where=f"block {block}", value=members, fix=FIX)
        for member in members:  # now that nothing is wrong: another island may ask for the same mean
            self._gradients.pop((block, *member), None)
        mean: FrameValues = parts[0].copy()
        for part in parts[1:]:
            mean += part
        mean /= np.float32(len(parts))
        if frame.encoding is not RowEncoding.INT8:
            return mean
        # By chance, so that the mean of means is right: nobody carries over what this one has lost.
        noise = np.random.default_rng([self._seed, *block, frame.clock]).random(mean.shape, np.float32)
        rounded: FrameValues = round_up_or_down(mean, frame.dim, noise).reshape(-1)
        return rounded
