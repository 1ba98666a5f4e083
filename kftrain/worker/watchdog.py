"""The watchdog of a node: it finds processes that hang, and the one that the others wait for. No torch here.

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

from kftrain.errors import HangError
from kftrain.process import liveness
from kftrain.process.liveness import BEAT_SECONDS, Beat

LOOK_SECONDS = 1.0
STACK_SECONDS = 1.0
"""Seconds that the processes have to write their stacks before they are killed."""

ALONE = 2.0
"""Timeouts that may pass between two collective operations while all processes of a node are at the same place: they
compute, or wait for another node, whose own supervisor knows more."""

MIN_SILENCE_SECONDS = 10 * BEAT_SECONDS
"""Shortest silence in seconds that counts as a hang: a busy machine may skip some beats."""

SILENT = "stopped or blocked, no sign of life"


@dataclass(frozen=True)
class Hang:
    """A hang: its error, and the first rank that it is about."""

    error: HangError
    rank: int


def find_hang(beats: Mapping[int, Beat], now: float, timeout_seconds: float) -> Hang | None:
    """Return the hang of a node's processes, or None if they get on.

    Args:
        beats: Rank -> last beat, for all processes of this node.
        now: Seconds on the monotonic clock of the beats.
        timeout_seconds: How long a process may wait for another one.
    """
    # The surest sign comes first. Who is silent is stuck whatever it has counted, and its numbers are old.
    watched = {rank: beat for rank, beat in beats.items() if beat.watched}
    silence = max(timeout_seconds, MIN_SILENCE_SECONDS)
    silent = {rank for rank, beat in watched.items() if now - beat.alive_at >= silence}
    if silent:
        return _describe_hang(silent, f"{SILENT} for {silence:g} s")
    counted = {rank: beat for rank, beat in watched.items() if beat.counted}
    still = min((now - beat.progress_at for beat in counted.values()), default=0.0)
    if still < timeout_seconds:  # somebody moves: others may wait for it, but it gets on
        return None
    # All stand still. Who rests may do so for as long as it likes, but not while others wait for it: a wait in a
    # collective operation is bounded, and would end with an error on the processes that are not at fault.
    resting = {rank for rank, beat in beats.items() if beat.watched_at and not beat.watched}
    if resting:
        return _describe_hang(resting, f"in validation, a checkpoint or its end, while others wait for {still:.0f} s")
    # Collective operations are begun in the same order everywhere: who has begun the fewest has not come to the one
    # that the others are in. Their ends say nothing, they may be noted in another order.
    least = min(beat.num_collectives for beat in counted.values())
    behind = {rank for rank, beat in counted.items() if beat.num_collectives == least}
    # Behind, and without a sign of life for most of that time: not slow, but stopped. Half, as the silence of a process
    # begins up to a beat after its last operation.
    silent = {rank for rank in behind if now - counted[rank].alive_at > still / 2}
    if silent and len(behind) < len(counted):
        return _describe_hang(silent, f"{SILENT} while others wait for {still:.0f} s")
    if len(behind) < len(counted):
        return _describe_hang(behind, f"no progress for {still:.0f} s, while others wait")
    # All have begun as many. In different ones, they wait for each other for good; in the same one, or in none, they
    # compute or wait for another node: they get more time, and that node's supervisor is first to say what is wrong.
    operations = {rank: beat.operation for rank, beat in counted.items() if beat.operation}
    if len(set(operations.values())) > 1:
        return _describe_mismatch(operations, still)
    return _describe_hang(behind, f"no progress for {still:.0f} s") if still >= ALONE * timeout_seconds else None


class Watchdog:
    """Reads the beats of a node's processes and judges whether they hang."""

    def __init__(self, folder: Path, ranks: range, timeout_seconds: float) -> None:
        self._paths = {rank: folder / str(local_rank) for local_rank, rank in enumerate(ranks)}
        self._timeout_seconds = timeout_seconds

    def look(self) -> Hang | None:
        """Read all beats; return the hang of the processes, or None if they get on."""
        beats = {rank: liveness.read_beat(path) for rank, path in self._paths.items()}
        return find_hang(beats, time.monotonic(), self._timeout_seconds)


def end_with_stacks(processes: Sequence[psutil.Process]) -> None:
    """Let the processes write their stacks to their logs, then kill them."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(liveness.STACK_SIGNAL)
    time.sleep(STACK_SECONDS)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _describe_mismatch(operations: Mapping[int, str], still_seconds: float) -> Hang:
    """Describe ranks that wait for each other in different operations; those that differ from most come first."""
    ranks_of: dict[str, list[int]] = {}
    for rank, operation in sorted(operations.items()):
        ranks_of.setdefault(operation, []).append(rank)
    places = sorted(ranks_of.items(), key=lambda place: (len(place[1]), place[1]))
    text = ", ".join(f"{_join_ranks(ranks)} in {operation}" for operation, ranks in places)
    error = HangError(
        f"the processes have called different collective operations, and wait for {still_seconds:.0f} s: {text}",
        fix="the logs of those ranks say where they stand; all of them must call the same ones in the same order",
    )
    return Hang(error, places[0][1][0])


def _join_ranks(ranks: Sequence[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, sorted(ranks)))}"


def _describe_hang(ranks: set[int], how: str) -> Hang:
    error = HangError(
        f"{_join_ranks(list(ranks))}: {how}",
        fix="the log of that rank says where it stands; if it was only slow, raise launch.timeout_seconds",
    )
    return Hang(error, min(ranks))
