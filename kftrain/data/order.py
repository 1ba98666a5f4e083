"""Which sample stands where in the training order, and which rank takes which part of a step. Pure numpy, no files.

Positions count samples from the start of training: position p is number p mod N of epoch p // N. Steps run
across the border of epochs, so training needs no padding for a dataset that is no multiple of the batch. The
order is a function of the number of samples and the seed; shards, ranks, prefetching and restarts only choose
which positions are looked up, and where a sample lies.

Each epoch cuts the samples into ranges that follow each other, from another sample on than the epoch before,
and permutes the ranges. Windows of ranges that follow each other in that order permute their samples. So a
reader touches the ranges of one window at a time, yet neighbours in the order come from all of them. With lanes
(order 3; without them it is order 2) each slot of a batch sees the samples of a part of the window: see `lanes`.

A window is a table, computed when a position of it is asked for the first time; looking one up is an index.
The tables of the last few windows are all that is kept: nothing here grows with the number of samples.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kftrain.data import permutation
from kftrain.data.lanes import Lanes
from kftrain.data.length_groups import LengthGroups
from kftrain.errors import ConfigError

KEPT_WINDOWS = 4
"""Number of tables that are kept: what is read ahead, and by other threads, lies in the next window at most."""


class Order(Protocol):
    """Order of samples: a number at each position."""

    @property
    def num_samples(self) -> int:
        """Number of samples that there are to be located."""

    def locate(self, positions: np.ndarray) -> np.ndarray:
        """Return the sample at each position, int64 `[k]`; positions count from the start of training."""


@dataclass(frozen=True)
class _Window:
    """Positions that follow each other, and their samples in the order of training."""

    start: int
    stop: int
    samples: np.ndarray


class TrainingOrder:
    """The order in which training sees samples: position -> number of the sample in its split, for all epochs."""

    def __init__(
        self,
        num_samples: int,
        seed: int,
        range_samples: int,
        window_ranges: int,
        name: str = "",
        groups: LengthGroups | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        """`range_samples`: that stay neighbours; `window_ranges`: ranges that are mixed. `name`: orders apart.

        `groups`: by length, within a window. `lanes`: of order 3; a dataset that fits into a window has none.
        """
        assert num_samples > 0 and range_samples > 0 and window_ranges > 0
        self.num_samples = num_samples
        """Samples of one epoch."""
        self.range_samples = min(range_samples, num_samples)
        """Samples that follow each other in the dataset and share a window; the last range of an epoch has fewer."""
        self._num_whole = num_samples // self.range_samples
        self._num_ranges = -(-num_samples // self.range_samples)
        most_ranges = window_ranges
        if lanes and self._num_ranges > window_ranges:
            most_ranges = lanes.widen_window(window_ranges, self.range_samples, self._num_ranges)
        # Windows begin at multiples of this, so that each lane has whole ranges; what is left goes to the last one.
        self._unit_ranges = min(lanes.num_lanes if lanes else 1, self._num_ranges)
        self._unit_samples = self._unit_ranges * self.range_samples
        self._num_units = self._num_ranges // self._unit_ranges
        self._num_windows = -(-self._num_units * self._unit_ranges // most_ranges)
        self.window_ranges = -(-self._num_units // self._num_windows) * self._unit_ranges
        self.window_ranges += self._num_ranges % self._unit_ranges
        """Most ranges of a window."""
        self._lanes = lanes if self._num_ranges > most_ranges else None
        self._key = permutation.derive_key(f"training order 2/{name}/{num_samples}/{seed}")
        self._groups = groups
        self._window = functools.lru_cache(maxsize=KEPT_WINDOWS)(self._make_window)
        self._arguments = (num_samples, seed, range_samples, window_ranges, name, groups, lanes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process make its own tables."""
        return TrainingOrder, self._arguments

    def locate(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the samples, int64 `[k]`, at positions int64 `[k]` of any epochs."""
        # The reductions themselves: for a batch, the methods around them take as long as the rest of a lookup.
        window = self._find_window(int(np.minimum.reduce(positions)))
        if np.maximum.reduce(positions) < window.stop:
            numbers: np.ndarray = window.samples[positions - window.start]
            return numbers
        located, missing = np.empty(len(positions), np.int64), np.arange(len(positions))
        while missing.size:
            window = self._find_window(int(positions[missing].min()))
            is_inside = positions[missing] < window.stop
            chosen, missing = missing[is_inside], missing[~is_inside]
            located[chosen] = window.samples[positions[chosen] - window.start]
        return located

    def _find_window(self, position: int) -> _Window:
        epoch, offset = divmod(position, self.num_samples)
        unit = min(offset // self._unit_samples, self._num_units - 1)
        return self._window(epoch, ((unit + 1) * self._num_windows - 1) // self._num_units)

    def _find_edge(self, number: int) -> int:
        """Return the first range of a window, counted through its epoch; of the one after the last their number."""
        if number == self._num_windows:
            return self._num_ranges
        return number * self._num_units // self._num_windows * self._unit_ranges

    def _make_window(self, epoch: int, number: int) -> _Window:
        """Make the table of a window."""
        first, last = self._find_edge(number), self._find_edge(number + 1)
        start, stop = first * self.range_samples, min(last * self.range_samples, self.num_samples)
        epoch_key = permutation.derive_subkeys(self._key, np.array([epoch], np.uint64))
        # The keys depend on epoch and window alone: any process computes any window without those before it.
        starts = self._range_starts(np.arange(first, last), epoch_key) % self.num_samples
        stored = (starts[:, None] + np.arange(self.range_samples)).ravel()[: stop - start]
        if starts.max() + self.range_samples > self.num_samples:  # a range goes on from the last sample to the first
            stored %= self.num_samples
        window_key = permutation.derive_subkeys(permutation.mix(epoch_key), np.array([number], np.uint64))
        first_position = epoch * self.num_samples + start
        samples = self._shuffle(stored, first_position, window_key)
        return _Window(first_position, first_position + len(stored), samples)

    def _shuffle(self, stored: np.ndarray, first_position: int, key: np.ndarray) -> np.ndarray:
        """Return the samples of a window in the order of training; `stored`: as they lie in its ranges."""
        lanes = None if self._lanes is None else self._lanes.find_lanes(first_position, len(stored))
        samples = np.empty_like(stored)
        if lanes is None:
            samples = stored[permutation.shuffle(len(stored), key)]
        else:
            samples[permutation.shuffle_groups(lanes, key)] = stored
        if self._groups is None:
            return samples
        return self._groups.sort_by_length(samples, first_position, permutation.mix(key), lanes)

    def _range_starts(self, slots: np.ndarray, epoch_key: np.ndarray) -> np.ndarray:
        """Return the first sample of the range in each slot, int64; after the last sample comes the first one.

        Where the ranges do not fill the epoch, the short one is the last.
        """
        ranges = slots.astype(np.uint64)
        whole = ranges[ranges < self._num_whole]
        size = np.full(len(whole), self._num_whole, np.uint64)
        ranges[: len(whole)] = permutation.permute(whole, size, np.repeat(permutation.mix(~epoch_key), len(whole)))
        shift = int(permutation.mix(epoch_key + np.uint64(1))[0]) % self.num_samples
        return ranges.astype(np.int64) * self.range_samples + shift


class BatchPlan:
    """Cut of the samples of an optimizer step: contiguous parts for the ranks, equal micro batches within each.

    All ranks run the same number of micro batches of the same number of rows, so that none waits in a collective alone.
    Where the samples do not divide, rows are filled up with padding of weight 0.
    """

    def __init__(self, global_batch_size: int, num_ranks: int, micro_batch_size: int = 0) -> None:
        """`micro_batch_size`: most rows of a micro batch; 0: a rank's whole share at once. Raises ConfigError."""
        if num_ranks > global_batch_size:
            raise ConfigError(
                f"{num_ranks} processes cannot share a global batch of {global_batch_size} samples",
                where="train.global_batch_size",
                value=global_batch_size,
                fix=f"set it to at least {num_ranks}, or use fewer processes",
            )
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.num_ranks = num_ranks
        largest_share = -(-global_batch_size // num_ranks)
        self.num_micro_batches = -(-largest_share // (micro_batch_size or largest_share))
        self.micro_batch_rows = -(-largest_share // self.num_micro_batches)

    def resize(self, global_batch_size: int) -> BatchPlan:
        """Cut a batch of another size over the same ranks. Raises ConfigError."""
        return BatchPlan(global_batch_size, self.num_ranks, self.micro_batch_size)

    def share(self, rank: int) -> tuple[int, int]:
        """Return start and stop of the rank's samples in the global batch; the first ranks take the rest."""
        base, extra = divmod(self.global_batch_size, self.num_ranks)
        start = rank * base + min(rank, extra)
        return start, start + base + (rank < extra)

    def weights(self, rank: int) -> np.ndarray:
        """Return the weight of each row, float32 `[micro batches, rows]`: 1 for the rank's samples, 0 for padding."""
        start, stop = self.share(rank)
        rows = np.arange(self.num_micro_batches * self.micro_batch_rows)
        return (rows < stop - start).astype(np.float32).reshape(self.num_micro_batches, self.micro_batch_rows)

    def offsets(self, rank: int) -> np.ndarray:
        """Return the place of each row in the global batch, int64 `[micro batches, rows]`.

        Padding repeats the rank's last sample.
        """
        start, stop = self.share(rank)
        rows = start + np.arange(self.num_micro_batches * self.micro_batch_rows, dtype=np.int64)
        return np.minimum(rows, stop - 1).reshape(self.num_micro_batches, self.micro_batch_rows)
