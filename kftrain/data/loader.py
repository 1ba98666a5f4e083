"""Feeds one rank: the samples of each step, read ahead in a background thread.

A thread and not processes: gathering rows costs microseconds, while a batch that crosses a process border is pickled
and copied twice. The loader has no state: step s is always samples s * B … (s + 1) * B - 1 of the order, so resuming
is asking for another first step.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kftrain.data.dataset import ShardedDataset
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.schema import Arrays
from kftrain.errors import DataError

Decode = Callable[[Arrays, np.ndarray], Arrays]
"""From rows as they are stored, and their positions in the training order over all epochs, to rows as they are used."""


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass of one rank."""

    arrays: Arrays
    """Field name -> `[rows, *shape]`."""
    weight: np.ndarray
    """float32 `[rows]`: 1 for a sample, 0 for padding."""


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of an optimizer step; all ranks have equally many micro batches of equally many rows."""

    first_sample: int
    """Position of the step's first sample, over all ranks, since the start of training."""
    micro_batches: list[MicroBatch]


class TrainLoader:
    """The steps of one rank."""

    def __init__(
        self,
        dataset: ShardedDataset,
        order: TrainingOrder,
        plan: BatchPlan,
        rank: int,
        prefetch_batches: int,
        decode: Decode | None = None,
    ) -> None:
        """`prefetch_batches`: steps that are read ahead; 0 reads when asked. `decode`: for rows not as they are stored.

        Raises DataError where there are more processes than samples.
        """
        if plan.num_ranks > order.num_samples:
            raise DataError(
                f"{plan.num_ranks} processes for {order.num_samples} training samples",
                where="data",
                fix="use fewer processes or more data",
            )
        dataset.expect_window(order.window_shards)
        self._dataset = dataset
        self._order = order
        self._plan = plan
        self._prefetch_batches = prefetch_batches
        self._decode = decode
        self._offsets = plan.offsets(rank)
        self._weights = plan.weights(rank)
        self.stall_seconds = 0.0
        """Time that the consumer has waited for data so far."""

    def steps(self, first_step: int, num_steps: int) -> Generator[StepBatch, None, None]:
        """Steps first_step … first_step + num_steps - 1. What goes wrong in the background is raised here.

        Closing the iterator, or leaving it to the garbage collector, ends the background thread.
        """
        with contextlib.closing(self._loaded(range(first_step, first_step + num_steps))) as batches:
            for _ in range(num_steps):
                start = time.perf_counter()
                batch = next(batches)
                self.stall_seconds += time.perf_counter() - start
                yield batch

    def _loaded(self, steps: range) -> Generator[StepBatch, None, None]:
        if not self._prefetch_batches:
            yield from map(self._load, steps)
            return
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        try:
            ahead = deque(thread.submit(self._load, step) for step in steps[: self._prefetch_batches])
            for step in steps[self._prefetch_batches :]:
                batch = ahead.popleft().result()
                ahead.append(thread.submit(self._load, step))
                yield batch
            while ahead:
                yield ahead.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)

    def _load(self, step: int) -> StepBatch:
        first_sample = step * self._plan.global_batch_size
        positions = (first_sample + self._offsets).ravel()
        arrays = self._dataset.read(*self._order.locate(positions))
        if self._decode is not None:
            arrays = self._decode(arrays, positions)
        num_rows = self._plan.micro_batch_rows
        micro_batches = [
            MicroBatch({name: array[i * num_rows : (i + 1) * num_rows] for name, array in arrays.items()}, weight)
            for i, weight in enumerate(self._weights.copy())
        ]
        return StepBatch(first_sample, micro_batches)
