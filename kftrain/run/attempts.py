"""Attempts: who may write into a run.

An attempt is a claim, `attempts/<n>.json`, created exclusively by rank 0 when it starts. The highest claim holds the
run. Whoever finds a higher one than its own is fenced: a paused node that comes back, or a second job of the same run,
can no longer commit anything.

The restart budget follows from the same files: a claim records the step of the last commit that it found, so a claim
with the same step as the one before says that the attempt before made no progress.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid

from kftrain import storage
from kftrain.errors import DataError, FencedError
from kftrain.run import documents
from kftrain.run.paths import RunPaths


class Claim(documents.Document):
    """`attempts/<n>.json`."""

    attempt: int
    start_step: int
    """Step of the last committed checkpoint when the attempt began; 0: none."""
    world_size: int
    host: str
    process_id: int
    start_time: float
    """Seconds since the epoch."""
    token: str = ""
    """Of this claim alone: an object store that lost an answer is asked by the content whose claim it holds."""


def last_attempt(paths: RunPaths) -> int:
    """Number of the highest claim; 0 where there is none."""
    return storage.last_number(paths.attempts)


def claims(paths: RunPaths) -> list[Claim]:
    """All claims of a run in order; one that cannot be read is left out."""
    found = []
    for number in range(1, last_attempt(paths) + 1):
        with contextlib.suppress(DataError):
            found.append(documents.read(Claim, paths.attempt(number)))
    return found


def claim(paths: RunPaths, start_step: int, world_size: int) -> int:
    """Takes the run: creates the next claim and returns its number. Racing processes get different numbers."""
    number = last_attempt(paths) + 1
    while True:
        document = Claim(
            attempt=number,
            start_step=start_step,
            world_size=world_size,
            host=socket.gethostname(),
            process_id=os.getpid(),
            start_time=time.time(),
            token=uuid.uuid4().hex,
        )
        try:
            storage.create_json(paths.attempt(number), document.to_dict())
            return number
        except FileExistsError:
            number += 1


def require_held(paths: RunPaths, attempt: int) -> None:
    """Raises FencedError if a newer attempt than `attempt` holds the run.

    Claims have no gaps, so one look is enough.
    """
    if storage.exists(paths.attempt(attempt + 1)):
        raise FencedError(
            f"{FencedError.BY_ATTEMPT}; nothing more is written by this one",
            where=paths.uri,
            value=f"attempt {attempt}, the newest is {last_attempt(paths)}",
        )


def last_start_step(paths: RunPaths) -> int:
    """Step that the newest attempt began at; -1 where there was none.

    It grows exactly when the attempt before made progress.
    """
    number = last_attempt(paths)
    return documents.read(Claim, paths.attempt(number)).start_step if number else -1


def num_without_progress(paths: RunPaths, since: int) -> int:
    """How many of the newest attempts, later than number `since`, began at the same step."""
    steps = [documents.read(Claim, paths.attempt(n)).start_step for n in range(since + 1, last_attempt(paths) + 1)]
    return next((count for count, step in enumerate(reversed(steps)) if step != steps[-1]), len(steps))
