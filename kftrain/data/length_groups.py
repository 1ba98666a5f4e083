"""Samples of near length in one batch: the order within a window, once it is shuffled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kftrain.data import permutation


@dataclass(frozen=True)
class LengthGroups:
    """Groups of batches that follow each other are sorted by length, and the batches of a group shuffled again.

    Batches and groups are cut at fixed positions of training, so that a step is one batch, on any number of processes.
    A window that begins or ends within a batch sorts its own part of it.
    """

    lengths: Callable[[np.ndarray], np.ndarray]
    """Numbers of samples -> how long each is, int64 `[k]` each."""
    batch_samples: int
    """Number of samples of a step."""
    num_batches: int
    """Number of batches of a group: more of them are nearer in length, and less random."""

    def sort_by_length(
        self, samples: np.ndarray, first_position: int, key: np.ndarray, lanes: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the samples of a window, int64 `[k]`, whose first one stood at `first_position`, in a new order.

        `lanes`: of each position, int64 `[k]`. Each lane's samples of a group are sorted by themselves, and each batch
        takes the next ones of every lane: near in length, and read where the lane reads.
        """
        positions = np.arange(first_position, first_position + len(samples))
        groups = positions // (self.batch_samples * self.num_batches)
        lane_of = np.zeros(len(samples), np.int64) if lanes is None else lanes
        ordered = np.empty_like(samples)
        ordered[np.lexsort((lane_of, groups))] = samples[np.lexsort((self.lengths(samples), lane_of, groups))]
        for group in np.unique(groups).tolist():
            start, stop = np.searchsorted(groups, (group, group + 1)).tolist()
            start += -(first_position + start) % self.batch_samples
            stop -= (first_position + stop) % self.batch_samples
            if start < stop:
                batches = ordered[start:stop].reshape(-1, self.batch_samples)
                own_key = permutation.derive_subkeys(key, np.array([group], np.uint64))
                ordered[start:stop] = batches[permutation.shuffle(len(batches), own_key)].ravel()
        return ordered
