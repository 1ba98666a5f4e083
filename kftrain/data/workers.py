"""Who reads and decodes the samples of a step: threads of this process. See `worker_processes` for processes.

A step that is asked for is cut into pieces, one for each worker, which decode into the arrays of the whole step: what
is read ahead is bounded by steps, and a single step is ready sooner, too.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from kftrain.data.decoding import Decoder, Decoding, Filled, Layout, Samples, count_stored_bytes, put_row
from kftrain.data.schema import Arrays

Locate = Callable[[np.ndarray], np.ndarray]
"""Function from positions in the training order to numbers of samples, int64 `[k]` each."""


@dataclass(frozen=True)
class Fetched:
    """Rows of one or more steps of one rank."""

    arrays: Arrays
    filled: Filled = field(default_factory=Filled)

    def part(self, start: int, stop: int) -> Fetched:
        """Return rows start … stop - 1, by themselves."""
        if stop - start == len(next(iter(self.arrays.values()))):
            return self
        bad = {row - start: sample for row, sample in self.filled.bad.items() if start <= row < stop}
        arrays = {name: array[start:stop] for name, array in self.arrays.items()}
        return Fetched(arrays, replace(self.filled, bad=bad))


class Fetcher(Protocol):
    """Fetches the rows of positions of the training order."""

    def begin(self, positions: np.ndarray) -> Rows:
        """Ask for the samples at these positions, int64 `[k]`; do not wait for them."""
        ...

    def close(self) -> None:
        """End the workers and their threads."""
        ...


def cut_rows(num_rows: int, num_pieces: int) -> list[slice]:
    """Cut rows into equal parts, as far as they divide; none is empty."""
    num_pieces = max(1, min(num_pieces, num_rows))
    bounds = [number * num_rows // num_pieces for number in range(num_pieces + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Rows:
    """Rows of one step: pieces of work that fill its arrays."""

    arrays: Arrays
    parts: Sequence[tuple[int, Callable[[], Filled]]]
    """First row of a piece, and the function that waits for its work, or does it."""
    layout: Layout | None = None
    futures: Sequence[Future[Filled]] = ()
    """Work that can be cancelled."""

    def result(self) -> Fetched:
        """Wait for the rows, and raise what went wrong.

        Called once, in the order in which they were asked for.

        An example stands in place of each row that is bad.
        """
        filled = Filled()
        for first_row, work in self.parts:
            filled.add(work(), first_row)
        for row in filled.bad:
            assert self.layout is not None, "only what is decoded can be bad"
            put_row(self.arrays, row, self.layout.example)
        return Fetched(self.arrays, filled)

    def cancel(self) -> None:
        """Cancel the work: nobody waits for it any more."""
        for future in self.futures:
            future.cancel()


class _Threads:
    """Threads that work on steps; without any, who waits for the work does it."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="data worker") if num_threads else None

    def close(self) -> None:
        """End the threads, as `Fetcher` says."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _submit(
        self, arrays: Arrays, parts: Sequence[tuple[int, Callable[[], Filled]]], layout: Layout | None = None
    ) -> Rows:
        if self._pool is None:
            return Rows(arrays, parts, layout)
        futures = [self._pool.submit(work) for _, work in parts]
        results = [(first_row, future.result) for (first_row, _), future in zip(parts, futures, strict=True)]
        return Rows(arrays, results, layout, futures)


class Readers(_Threads):
    """Fetcher of samples that are used as they are stored."""

    def __init__(self, samples: Samples, locate: Locate, num_threads: int) -> None:
        """`num_threads`: 0 reads in the thread that waits; more read several steps at once."""
        self._samples = samples
        self._locate = locate
        super().__init__(num_threads)

    def begin(self, positions: np.ndarray) -> Rows:
        """Ask for the samples, as `Fetcher` says."""
        arrays: Arrays = {}

        def read() -> Filled:
            start = time.perf_counter()
            arrays.update(self._samples.read(self._locate(positions)))
            return Filled(count_stored_bytes(arrays), time.perf_counter() - start)

        return self._submit(arrays, [(0, read)])


class DecodingThreads(_Threads):
    """Fetcher of samples that are decoded by code that lets go of the GIL."""

    def __init__(self, samples: Samples, locate: Locate, decoding: Decoding, num_threads: int) -> None:
        """`num_threads`: 0 decodes in the thread that waits."""
        self._samples = samples
        self._locate = locate
        self._decoding = decoding
        self._num_threads = num_threads
        super().__init__(num_threads)
        self._layout = Decoder(samples, decoding).find_layout(locate)
        self._own = threading.local()

    def begin(self, positions: np.ndarray) -> Rows:
        """Ask for the samples, as `Fetcher` says."""
        arrays = self._layout.make_arrays(len(positions))
        parts = [
            (rows.start, partial(self._fill, {name: array[rows] for name, array in arrays.items()}, positions[rows]))
            for rows in cut_rows(len(positions), self._num_threads)
        ]
        return self._submit(arrays, parts, self._layout)

    def _fill(self, into: Arrays, positions: np.ndarray) -> Filled:
        if not hasattr(self._own, "decoder"):
            self._own.decoder = Decoder(self._samples, self._decoding)
        filled: Filled = self._own.decoder.fill(into, self._locate(positions), positions)
        return filled
