"""Attempts: who may write into a run.

An attempt is a claim, `attempts/<n>.json`, created exclusively by rank 0 when it starts. The highest claim holds the
run. Whoever finds a higher one than its own is fenced: a paused node that comes back, or a second job of the same run,
can no longer commit anything.

The restart budget follows from the same files: a claim records the step of the last commit that it found, so a claim
with the same step as the one before says that the attempt before made no progress.
"""

from __future__ import annotations

import os
import socket
import time
import uuid

from kftrain.core import storage
from kftrain.core.records import NumberedRecords
from kftrain.errors import DataError, FencedError
from kftrain.run import documents
from kftrain.run.paths import RunPaths


class Claim(documents.Document):
    """`attempts/<n>.json`: one attempt took the run, from this step and on this host."""

    attempt: int
    start_step: int
    """Step of the last committed checkpoint when the attempt began; 0: none."""
    world_size: int
    host: str
    process_id: int
    start_time: float
    """Seconds since the epoch, by the clock of `host`."""
    token: str = ""
    """Random text that makes the content unique: where a store's answer is lost, reading back shows whose claim won."""


def _open_records(paths: RunPaths) -> NumberedRecords[Claim]:
    return NumberedRecords(paths.attempts, lambda uri: documents.read(Claim, uri))


def find_last_attempt(paths: RunPaths) -> int:
    """Return the number of the highest claim; 0 where there is none."""
    return _open_records(paths).last_number()


def read_claims(paths: RunPaths) -> list[Claim]:
    """Read all claims of a run in order; leave out those that cannot be read."""
    return _open_records(paths).read_all(DataError)


def claim_run(paths: RunPaths, start_step: int, world_size: int) -> int:
    """Take the run: create the next claim and return its number. Racing processes get different numbers."""
    number = find_last_attempt(paths) + 1
    # The listing may be old by now. Only the exclusive creation decides, so a number that is taken leads to the next
    # one: claims stay without gaps, which `require_held` relies on.
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
        if _open_records(paths).append(number, document):
            return number
        number += 1


def require_held(paths: RunPaths, attempt: int) -> None:
    """Raise FencedError if a newer attempt than `attempt` holds the run.

    Claims have no gaps, so one look is enough.
    """
    if storage.exists(paths.attempt(attempt + 1)):
        raise FencedError(
            f"{FencedError.BY_ATTEMPT}; nothing more is written by this one",
            where=paths.uri,
            value=f"attempt {attempt}, the newest is {find_last_attempt(paths)}",
        )


def read_last_start_step(paths: RunPaths) -> int:
    """Return the step that the newest attempt began at; -1 where there was none.

    It grows exactly when the attempt before made progress.
    """
    last = _open_records(paths).read_last()
    return last.start_step if last else -1


def count_without_progress(paths: RunPaths, since: int) -> int:
    """Count the newest attempts, later than number `since`, that began at the same step."""
    records = _open_records(paths)
    steps = [records.read(number).start_step for number in range(since + 1, records.last_number() + 1)]
    return next((count for count, step in enumerate(reversed(steps)) if step != steps[-1]), len(steps))
