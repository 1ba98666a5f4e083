"""The clusters that a task names, on their way from records into the shards: a number beside each validation sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from kftrain.data.schema import CLUSTER, Block, Record
from kftrain.errors import DataError, UserCodeError
from kftrain.sharding.sources.keyed import hash_name

if TYPE_CHECKING:
    from kftrain.tasks.base import EncodingTask


class Clusters:
    """Clusters of one split: remembers those of records until their blocks come.

    Remembers the clusters of records until their blocks come. Memory: the records in between.
    """

    def __init__(self, task: EncodingTask, split: str) -> None:
        self._task = task
        self._is_known = split == "validation"  # a training block may hold rows of many records
        self._seen: dict[str, int] = {}

    def note_records(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the same records, and remember their clusters."""
        for record in records:
            if self._is_known:
                self._seen[record.key] = number_cluster(name_cluster(self._task, record))
            yield record

    def add_to_block(self, block: Block) -> Block:
        """Return the block with its cluster in each row.

        Raises DataError for a validation block not named as its record.
        """
        number = self._seen.pop(block.key, None) if self._is_known else 0
        if number is None:
            raise DataError(
                "no record of this name, so its cluster is not known",
                where=block.key,
                fix="name validation blocks as their records",
            )
        return Block(block.key, {**block.arrays, CLUSTER: np.full(block.num_rows, number, np.int64)})


def name_cluster(task: EncodingTask, record: Record) -> str:
    """Return the name of the record's cluster; its unit where the task names none.

    Raises UserCodeError where it is no text.
    """
    if not task.names_clusters:
        return record.unit
    name = task.cluster(record)
    if not isinstance(name, str) or not name:
        raise UserCodeError("must return a text that is not empty", where="task.cluster", value=name)
    return name


def number_cluster(name: str) -> int:
    """Return the number that stands for a cluster: 63 bits of a hash, never 0."""
    return (hash_name(name) >> 1) or 1
