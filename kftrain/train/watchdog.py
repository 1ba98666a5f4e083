"""Whether the processes of a node hang, and which of them is the one that the others wait for. No torch here.

A collective operation that some process never enters would end by its timeout, on all the others: the one that is stuck
would be the last to be named, and its stack never seen. So the supervisor looks from outside, a little earlier.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from kftrain.errors import HangError, KftrainError, RetryableError
from kftrain.train import pulse
from kftrain.train.pulse import Beat
from kftrain.train.verdict import LOST_PEER

LOOK_SECONDS = 1.0
STACK_SECONDS = 1.0
"""How long the processes have to write their stacks before they are killed."""

ALONE = 2.0
"""A process that no other one on its node waits for may take so many timeouts between two collective operations."""


@dataclass(frozen=True)
class Hang:
    """What is wrong, and the first of the processes that it is about."""

    error: KftrainError
    rank: int


def found(beats: Mapping[int, Beat], now: float, timeout_seconds: float, nodes: int) -> Hang | None:
    """The hang of a node's processes, if there is one.

    Args:
        beats: By rank; all processes of this node.
        now: Seconds on the monotonic clock of the beats.
        timeout_seconds: How long a process may wait for another one.
        nodes: How many nodes the job has: the cause may be on another one.
    """
    watched = {rank: beat for rank, beat in beats.items() if beat.watched}
    silent = {rank for rank, beat in watched.items() if now - beat.alive_at >= timeout_seconds}
    if silent:
        return _hang(silent, f"stopped or blocked: no sign of life for {timeout_seconds:g} s")
    counted = {rank: beat for rank, beat in watched.items() if beat.counted}
    still = {rank for rank, beat in counted.items() if now - beat.progress_at >= timeout_seconds}
    long_still = {rank for rank in still if now - counted[rank].progress_at >= ALONE * timeout_seconds}
    waiting = {rank for rank in still if counted[rank].waits}
    if not waiting and not long_still:
        return None
    least = min(beat.num_collectives for beat in counted.values())
    behind = {rank for rank in still if counted[rank].num_collectives == least and not counted[rank].waits}
    if behind:
        return _hang(behind, f"no progress for {timeout_seconds:g} s, while others wait")
    if nodes > 1:
        what = f"{LOST_PEER}: all on this node have waited {timeout_seconds:g} s for another node"
        return Hang(RetryableError(what), min(still))
    return _hang(still, f"wait for each other since {timeout_seconds:g} s")


class Watchdog:
    """Looks after the processes of a node."""

    def __init__(self, folder: Path, ranks: range, timeout_seconds: float, nodes: int) -> None:
        self._paths = {rank: folder / str(local_rank) for local_rank, rank in enumerate(ranks)}
        self._timeout_seconds, self._nodes = timeout_seconds, nodes

    def look(self) -> Hang | None:
        """What is wrong with the processes now."""
        beats = {rank: pulse.read(path) for rank, path in self._paths.items()}
        return found(beats, time.monotonic(), self._timeout_seconds, self._nodes)


def end_with_stacks(processes: Sequence[psutil.Process]) -> None:
    """Lets the processes write where they stand, then kills them."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(pulse.STACK_SIGNAL)
    time.sleep(STACK_SECONDS)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _hang(ranks: set[int], how: str) -> Hang:
    names = ", ".join(map(str, sorted(ranks)))
    error = HangError(
        f"{'ranks' if len(ranks) > 1 else 'rank'} {names}: {how}",
        fix="the log of that rank says where it stands; if it was only slow, raise launch.timeout_seconds",
    )
    return Hang(error, min(ranks))
