"""The training order for torch's `DataLoader`: each sample once an epoch, over all ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from kftrain.data.decoding import Generators
from kftrain.data.opened import READ_SAMPLES, OpenedDataset, Sample, own_process
from kftrain.data.order import TrainingOrder
from kftrain.errors import ConfigError

POSITION, START = "position", "start"
"""Keys of a state: the position of the next sample, and where the loop began."""

MAX_POSITION = 1 << 62
"""Largest position, an int64."""


class InTrainingOrder(IterableDataset[Sample]):
    """Samples in the order in which `kftrain` trains, decoded and augmented as it does with the same seed.

    Positions count samples over all ranks, from the start of training. With a batch of b samples on each of r ranks,
    global batch g of an iteration that starts at s is the positions s + g * b * r … of which rank i takes the i-th b:
    what a `DataLoader` with that `batch_size` gives is the same for any number of workers. The state is one integer:
    the position.

    Args:
        dataset: What is read.
        seed: Of the order and of augmentation.
        batch_size: Samples of a batch, on each rank.
        epochs: Epochs of one iteration; None: it goes on, and all ranks have equally many batches for ever. An
            iteration of whole epochs ends with what is left over, so that ranks may differ by a batch.
        rank: Of this process; None: that of `torch.distributed`, where it is initialised.
        world_size: Processes that share the samples; likewise.
        shuffle: Without, samples come in stored order.
        range_samples: As `data.shuffle_range_samples`.
        window_ranges: As `data.shuffle_window_ranges`.

    Raises ConfigError for a rank that is not below `world_size`, and for sizes that are not positive.
    """

    def __init__(
        self,
        dataset: OpenedDataset,
        *,
        seed: int,
        batch_size: int,
        epochs: int | None,
        rank: int | None,
        world_size: int | None,
        shuffle: bool,
        range_samples: int,
        window_ranges: int,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._batch_size = batch_size
        self._epochs = epochs
        sizes = {"batch_size": batch_size, "epochs": epochs, "range_samples": range_samples, "window": window_ranges}
        for name, value in {**sizes, "world_size": world_size}.items():
            if value is not None and (not isinstance(value, Integral) or value < 1):
                raise ConfigError("must be at least 1, and a whole number", where=name, value=value)
        self._rank, self._world_size = own_process(rank, world_size)
        self._order = TrainingOrder(len(dataset), seed, range_samples, window_ranges) if shuffle else None
        self._position = 0
        self._began = 0
        self._start: int | None = None
        """Of a worker's iteration."""
        self._is_finished = False

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with this epoch: for loaders whose workers do not stay."""
        self.load_state_dict({POSITION: epoch * len(self._dataset)})

    def state_dict(self) -> dict[str, int]:
        """Return where the next sample is read.

        In a worker, and in the middle of a batch of several ranks, also where the iteration began: that tells what the
        others read.
        """
        is_between = get_worker_info() is None and self._is_between_batches()
        return {POSITION: self._position, **({} if self._start is None or is_between else {START: self._start})}

    def _is_between_batches(self) -> bool:
        if self._start is None or self._position == self._end(self._start):
            return True
        return (self._position - self._start) % (self._batch_size * self._world_size) == 0

    def state_after(self, num_batches: int) -> dict[str, int]:
        """Return the state after so many batches of each rank since the state that was loaded, or since the beginning.

        For a `DataLoader` with workers: they read ahead, so that only its consumer knows where it is. Without workers
        it counts from where the iteration began.
        """
        return {POSITION: self._began + num_batches * self._batch_size * self._world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at a state. Raises ConfigError for what is no state."""
        position, start = (state.get(POSITION), state.get(START)) if isinstance(state, dict) else (None, None)
        if not isinstance(position, int) or not 0 <= position <= MAX_POSITION or not isinstance(start, int | None):
            raise ConfigError("not a state of this dataset", where="load_state_dict", value=state)
        self._position = position
        self._began = position
        self._start, self._is_finished = start, False

    def __iter__(self) -> Iterator[Sample]:
        info, generators = get_worker_info(), Generators(self._seed)
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        if self._is_finished:
            self._start, self._is_finished = None, False
        started = self._position if self._start is None else self._start
        self._began = self._position
        if num_workers > 1 or self._world_size > 1:
            self._start = started
        end = self._end(started)
        for positions in self._read_at_once(self._iterate_own(started, self._position, worker, num_workers)):
            numbers = positions % len(self._dataset) if self._order is None else self._order.locate(positions)
            drawn = (generators.at(position) if self._order else None for position in positions.tolist())
            samples = self._dataset.samples(numbers, drawn)
            for position, sample in zip(positions.tolist(), samples, strict=True):
                self._position = self._after(started, position, num_workers, end)
                yield sample
        assert end is not None, "an iteration without an end does not end"
        self._position, self._is_finished = end, True

    def _find_origin(self, position: int) -> int:
        """Return the first position of the iteration that a position is in."""
        span = len(self._dataset) * (self._epochs or 0)
        return position // span * span if span else 0

    def _end(self, position: int) -> int | None:
        return self._find_origin(position) + len(self._dataset) * self._epochs if self._epochs else None

    def _iterate_own(self, started: int, position: int, worker: int, num_workers: int) -> Iterator[np.ndarray]:
        """Yield positions of one batch after the other of this rank and worker, those before `position` left out."""
        global_batch, end, size = worker, self._end(started), self._batch_size
        while True:
            first = started + (global_batch * self._world_size + self._rank) * size
            if end is not None and first >= end:
                return
            positions = np.arange(max(first, position), min(first + size, end or first + size), dtype=np.int64)
            if len(positions):
                yield positions
            global_batch += num_workers

    def _read_at_once(self, batches: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        collected: list[np.ndarray] = []
        for positions in batches:
            collected.append(positions)
            if sum(map(len, collected)) >= READ_SAMPLES:
                yield np.concatenate(collected)
                collected = []
        if collected:
            yield np.concatenate(collected)

    def _after(self, started: int, position: int, num_workers: int, end: int | None) -> int:
        """Return the state's position after a sample: behind a batch, where this worker's next global batch begins."""
        within, whole = position - started, self._batch_size * self._world_size
        if (within + 1) % self._batch_size and position + 1 != end:
            return position + 1
        following = started + (within // whole + num_workers) * whole
        return following if end is None else min(following, end)
