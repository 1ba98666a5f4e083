"""The rows of a validation split whose samples become several rows each when they are read: documents, as text.

How many rows each sample has is counted once, by the processes together. After that rows are found by number, as those
of any split are; the few samples that were made last are kept, for batches end within them. Memory: 8 bytes per sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.data.dataset import ShardedDataset
from kftrain.data.schema import CLUSTER, Arrays

if TYPE_CHECKING:
    from kftrain.tasks.base import TrainingTask

KEPT_SAMPLES = 4
"""Number of samples whose rows are kept."""

Gather = Callable[[Any], list[Any]]
"""Collective function from the value of each process to those of all, by rank."""


class Expanded:
    """The rows of a validation split, as a task makes them. All methods may be called from any thread."""

    def __init__(self, dataset: ShardedDataset, task: TrainingTask, num_rows: np.ndarray) -> None:
        """`num_rows`: of each of the first samples, int64; those after them are left out."""
        self._dataset = dataset
        self._task = task
        self._ends = np.cumsum(num_rows)
        self._starts = self._ends - num_rows
        self.num_groups = dataset.num_groups
        self._rows = functools.lru_cache(maxsize=KEPT_SAMPLES)(functools.partial(make_rows, dataset, task))

    @property
    def num_samples(self) -> int:
        """Number of rows."""
        return int(self._ends[-1])

    def read(self, rows: np.ndarray) -> Arrays:
        """Read rows by their number, int64 `[k]`."""
        parts = [self.read_range(row, row + 1)[0] for row in rows.tolist()]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def read_range(self, start: int, stop: int) -> tuple[Arrays, np.ndarray]:
        """Read rows start … stop - 1 in stored order, and the group id of each, int64 `[stop - start]`."""
        numbers = np.arange(start, stop, dtype=np.int64)
        first, last = self._sample_of(numbers[[0, -1]]).tolist()
        parts = []
        for sample in range(first, last + 1):
            within = slice(max(start, self._starts[sample]) - self._starts[sample], stop - self._starts[sample])
            parts.append({name: array[within] for name, array in self._rows(sample).items()})
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return arrays, self.group_of(numbers)

    def group_of(self, rows: np.ndarray) -> np.ndarray:
        """Return group ids, int64 `[k]` in 0 … num_groups - 1, of rows by their number."""
        return self._dataset.group_of(self._sample_of(rows))

    def group_keys(self) -> list[str]:
        """Return the key of each group, in the order of their ids. Raises DataError where a shard is damaged."""
        return self._dataset.group_keys()

    def place_of(self, row: int) -> str:
        """Tell people where the sample of a row lies: the shard and the key. Slow."""
        return self._dataset.place_of(int(self._sample_of(np.array([row]))[0]))

    def _sample_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._ends, rows, side="right")


ValidationRows = ShardedDataset | Expanded
"""Dataset that models are scored on, row by row."""


def expand_rows(
    dataset: ShardedDataset,
    task: TrainingTask,
    gather: Gather = lambda counts: [counts],
    share: tuple[int, int] = (0, 1),
    max_rows: int = 0,
) -> ValidationRows:
    """View a validation split as the rows that a task makes of its samples; as it is where the task makes none.

    Collective: process i of n, for `share` = (i, n), counts the rows of samples i, i + n, … `max_rows`: who reads no
    more than so many of the first rows has the samples after them left out; 0: all are read.
    """
    if make_rows(dataset, task, 0) is None:
        return dataset
    num_counted = min(dataset.num_samples, max_rows or dataset.num_samples)
    samples = range(share[0], num_counted, share[1])
    own = [len(next(iter(make_rows(dataset, task, sample).values()))) for sample in samples]
    num_rows = np.empty(num_counted, np.int64)
    for first, counts in enumerate(gather(own)):
        num_rows[first :: share[1]] = counts
    return Expanded(dataset, task, num_rows)


def make_rows(dataset: ShardedDataset, task: TrainingTask, sample: int) -> Any:
    """Make the rows of one sample, as the task does, each with the sample's cluster; None where it makes none."""
    stored = {name: array[0] for name, array in dataset.read(np.array([sample])).items()}
    cluster = stored.pop(CLUSTER, None)
    rows = task.rows(stored)
    if rows is None or cluster is None:
        return rows
    return {**rows, CLUSTER: np.full(len(next(iter(rows.values()))), cluster, np.int64)}
