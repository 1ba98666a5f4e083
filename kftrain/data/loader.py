"""Feeds one rank: the samples of each step, read, decoded and made ready ahead, in the background.

Who reads and decodes is a `Fetcher`: this process's threads, or processes of their own. A thread makes micro batches of
what they have fetched, step after step. The loader has no state: step s is always samples s * B … (s + 1) * B - 1 of
the order, so resuming is asking for another first step.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from kftrain.data.decoding import BadSample, Decoding, Samples
from kftrain.data.order import BatchPlan, Order
from kftrain.data.schema import Arrays
from kftrain.data.worker_processes import DecodingProcesses, WorkerCommand
from kftrain.data.workers import DecodingThreads, Fetched, Fetcher, Pending, Readers
from kftrain.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass of one rank."""

    arrays: Arrays
    """Field name -> `[rows, *shape]`."""
    weight: np.ndarray
    """float32 `[rows]`: 1 for a sample, 0 for padding and for a sample that cannot be decoded."""
    sent: Any = None
    """What the loader's `send` has made of it."""


CountTerms = Callable[[MicroBatch], np.ndarray]
"""Loss terms of each row, `[rows]`; none where the weight is 0."""

Send = Callable[[MicroBatch, np.ndarray], Any]
"""Makes of a micro batch and the loss terms of its rows what the consumer computes with."""


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of an optimizer step; all ranks have equally many micro batches of equally many rows."""

    first_sample: int
    """Position of the step's first sample, over all ranks, since the start of training."""
    micro_batches: list[MicroBatch]
    num_terms: int
    """Loss terms in all of them."""
    bad_samples: list[BadSample] = field(default_factory=list)
    """Those of this rank that are left out; each once."""

    @property
    def num_bytes(self) -> int:
        """Of its rows."""
        return sum(array.nbytes for micro in self.micro_batches for array in micro.arrays.values())


FIRST_PREFETCH_BATCHES = 2
MAX_PREFETCH_BATCHES = 16
MAX_PREFETCH_BYTES = 1 << 30
"""Of the steps that one process reads ahead, where it is left to it how many."""


def deeper(num_steps: int, has_waited: bool, step_bytes: int) -> int:
    """How many steps to read ahead from now on: one more where the consumer has waited, as far as they fit."""
    fits = (num_steps + 1) * step_bytes <= MAX_PREFETCH_BYTES
    return num_steps + 1 if has_waited and fits and num_steps < MAX_PREFETCH_BATCHES else num_steps


@dataclass(frozen=True)
class Workers:
    """Who reads and decodes."""

    count: int = 0
    """0: the thread that makes the batches."""
    command: WorkerCommand | None = None
    """Starts processes that decode; None: threads."""


@dataclass
class Counters:
    """What the loader of one rank has measured so far."""

    stall_seconds: float = 0.0
    """Time that the consumer has waited for data."""
    num_bytes: int = 0
    """Read, as they are stored."""
    decode_seconds: float = 0.0
    """Of reading and decoding, over all workers."""
    ready_steps: int = 0
    """Sum, over the steps that were taken, of how many were ready to be taken."""
    num_steps: int = 0
    """That were taken."""


class TrainLoader:
    """The steps of one rank. `close` it in the end where it has workers."""

    def __init__(
        self,
        samples: Samples,
        order: Order,
        plan: BatchPlan,
        rank: int,
        prefetch_batches: int | Literal["auto"],
        count_terms: CountTerms = lambda micro: micro.weight,
        decoding: Decoding | None = None,
        workers: Workers | None = None,
        send: Send | None = None,
    ) -> None:
        """Starts nothing yet.

        `prefetch_batches`: steps that are read ahead; 0 reads when asked; `auto`: see `deeper`. `count_terms` and
        `send`: called in the background; by default a sample is one term, and nothing is sent. `decoding`: of rows that
        are not used as they are stored, by `workers`.

        Raises DataError where there are more processes than samples.
        """
        if plan.num_ranks > order.num_samples:
            raise DataError(
                f"{plan.num_ranks} processes for {order.num_samples} training samples",
                where="data",
                fix="use fewer processes or more data",
            )
        self._samples = samples
        self._order = order
        self._plan = plan
        self._adapts = prefetch_batches == "auto"
        self.prefetch_batches = FIRST_PREFETCH_BATCHES if prefetch_batches == "auto" else prefetch_batches
        """Steps that are read ahead now."""
        self._count_terms = count_terms
        self._decoding = decoding
        self._workers = workers or Workers()
        self._send = send
        self._offsets = plan.offsets(rank)
        self._weights = plan.weights(rank)
        self._fetcher: Fetcher | None = None
        self.counters = Counters()

    def steps(self, first_step: int, num_steps: int) -> Generator[StepBatch, None, None]:
        """Steps first_step … first_step + num_steps - 1. What goes wrong in the background is raised here.

        Closing the iterator, or leaving it to the garbage collector, ends the background thread. Worker processes are
        started by the first step that is asked for, and end with the thread that asked.
        """
        with contextlib.closing(self._loaded(range(first_step, first_step + num_steps))) as batches:
            for _ in range(num_steps):
                start = time.perf_counter()
                batch = next(batches)
                self.counters.stall_seconds += time.perf_counter() - start
                self.counters.num_steps += 1
                yield batch

    def send_nothing(self) -> None:
        """From the next iterator on the consumer makes what it computes with itself, in its own thread."""
        self._send = None

    def close(self) -> None:
        """Ends the workers; a next step starts them again."""
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    def _loaded(self, steps: range) -> Generator[StepBatch, None, None]:
        if not self.prefetch_batches:
            for step in steps:
                yield self._make(step, self._begin(step))
            return
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        ahead: deque[tuple[Pending, Future[StepBatch]]] = deque()
        upcoming = iter(steps)

        def look_ahead() -> None:
            for step in itertools.islice(upcoming, self.prefetch_batches - len(ahead)):
                pending = self._begin(step)
                ahead.append((pending, thread.submit(self._make, step, pending)))

        try:
            look_ahead()
            while ahead:
                self.counters.ready_steps += sum(future.done() for _, future in ahead)
                future = ahead.popleft()[1]
                has_waited = not future.done()
                batch = future.result()
                if self._adapts and self.counters.num_steps:  # for the first one everybody waits
                    self.prefetch_batches = deeper(self.prefetch_batches, has_waited, batch.num_bytes)
                look_ahead()
                yield batch
        finally:
            for pending, _ in ahead:
                pending.cancel()
            thread.shutdown(cancel_futures=True)

    def _begin(self, step: int) -> Pending:
        if self._fetcher is None:
            self._fetcher = self._new_fetcher()
        return self._fetcher.begin((step * self._plan.global_batch_size + self._offsets).ravel())

    def _new_fetcher(self) -> Fetcher:
        samples, locate, workers = self._samples, self._order.locate, self._workers
        if self._decoding is None:
            return Readers(samples, locate, workers.count)
        if workers.command is None or not workers.count:
            return DecodingThreads(samples, locate, self._decoding, workers.count)
        return DecodingProcesses(samples, locate, self._decoding, workers.count, self._offsets.size, workers.command)

    def _make(self, step: int, pending: Pending) -> StepBatch:
        fetched = pending.result()
        self.counters.num_bytes += fetched.filled.num_bytes
        self.counters.decode_seconds += fetched.filled.seconds
        micro_batches, num_terms = [], 0.0
        for number, weight in enumerate(self._weights_of(fetched)):
            start = number * self._plan.micro_batch_rows
            rows = {name: array[start : start + len(weight)] for name, array in fetched.arrays.items()}
            micro = MicroBatch(rows, weight)
            terms = self._count_terms(micro)
            num_terms += float(terms.sum())
            micro_batches.append(micro if self._send is None else replace(micro, sent=self._send(micro, terms)))
        bad = {sample.number: sample for sample in fetched.filled.bad.values()}
        return StepBatch(step * self._plan.global_batch_size, micro_batches, int(num_terms), list(bad.values()))

    def _weights_of(self, fetched: Fetched) -> np.ndarray:
        weights: np.ndarray = self._weights.copy()
        weights.reshape(-1)[list(fetched.filled.bad)] = 0
        return weights
