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
from typing import Protocol

import numpy as np

from kftrain.data.decoding import Decoder, Decoding, Filled, Layout, Samples, put_row, stored_bytes
from kftrain.data.schema import Arrays

Locate = Callable[[np.ndarray], np.ndarray]
"""From positions in the training order to numbers of samples, int64 `[k]` each."""


@dataclass(frozen=True)
class Fetched:
    """Rows of one or more steps of one rank."""

    arrays: Arrays
    filled: Filled = field(default_factory=Filled)

    def part(self, start: int, stop: int) -> Fetched:
        """Rows start … stop - 1, by themselves."""
        if stop - start == len(next(iter(self.arrays.values()))):
            return self
        bad = {row - start: sample for row, sample in self.filled.bad.items() if start <= row < stop}
        arrays = {name: array[start:stop] for name, array in self.arrays.items()}
        return Fetched(arrays, replace(self.filled, bad=bad))


class Pending(Protocol):
    """Rows that are being fetched."""

    def result(self) -> Fetched:
        """Waits for them, and raises what went wrong. Called once, in the order in which they were asked for."""
        ...

    def cancel(self) -> None:
        """Nobody waits for them any more."""
        ...


class Fetcher(Protocol):
    """Fetches the rows of positions of the training order."""

    def begin(self, positions: np.ndarray) -> Pending:
        """Asks for the samples at these positions, int64 `[k]`; does not wait for them."""
        ...

    def close(self) -> None:
        """Ends the workers."""
        ...


def pieces(num_rows: int, num_pieces: int) -> list[slice]:
    """Rows cut into equal parts, as far as they divide; none is empty."""
    num_pieces = max(1, min(num_pieces, num_rows))
    bounds = [number * num_rows // num_pieces for number in range(num_pieces + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


class _Work:
    """Something to do: begun in a pool, or done by who waits for it."""

    def __init__(self, pool: ThreadPoolExecutor | None, work: Callable[[], Filled]) -> None:
        self._work = work
        self._future: Future[Filled] | None = None if pool is None else pool.submit(work)

    def result(self) -> Filled:
        return self._work() if self._future is None else self._future.result()

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()


@dataclass(frozen=True)
class _Rows:
    """Of one step: pieces of work that fill its arrays."""

    arrays: Arrays
    parts: Sequence[tuple[int, _Work]]
    """First row of a piece, and its work."""
    layout: Layout | None = None

    def result(self) -> Fetched:
        filled = Filled()
        for first_row, work in self.parts:
            filled.add(work.result(), first_row)
        return finished(self.arrays, filled, self.layout)

    def cancel(self) -> None:
        for _, work in self.parts:
            work.cancel()


def finished(arrays: Arrays, filled: Filled, layout: Layout | None) -> Fetched:
    """The rows of a step, an example in place of each that is bad."""
    for row in filled.bad:
        assert layout is not None, "only what is decoded can be bad"
        put_row(arrays, row, layout.example)
    return Fetched(arrays, filled)


class Readers:
    """For samples that are used as they are stored."""

    def __init__(self, samples: Samples, locate: Locate, num_threads: int) -> None:
        """`num_threads`: 0 reads in the thread that waits; more read several steps at once."""
        self._samples = samples
        self._locate = locate
        self._pool = _pool(num_threads)

    def begin(self, positions: np.ndarray) -> Pending:
        """See `Fetcher`."""
        arrays: Arrays = {}

        def read() -> Filled:
            start = time.perf_counter()
            arrays.update(self._samples.read(self._locate(positions)))
            return Filled(stored_bytes(arrays), time.perf_counter() - start)

        return _Rows(arrays, [(0, _Work(self._pool, read))])

    def close(self) -> None:
        """See `Fetcher`."""
        _close(self._pool)


class DecodingThreads:
    """For samples that are decoded, by code that lets go of the GIL."""

    def __init__(self, samples: Samples, locate: Locate, decoding: Decoding, num_threads: int) -> None:
        """`num_threads`: 0 decodes in the thread that waits."""
        self._samples = samples
        self._locate = locate
        self._decoding = decoding
        self._num_threads = num_threads
        self._pool = _pool(num_threads)
        self._layout = Decoder(samples, decoding).layout(locate)
        self._own = threading.local()

    def begin(self, positions: np.ndarray) -> Pending:
        """See `Fetcher`."""
        arrays = self._layout.empty(len(positions))
        parts = [
            (rows.start, self._work(arrays, positions, rows)) for rows in pieces(len(positions), self._num_threads)
        ]
        return _Rows(arrays, parts, self._layout)

    def close(self) -> None:
        """See `Fetcher`."""
        _close(self._pool)

    def _work(self, arrays: Arrays, positions: np.ndarray, rows: slice) -> _Work:
        into, asked = {name: array[rows] for name, array in arrays.items()}, positions[rows]
        return _Work(self._pool, lambda: self._decoder().fill(into, self._locate(asked), asked))

    def _decoder(self) -> Decoder:
        if not hasattr(self._own, "decoder"):
            self._own.decoder = Decoder(self._samples, self._decoding)
        found: Decoder = self._own.decoder
        return found


def _pool(num_threads: int) -> ThreadPoolExecutor | None:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="data worker") if num_threads else None


def _close(pool: ThreadPoolExecutor | None) -> None:
    if pool is not None:
        pool.shutdown(cancel_futures=True)
