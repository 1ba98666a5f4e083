"""Which sample stands where in the training order, and which rank takes which part of a step. Pure numpy, no files.

Positions count samples from the start of training: position p is number p mod N of epoch p // N. Steps run
across the border of epochs, so training needs no padding for a dataset that is no multiple of the batch. The
order depends on the dataset (its digest, its shards, the shuffle window) and the seed alone; ranks,
prefetching and restarts only choose which positions they look up.

Each epoch permutes the shards; each window of `window_shards` shards that follow each other in that order
permutes its samples. So a reader touches one window of shards at a time, yet neighbours in the order come
from many shards. Both permutations are functions (see permutation.py), and finding a position costs O(1):
nothing here grows with the number of samples, only with that of shards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kftrain.data import permutation
from kftrain.errors import ConfigError


@dataclass(frozen=True)
class _EpochLayout:
    """One epoch: its shards in order and how their samples fall into windows."""

    shard_order: np.ndarray
    shard_starts: np.ndarray
    """`[shards + 1]`: first offset of each shard in that order, and the total."""
    window_starts: np.ndarray
    """`[windows + 1]`: first offset of each window, and the total."""
    window_keys: np.ndarray


class TrainingOrder:
    """The order in which training sees samples: position -> (shard, row), for any number of epochs."""

    def __init__(
        self,
        samples_per_shard: Sequence[int] | np.ndarray,
        dataset_digest: str,
        seed: int,
        window_shards: int,
    ) -> None:
        self._samples = np.asarray(samples_per_shard, np.int64)
        assert self._samples.size and (self._samples > 0).all(), "every shard holds samples"
        self.window_shards = window_shards
        """Shards that follow each other in an epoch and whose samples are mixed."""
        self._key = permutation.derive_key(f"training order/{dataset_digest}/{seed}")
        self._layout = functools.lru_cache(maxsize=2)(self._new_layout)

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return int(self._samples.sum())

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Shard ids and rows within them, int64 `[k]` each, of positions int64 `[k]` of any epochs."""
        epochs, offsets = np.divmod(np.asarray(positions, np.int64), self.num_samples)
        shard_ids, rows = np.empty_like(offsets), np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            shard_ids[chosen], rows[chosen] = self._locate_in_epoch(epoch, offsets[chosen])
        return shard_ids, rows

    def _locate_in_epoch(self, epoch: int, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        layout = self._layout(epoch)
        windows = np.searchsorted(layout.window_starts, offsets, side="right") - 1
        starts = layout.window_starts[windows]
        sizes = layout.window_starts[windows + 1] - starts
        within = permutation.permute(
            (offsets - starts).astype(np.uint64), sizes.astype(np.uint64), layout.window_keys[windows]
        )
        shuffled = starts + within.astype(np.int64)
        places = np.searchsorted(layout.shard_starts, shuffled, side="right") - 1
        return layout.shard_order[places], shuffled - layout.shard_starts[places]

    def _new_layout(self, epoch: int) -> _EpochLayout:
        epoch_key = permutation.subkeys(self._key, np.array([epoch], np.uint64))
        shard_order = permutation.shuffled(self._samples.size, epoch_key)
        shard_starts = np.concatenate([[0], np.cumsum(self._samples[shard_order])])
        window_starts = np.append(shard_starts[: -1 : self.window_shards], shard_starts[-1])
        window_keys = permutation.subkeys(
            permutation.mix(epoch_key), np.arange(len(window_starts) - 1, dtype=np.uint64)
        )
        return _EpochLayout(shard_order, shard_starts, window_starts, window_keys)


class BatchPlan:
    """How the samples of one optimizer step are cut: contiguous parts for the ranks, equal micro batches within each.

    All ranks run the same number of micro batches of the same number of rows, so that none waits in a
    collective alone. Where the samples do not divide, rows are filled up with padding of weight 0.
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
        self.num_ranks = num_ranks
        largest_share = -(-global_batch_size // num_ranks)
        self.num_micro_batches = -(-largest_share // (micro_batch_size or largest_share))
        self.micro_batch_rows = -(-largest_share // self.num_micro_batches)

    def share(self, rank: int) -> tuple[int, int]:
        """Start and stop of the rank's samples in the global batch; the first ranks take what does not divide."""
        base, extra = divmod(self.global_batch_size, self.num_ranks)
        start = rank * base + min(rank, extra)
        return start, start + base + (rank < extra)

    def weights(self, rank: int) -> np.ndarray:
        """Weight of each row, float32 `[micro batches, rows]`: 1 for the rank's samples, then 0 for padding."""
        start, stop = self.share(rank)
        rows = np.arange(self.num_micro_batches * self.micro_batch_rows)
        return (rows < stop - start).astype(np.float32).reshape(self.num_micro_batches, self.micro_batch_rows)

    def offsets(self, rank: int) -> np.ndarray:
        """Place of each row in the global batch, int64 `[micro batches, rows]`.

        Padding repeats the rank's last sample.
        """
        start, stop = self.share(rank)
        rows = start + np.arange(self.num_micro_batches * self.micro_batch_rows, dtype=np.int64)
        return np.minimum(rows, stop - 1).reshape(self.num_micro_batches, self.micro_batch_rows)
