"""Feeds one rank: the samples of each step, read, decoded and made ready ahead, in the background.

This process's threads, or processes of their own, read and decode. A thread makes micro batches of
what they have fetched, step after step. The loader has no state: step s is always samples s * B … (s + 1) * B - 1 of
the order (batches may grow: `batch_sizes`), so resuming is asking for another first step.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kftrain.core.progress import to_log
from kftrain.data.batch_sizes import BatchSizes
from kftrain.data.counters import Counters
from kftrain.data.decoding import BadSample, Decoding, Filled, Samples
from kftrain.data.order import BatchPlan, Order
from kftrain.data.read_ahead import AheadPlan, ReadAhead
from kftrain.data.schema import Arrays
from kftrain.data.tuning import Limits, Tuner, Tuning
from kftrain.data.worker_processes import DecodingProcesses, WorkerCommand
from kftrain.data.workers import Rows, Threads
from kftrain.errors import DataError
from kftrain.process.machine import read_available_bytes


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


SENT_STEPS = 2
"""Steps ahead that are sent to the device, whose memory is not that by which their number is chosen."""

Fetcher = Threads | DecodingProcesses

MAX_READ_BYTES = 4 << 20
"""Most bytes of the steps that are read at once."""


def choose_steps_of_read(num_steps: int, step_bytes: int) -> int:
    """Choose how many steps to read at once after a read of so many: small ones share the cost of a read.

    The first read is of one step, so that nobody waits longer for it; the number doubles as far as they fit.
    """
    return max(1, min(2 * num_steps, MAX_READ_BYTES // max(1, step_bytes)))


Made = tuple[list[StepBatch], Counters]
"""Steps, and what they have cost."""


@dataclass
class _Read:
    """Steps that are read at once."""

    steps: range
    pending: Rows
    fetched: Future[tuple[Arrays, Filled]] | None = None
    """None where whoever wants them waits for their rows."""
    made: Future[Made] | None = None
    """None until they are among the next ones."""


class _Share:
    """Part of one rank in batches of one size."""

    def __init__(self, plan: BatchPlan, rank: int) -> None:
        self.offsets = plan.offsets(rank)
        self.weights = plan.weights(rank)
        self.micro_batch_rows = plan.micro_batch_rows
        self.num_rows = int(self.offsets.size)
        """Number of rows of a step."""


class _ReadAhead:
    """Reads of steps before they are asked for: a thread makes the next ones ready, and one waits for the others."""

    def __init__(
        self, steps: range, begin: Callable[[range], Rows], make: Callable[[_Read], Made], in_order: bool
    ) -> None:
        """`in_order`: one thread waits for the rows of all, as they were asked for."""
        self._in_order = in_order
        self._upcoming = steps
        self._begin = begin
        self._make = make
        self._waiter, self._maker = (ThreadPoolExecutor(1, thread_name_prefix="prefetch") for _ in range(2))
        self._reads: deque[_Read] = deque()

    def begin_reads(self, num_steps: int, steps_of_read: int) -> None:
        """Begin reads of so many steps each, until at least `num_steps` are ahead or no more are to come."""
        while self._upcoming and (num_ahead := sum(len(read.steps) for read in self._reads)) < num_steps:
            read = self._begin_next(steps_of_read)
            if self._in_order or num_ahead >= SENT_STEPS:
                read.fetched = self._waiter.submit(read.pending.result)
        num_ahead = 0
        for read in self._reads:
            if read.made is None and num_ahead < SENT_STEPS:
                read.made = self._maker.submit(self._make, read)
            num_ahead += len(read.steps)

    def take(self) -> _Read | None:
        """Take the next steps, where none are ahead a single one, which nobody makes yet; None after the last."""
        if not self._reads and self._upcoming:
            self._begin_next(1)
        return self._reads.popleft() if self._reads else None

    def _begin_next(self, num_steps: int) -> _Read:
        steps, self._upcoming = self._upcoming[:num_steps], self._upcoming[num_steps:]
        self._reads.append(_Read(steps, self._begin(steps)))
        return self._reads[-1]

    def begin_again(self, steps: range) -> None:
        """Begin to read steps that were taken once more, each by itself."""
        again = [_Read(range(step, step + 1), self._begin(range(step, step + 1))) for step in steps]
        self._reads.extendleft(reversed(again))

    def count_ready(self) -> int:
        """Count the steps whose rows are there."""
        futures = ((read, read.fetched or read.made) for read in self._reads)
        return sum(len(read.steps) for read, future in futures if future and future.done())

    def close(self) -> None:
        """End the threads; nobody waits for what they read."""
        for read in self._reads:
            read.pending.cancel()
        for thread in (self._waiter, self._maker):
            thread.shutdown(cancel_futures=True)


def measure_own_bytes() -> float:
    """Measure the memory that is free for each training process of this machine."""
    return read_available_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class TrainLoader:
    """The steps of one rank. `close` it in the end where it has workers."""

    def __init__(
        self,
        samples: Samples,
        order: Order,
        plan: BatchPlan,
        rank: int,
        tuning: Tuning,
        count_terms: CountTerms = lambda micro: micro.weight,
        decoding: Decoding | None = None,
        command: WorkerCommand | None = None,
        send: Send | None = None,
        limits: Limits | None = None,
        ahead: AheadPlan | None = None,
        sizes: BatchSizes | None = None,
    ) -> None:
        """Start nothing yet.

        `tuning`: settings to begin with; without `limits` they stay. With no steps ahead a step is read when asked.
        `count_terms`, `send`: called in the background; by default a sample is one term, and nothing is sent.
        `decoding`: of rows that are not used as they are stored. `command`: starts the workers that are processes.
        `ahead`: fetches what steps read from an object store before they do; None where it is on this machine.
        `sizes`: of the batches, where they grow to that of `plan`. Raises ConfigError where the ranks cannot share one.

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
        self._count_terms = count_terms
        self._decoding = decoding
        self._command = command
        self._send = send
        self._plan_ahead = ahead
        self._read_ahead: ReadAhead | None = None
        self._sizes = sizes or BatchSizes(plan.global_batch_size)
        self._shares = {size: _Share(plan.resize(size), rank) for size in self._sizes.sizes}
        self._fetchers: list[Fetcher] = []
        """The last one is asked; those before it finish what they were asked for."""
        self.counters = Counters()
        self._limits = limits or Limits(tuning, tuning.steps)
        self._tuner = Tuner(tuning, self._limits, self.counters, measure_own_bytes)

    @property
    def tuning(self) -> Tuning:
        """Settings of now."""
        return self._tuner.now

    def steps(self, first_step: int, num_steps: int) -> Generator[StepBatch, None, None]:
        """Yield steps first_step … first_step + num_steps - 1. What goes wrong in the background is raised here.

        Closing the iterator, or leaving it to the garbage collector, ends the background thread. Worker processes are
        started by the first step that is asked for, and end with the thread that asked.
        """
        steps = range(first_step, first_step + num_steps)
        with contextlib.ExitStack() as stack:
            if self._plan_ahead is not None:
                self._read_ahead = ReadAhead(self._plan_ahead, steps, self._find_numbers)
                stack.callback(self._read_ahead.close)
            yield from self._load(steps)

    def send_nothing(self) -> None:
        """Stop sending from the next iterator on: the consumer makes what it computes with in its own thread."""
        self._send = None

    def close(self) -> None:
        """End the workers; a next step starts them again."""
        for fetcher in self._fetchers:
            fetcher.close()
        self._fetchers.clear()

    def _load(self, steps: range) -> Generator[StepBatch, None, None]:
        with contextlib.closing(_ReadAhead(steps, self._begin, self._make, self._decoding is not None)) as ahead:
            if self._decoding is not None:  # else another thread would only be later with the first step
                ahead.begin_reads(self.tuning.steps, 1)
            while read := ahead.take():
                start = time.perf_counter()
                try:
                    batches, cost = read.made.result() if read.made else self._make(read)
                except DataError:
                    if len(read.steps) == 1:
                        raise
                    ahead.begin_again(read.steps)  # those before the one that cannot be read are good
                    continue
                seconds = time.perf_counter() - start
                self.counters.add(replace(cost, num_made=len(batches), seconds=seconds, stall_seconds=seconds))
                step_bytes = max(batches[0].num_bytes, cost.num_bytes // len(batches))
                self._tune(step_bytes)
                steps_of_read = 1 if self._decoding else choose_steps_of_read(len(batches), step_bytes)
                ahead.begin_reads(self.tuning.steps, steps_of_read)
                yield from self._give(batches, ahead)

    def _give(self, batches: list[StepBatch], ahead: _ReadAhead) -> Generator[StepBatch, None, None]:
        for num_left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            self.counters.num_steps += 1
            self.counters.ready_steps += num_left + ahead.count_ready()
            start = time.perf_counter()
            yield batch
            self._tuner.computed.append(time.perf_counter() - start)
            self.counters.seconds += self._tuner.computed[-1]

    def _tune(self, step_bytes: int) -> None:
        """Choose the settings anew, after a step was waited for."""
        kind, line = self.tuning.kind, self._tuner.take(step_bytes)
        if not line:
            return
        to_log(line)
        if self.tuning.kind == kind:
            self._fetchers[-1].resize(self.tuning)
        else:
            self._fetchers.append(self._make_fetcher())

    def _begin(self, steps: range) -> Rows:
        if not self._fetchers:
            self._fetchers.append(self._make_fetcher())
        return self._fetchers[-1].begin(self._find_positions(steps))

    def _find_numbers(self, steps: range) -> np.ndarray:
        return self._order.locate(self._find_positions(steps))

    def _find_positions(self, steps: range) -> np.ndarray:
        """Return the positions of this rank's samples in the training order, int64 `[steps * rows]`."""
        offsets = ((step, self._shares[self._sizes.find_size(step)].offsets) for step in steps)
        return np.concatenate([self._sizes.count_samples(step) + of_step.ravel() for step, of_step in offsets])

    def _make_fetcher(self) -> Fetcher:
        samples, locate, tuning, command = self._samples, self._order.locate, self.tuning, self._command
        if self._decoding is None or tuning.kind == "threads" or command is None:
            max_threads = self._limits.most.workers + self._limits.most.requests
            return Threads(samples, locate, self._decoding, tuning, max_threads)
        max_rows = max(share.num_rows for share in self._shares.values())
        return DecodingProcesses(samples, locate, self._decoding, tuning, max_rows, command)

    def _make(self, read: _Read) -> Made:
        arrays, filled = (read.fetched or read.pending).result()
        if self._read_ahead is not None:
            self._read_ahead.note_read(read.steps.stop)
        batches: list[StepBatch] = []
        first_row = 0
        for step in read.steps:
            share = self._shares[self._sizes.find_size(step)]
            batches.append(self._make_one(step, share, arrays, filled.bad, first_row))
            first_row += share.num_rows
        return batches, filled.counters

    def _make_one(
        self, step: int, share: _Share, arrays: Arrays, all_bad: Mapping[int, BadSample], first_row: int
    ) -> StepBatch:
        """Make the batch of a step whose rows begin at `first_row`."""
        bad = {row - first_row: all_bad[row] for row in all_bad if 0 <= row - first_row < share.num_rows}
        micro_batches, num_terms = [], 0.0
        weights = share.weights.copy()
        weights.reshape(-1)[list(bad)] = 0
        for number, weight in enumerate(weights):
            start = first_row + number * share.micro_batch_rows
            rows = {name: array[start : start + len(weight)] for name, array in arrays.items()}
            micro = MicroBatch(rows, weight)
            terms = self._count_terms(micro)
            num_terms += float(terms.sum())
            micro_batches.append(micro if self._send is None else replace(micro, sent=self._send(micro, terms)))
        bad_samples = list({sample.number: sample for sample in bad.values()}.values())
        return StepBatch(self._sizes.count_samples(step), micro_batches, int(num_terms), bad_samples)
