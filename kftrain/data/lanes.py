"""Lanes of a training: which slots of a global batch draw from which part of a window. Pure numpy, no files.

A slot is a place in the global batch, and a lane some slots that follow each other. Any number of nodes that divides
both lanes and batch has whole lanes each; with as many nodes as lanes, a node is a lane. Of a window's samples, in the
order of its ranges, each lane owns a run, as many as the window has positions in its slots, and these positions see
them shuffled. So a node reads the ranges of its own lanes instead of all of them, yet the order knows nothing of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kftrain.data.settings import MAX_WINDOW_SAMPLES


class Lanes:
    """Cut of a global batch into lanes."""

    def __init__(
        self,
        num_lanes: int,
        batch_samples: int,
        range_samples: int,
        find_positions: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        """Make as many lanes as the batch has slots for, and a window ranges: each lane has one of its own.

        `batch_samples`: slots, of the final global batch where it grows. `find_positions`: positions of a component ->
        positions of the training, int64 `[k]` each; None: they are the same.
        """
        self.batch_samples = batch_samples
        self.num_lanes = min(num_lanes, batch_samples, max(1, MAX_WINDOW_SAMPLES // 2 // range_samples))
        self.find_positions = find_positions

    def widen_window(self, window_ranges: int, range_samples: int, num_ranges: int) -> int:
        """Return the ranges of a window, at least `window_ranges` if the table can grow: equally many for each lane.

        Where lanes end within ranges there are two ranges for each, so that few blocks of a shard are in two lanes.
        """
        slots, more = divmod(self.batch_samples, self.num_lanes)
        least = 1 if more == 0 and range_samples % slots == 0 else 2
        most = max(MAX_WINDOW_SAMPLES // range_samples, window_ranges)
        most -= num_ranges % self.num_lanes  # which the last window has, too
        return min(max(-(-window_ranges // self.num_lanes), least), most // self.num_lanes) * self.num_lanes

    def find_lanes(self, first_position: int, num_positions: int) -> np.ndarray:
        """Return the lane of each of the positions that follow each other from `first_position` on, int64 `[k]`."""
        positions = np.arange(first_position, first_position + num_positions)
        positions = self.find_positions(positions) if self.find_positions else positions[: self.batch_samples]
        equal = math.gcd(self.batch_samples, self.num_lanes)  # parts of the batch that are cut alike
        parts, slots = np.divmod(positions, self.batch_samples // equal)
        size, more = divmod(self.batch_samples // equal, self.num_lanes // equal)  # so many lanes have a slot more
        lanes = parts % equal * (self.num_lanes // equal) + np.maximum(slots // (size + 1), (slots - more) // size)
        return np.tile(lanes, -(-num_positions // len(lanes)))[:num_positions]
