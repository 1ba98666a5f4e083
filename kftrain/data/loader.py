"""Feeds one rank: the samples of each step, read, decoded and made ready ahead, in the background.

Who reads and decodes is a `Fetcher`: this process's threads, or processes of their own. A thread makes micro batches of
what they have fetched, step after step. The loader has no state: step s is always samples s * B … (s + 1) * B - 1 of
the order, so resuming is asking for another first step.
"""

from __future__ import annotations

import contextlib
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
from kftrain.data.workers import DecodingThreads, Fetched, Fetcher, Readers, Rows
from kftrain.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass of one rank."""

    arrays: Arrays
    """Field name -> `[rows, *shape]` of this forward pass."""
    weight: np.ndarray
    """float32 `[rows]`: 1 for a sample, 0 for padding and for a sample that cannot be decoded."""
    sent: Any = None
    """Result of the loader's `send`."""


CountTerms = Callable[[MicroBatch], np.ndarray]
"""Loss terms of each row, `[rows]`; none where the weight is 0."""

Send = Callable[[MicroBatch, np.ndarray], Any]
"""Makes of a micro batch and the loss terms of its rows what the consumer computes with."""


@dataclass(frozen=True)
class StepBatch:
    """Part of one rank in an optimizer step; all ranks have equally many micro batches of equally many rows."""

    first_sample: int
    """Position of the step's first sample, over all ranks, since the start of training."""
    micro_batches: list[MicroBatch]
    num_terms: int
    """Number of loss terms in all of them."""
    bad_samples: list[BadSample] = field(default_factory=list)
    """Samples of this rank that are left out; each once."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows."""
        return sum(array.nbytes for micro in self.micro_batches for array in micro.arrays.values())


FIRST_PREFETCH_BATCHES = 2
MAX_PREFETCH_BATCHES = 16
MAX_PREFETCH_BYTES = 1 << 30
"""Most bytes of the steps that one process reads ahead, where it is left to it how many."""


def choose_steps_ahead(num_steps: int, has_waited: bool, step_bytes: int) -> int:
    """Choose how many steps to read ahead from now on: one more where the consumer has waited, as far as they fit."""
    fits = (num_steps + 1) * step_bytes <= MAX_PREFETCH_BYTES
    return num_steps + 1 if has_waited and fits and num_steps < MAX_PREFETCH_BATCHES else num_steps


MAX_READ_BYTES = 4 << 20
"""Most bytes of the steps that are read at once."""


def choose_steps_of_read(num_steps: int, step_bytes: int) -> int:
    """Choose how many steps to read at once after a read of so many: small ones share the cost of a read.

    The first read is of one step, so that nobody waits longer for it; the number doubles as far as they fit.
    """
    return max(1, min(2 * num_steps, MAX_READ_BYTES // max(1, step_bytes)))


@dataclass(frozen=True)
class Workers:
    """Number and kind of those who read and decode."""

    count: int = 0
    """Number of workers; 0: the thread that makes the batches."""
    command: WorkerCommand | None = None
    """Command that starts processes that decode; None: threads."""


@dataclass
class Counters:
    """Measurements of the loader of one rank so far."""

    stall_seconds: float = 0.0
    """Time that the consumer has waited for data."""
    num_bytes: int = 0
    """Bytes that were read, as they are stored."""
    decode_seconds: float = 0.0
    """Seconds of reading and decoding, over all workers."""
    ready_steps: int = 0
    """Sum, over the steps that were taken, of how many were ready to be taken."""
    num_steps: int = 0
    """Number of steps that were taken."""


@dataclass(frozen=True)
class _Read:
    """Steps that are read at once."""

    steps: range
    pending: Rows
    future: Future[list[StepBatch]]


class _ReadAhead:
    """Reads of steps before they are asked for, by a thread of their own."""

    def __init__(
        self, steps: range, begin: Callable[[range], Rows], make: Callable[[range, Rows], list[StepBatch]]
    ) -> None:
        self._upcoming = steps
        self._begin = begin
        self._make = make
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self.reads: deque[_Read] = deque()
        """In order; the first is taken next."""

    def begin_reads(self, num_steps: int, steps_of_read: int) -> None:
        """Begin reads of so many steps each, until at least `num_steps` are ahead or no more are to come."""
        while self._upcoming and sum(len(read.steps) for read in self.reads) < num_steps:
            steps, self._upcoming = self._upcoming[:steps_of_read], self._upcoming[steps_of_read:]
            pending = self._begin(steps)
            self.reads.append(_Read(steps, pending, self._thread.submit(self._make, steps, pending)))

    def count_ready(self) -> int:
        """Count the steps that could be taken now."""
        return sum(len(read.steps) for read in self.reads if read.future.done())

    def close(self) -> None:
        """End the thread; nobody waits for what it reads."""
        for read in self.reads:
            read.pending.cancel()
        self._thread.shutdown(cancel_futures=True)


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
        """Start nothing yet.

        `prefetch_batches`: steps that are read ahead; 0 reads when asked; `auto`: see `choose_steps_ahead`.
        `count_terms`, `send`: called in the background; by default a sample is one term, and nothing is sent.
        `decoding`: of rows that are not used as they are stored, by `workers`.

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
        self._step_bytes = 0
        self.counters = Counters()

    def steps(self, first_step: int, num_steps: int) -> Generator[StepBatch, None, None]:
        """Yield steps first_step … first_step + num_steps - 1. What goes wrong in the background is raised here.

        Closing the iterator, or leaving it to the garbage collector, ends the background thread. Worker processes are
        started by the first step that is asked for, and end with the thread that asked.
        """
        with contextlib.closing(self._load(range(first_step, first_step + num_steps))) as batches:
            for _ in range(num_steps):
                start = time.perf_counter()
                batch = next(batches)
                self.counters.stall_seconds += time.perf_counter() - start
                self.counters.num_steps += 1
                yield batch

    def send_nothing(self) -> None:
        """Stop sending from the next iterator on: the consumer makes what it computes with in its own thread."""
        self._send = None

    def close(self) -> None:
        """End the workers; a next step starts them again."""
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    def _load(self, steps: range) -> Generator[StepBatch, None, None]:
        if not self.prefetch_batches:
            yield from self._load_one_by_one(steps)
            return
        ahead = _ReadAhead(steps, self._begin, self._make)
        try:
            ahead.begin_reads(self.prefetch_batches, 1)
            while ahead.reads:
                yield from self._take_batches(ahead, ahead.reads.popleft())
        finally:
            ahead.close()

    def _take_batches(self, ahead: _ReadAhead, read: _Read) -> Generator[StepBatch, None, None]:
        has_waited = not read.future.done()
        try:
            batches = read.future.result()
        except DataError:
            if len(read.steps) == 1:
                raise
            yield from self._load_one_by_one(read.steps)  # those before the one that cannot be read are good
            return
        if self._adapts and self.counters.num_steps:  # for the first one everybody waits
            self.prefetch_batches = choose_steps_ahead(self.prefetch_batches, has_waited, batches[0].num_bytes)
        ahead.begin_reads(
            self.prefetch_batches, 1 if self._decoding else choose_steps_of_read(len(batches), self._step_bytes)
        )
        for num_left in reversed(range(len(batches))):
            self.counters.ready_steps += num_left + ahead.count_ready()
            yield batches[-1 - num_left]

    def _load_one_by_one(self, steps: range) -> Generator[StepBatch, None, None]:
        for step in steps:
            one = range(step, step + 1)
            yield from self._make(one, self._begin(one))

    def _begin(self, steps: range) -> Rows:
        if self._fetcher is None:
            self._fetcher = self._make_fetcher()
        firsts = np.arange(steps.start, steps.stop, dtype=np.int64) * self._plan.global_batch_size
        return self._fetcher.begin((firsts[:, None, None] + self._offsets).ravel())

    def _make_fetcher(self) -> Fetcher:
        samples, locate, workers = self._samples, self._order.locate, self._workers
        if self._decoding is None:
            return Readers(samples, locate, workers.count)
        if workers.command is None or not workers.count:
            return DecodingThreads(samples, locate, self._decoding, workers.count)
        return DecodingProcesses(samples, locate, self._decoding, workers.count, self._offsets.size, workers.command)

    def _make(self, steps: range, pending: Rows) -> list[StepBatch]:
        fetched = pending.result()
        self._step_bytes = fetched.filled.num_bytes // len(steps)
        self.counters.num_bytes += fetched.filled.num_bytes
        self.counters.decode_seconds += fetched.filled.seconds
        rows = self._offsets.size
        return [
            self._make_one(step, fetched.part(number * rows, (number + 1) * rows)) for number, step in enumerate(steps)
        ]

    def _make_one(self, step: int, fetched: Fetched) -> StepBatch:
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
