"""The work of a sharding job's process: it encodes its share of a source's parts. It never lists the source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

from kftrain.config import Config
from kftrain.core.progress import to_log
from kftrain.errors import DataError
from kftrain.process.machine import num_cpus
from kftrain.run import documents
from kftrain.run.documents import SHARES_ENV, PartShare
from kftrain.run.paths import RunPaths
from kftrain.sharding.parts import pool

PROCESS_BYTES = 32_000_000
"""Bytes below which a process of its own costs more than it saves."""

PartType = TypeVar("PartType")


def encode_share(paths: RunPaths, config: Config) -> None:
    """Encode the parts of this process's share that nobody has encoded yet. Raises as `PartStore.encode` does.

    Raises DataError for another share than the job was started for: it may name files that are nobody's to read.
    """
    rank = int(os.environ["RANK"])
    uri = paths.share(config.digest(), rank)
    share = documents.read(PartShare, uri)
    if share.digest != os.environ[SHARES_ENV].split(",")[rank]:
        raise DataError("this is not the share that the job was started for", where=uri, fix="run again")
    cpus = max(1, num_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    num_processes = count_processes([job["size_bytes"] for job in share.jobs], config.data.processes, cpus)
    answers = pool.map_jobs(share.jobs, make_first_message(config, share, paths.encoded_parts), num_processes)
    for count, (_, answer) in enumerate(answers, 1):
        to_log(f"part {count} of {len(share.jobs)} of this share {'was there' if answer['reused'] else 'is encoded'}")


def share_parts(parts: Sequence[PartType], num_shares: int) -> list[Sequence[PartType]]:
    """Share out parts, largest first: then no two shares differ by more bytes than the largest part has. Pure."""
    return [parts[rank::num_shares] for rank in range(num_shares)]


def make_first_message(config: Config, share: PartShare, pending: str = "") -> dict[str, Any]:
    """Build what a process that encodes parts is told first. `pending`: see `PartStore`."""
    return {"config": config.to_dict(), "pending": pending, **share.model_dump(mode="json", exclude={"jobs"})}


def count_processes(sizes: Sequence[int], configured: int, cpus: int) -> int:
    """Return how many processes encode parts of these sizes; with `configured` 0 as many as pay."""
    return max(1, min(len(sizes), configured or min(cpus, 1 + sum(sizes) // PROCESS_BYTES)))
