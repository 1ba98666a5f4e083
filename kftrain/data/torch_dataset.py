"""The training order for torch's `DataLoader`: each sample once an epoch, over all ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from kftrain.core.progress import to_log
from kftrain.data.decoding import Generators
from kftrain.data.lanes import Lanes
from kftrain.data.opened import READ_SAMPLES, OpenedDataset, Sample, own_process
from kftrain.data.order import TrainingOrder
from kftrain.errors import ConfigError

POSITION, START, BATCH = "position", "start", "batch"
"""Keys of a state: the position of the next sample, where the loop began, and the samples of the global batch whose
lanes the order has. A state without the last is of release 0.2, whose order has none."""

MAX_POSITION = 1 << 62
"""Largest position, an int64."""


class InTrainingOrder(IterableDataset[Sample]):
    """Samples in the order in which `kftrain` trains, decoded and augmented as it does with the same seed.

    Positions count samples over all ranks, from the start of training. With a batch of b samples on each of r ranks,
    global batch g of an iteration that starts at s is the positions s + g * b * r … of which rank i takes the i-th b:
    what a `DataLoader` with that `batch_size` gives is the same for any number of workers. The state is the position,
    and b * r of the loop that began: it stays, so that each sample comes once, too, where another loop goes on.

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
        lanes: As `data.lanes`, of a global batch of b * r.

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
        lanes: int,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        sizes = {"batch_size": batch_size, "epochs": epochs, "range_samples": range_samples, "window": window_ranges}
        for name, value in {**sizes, "world_size": world_size, "lanes": lanes}.items():
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
                raise ConfigError("must be at least 1, and a whole number", where=name, value=value)
        self._batch_size = int(batch_size)  # a state holds no numbers of numpy's
        self._epochs = None if epochs is None else int(epochs)
        self._rank, self._world_size = map(int, own_process(rank, world_size))
        self._windows = (range_samples, window_ranges)
        self._lanes = lanes
        self._has_shown_lanes = False
        self._batch = min(self._batch_size * self._world_size, MAX_POSITION) if shuffle else None
        """Samples of the global batch whose lanes the order has; None: no lanes."""
        self._order = self._make_order() if shuffle else None
        self._position = 0
        self._began = 0
        self._start: int | None = None
        """Of a worker's iteration."""
        self._is_finished = False

    def _make_order(self) -> TrainingOrder:
        lanes = Lanes(self._lanes, self._batch, self._windows[0]) if self._batch else None
        return TrainingOrder(len(self._dataset), self._seed, *self._windows, lanes=lanes)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with this epoch: for loaders whose workers do not stay."""
        self.load_state_dict(self._state_at(epoch * len(self._dataset)))

    def _state_at(self, position: int) -> dict[str, int]:
        return {POSITION: int(position), **({BATCH: self._batch} if self._batch else {})}

    def state_dict(self) -> dict[str, int]:
        """Return where the next sample is read.

        In a worker, and in the middle of a batch of several ranks, also where the iteration began: that tells what the
        others read.
        """
        start, state = self._start, self._state_at(self._position)
        if start is None:
            return state
        is_between = (self._position - start) % (self._batch_size * self._world_size) == 0
        is_between |= self._position == self._end(start)
        return state if is_between and get_worker_info() is None else {**state, START: start}

    def state_after(self, num_batches: int) -> dict[str, int]:
        """Return the state after so many batches of each rank since the state that was loaded, or since the beginning.

        For a `DataLoader` with workers: they read ahead, so that only its consumer knows where it is. Without workers
        it counts from where the iteration began.
        """
        return self._state_at(self._began + num_batches * self._batch_size * self._world_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at a state.

        Raises ConfigError for what is no state, and for one without lanes after samples in the order with them.
        """
        own: Any = state if isinstance(state, dict) else {}
        position, start, batch = map(own.get, (POSITION, START, BATCH))
        numbers = [position, 0 if start is None else start, 1 if batch is None else batch]
        if not all(type(number) is int and 0 <= number <= MAX_POSITION for number in numbers) or batch == 0:
            raise ConfigError("not a state of this dataset", where="load_state_dict", value=state)
        if self._batch and batch is None:
            if self._has_shown_lanes:
                fix = "keep its batch"
                raise ConfigError("not of this loop's order", where="load_state_dict", value=state, fix=fix)
            to_log(f"warning: the state {state} has no batch: it is taken for one of release 0.2, and keeps its order")
        self._position = self._began = position
        self._start, self._is_finished = start, False
        if self._order is not None and batch != self._batch:
            self._batch = batch
            self._order = self._make_order()

    def __iter__(self) -> Iterator[Sample]:
        info, generators = get_worker_info(), Generators(self._seed)
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        if self._is_finished:
            self._start, self._is_finished = None, False
        started = self._position if self._start is None else self._start
        self._began = self._position
        self._has_shown_lanes |= self._batch is not None
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

    def _end(self, position: int) -> int | None:
        """Return the position behind the iteration that a position is in; None where it has no end."""
        if self._epochs is None:
            return None
        span = len(self._dataset) * self._epochs
        return (position // max(1, span) + 1) * span

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
