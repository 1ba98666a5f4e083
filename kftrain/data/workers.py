"""Who reads and decodes the samples of a step: threads of this process. See `worker_processes` for processes.

Where fewer steps are read ahead than there are workers, a step is cut into pieces, which they decode into the arrays of
the whole step: what is read ahead is bounded by steps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from kftrain.data.decoding import Decoder, Decoding, Filled, Layout, Samples, Turns, put_row, read_samples
from kftrain.data.schema import Arrays
from kftrain.data.tuning import Tuning

Locate = Callable[[np.ndarray], np.ndarray]
"""Function from positions in the training order to numbers of samples, int64 `[k]` each."""


def cut_rows(num_rows: int, num_pieces: int) -> list[slice]:
    """Cut rows into equal parts, as far as they divide; none is empty."""
    num_pieces = max(1, min(num_pieces, num_rows))
    bounds = [number * num_rows // num_pieces for number in range(num_pieces + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Rows:
    """Rows of one or more steps of one rank: pieces of work that fill their arrays."""

    arrays: Arrays
    parts: Sequence[tuple[int, Callable[[], Filled]]]
    """First row of a piece, and the function that waits for its work, or does it."""
    layout: Layout | None = None
    futures: Sequence[Future[Filled]] = ()
    """Work that can be cancelled."""

    def result(self) -> tuple[Arrays, Filled]:
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
        return self.arrays, filled

    def cancel(self) -> None:
        """Cancel the work: nobody waits for it any more."""
        for future in self.futures:
            future.cancel()


class Threads:
    """Threads of this process that read rows, and decode them by code that lets go of the GIL.

    One thread calls it, of whatever fetches rows.

    Where there are no workers and no several requests at once, the thread that waits for the rows does it.
    """

    def __init__(
        self, samples: Samples, locate: Locate, decoding: Decoding | None, tuning: Tuning, max_threads: int
    ) -> None:
        """Without `decoding` samples are used as they are stored."""
        self._samples = samples
        self._locate = locate
        self._decoding = decoding
        self._layout = None if decoding is None else Decoder(samples, decoding).find_layout(locate)
        self._pool = ThreadPoolExecutor(max(1, max_threads), thread_name_prefix="data worker")
        self._tuning = tuning
        self._turns = Turns(threading.Semaphore(tuning.requests), threading.Semaphore(max(1, tuning.workers)))
        self._own = threading.local()

    def resize(self, tuning: Tuning) -> None:
        """Let as many threads read and decode from now on: at least as many as before."""
        for _ in range(tuning.requests - self._tuning.requests):
            self._turns.to_read.release()
        for _ in range(tuning.workers - self._tuning.workers):
            self._turns.to_decode.release()
        self._tuning = tuning

    def begin(self, positions: np.ndarray) -> Rows:
        """Ask for the samples at these positions of the order, int64 `[k]`; do not wait for them."""
        arrays: Arrays = {}
        parts: list[tuple[int, Callable[[], Filled]]] = [(0, partial(self._read, arrays, positions))]
        if self._layout is not None:
            arrays = self._layout.make_arrays(len(positions))
            pieces = cut_rows(len(positions), self._tuning.pieces)
            parts = [(rows.start, partial(self._fill, arrays, positions, rows)) for rows in pieces]
        if not self._tuning.workers and self._tuning.requests == 1:
            return Rows(arrays, parts, self._layout)
        futures = [self._pool.submit(work) for _, work in parts]
        results = [(first_row, future.result) for (first_row, _), future in zip(parts, futures, strict=True)]
        return Rows(arrays, results, self._layout, futures)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, into: Arrays, positions: np.ndarray) -> Filled:
        with self._turns.to_read:
            stored, counters = read_samples(self._samples, self._locate(positions))
        into.update(stored)
        return Filled(counters)

    def _fill(self, arrays: Arrays, positions: np.ndarray, rows: slice) -> Filled:
        if not hasattr(self._own, "decoder"):
            assert self._decoding is not None
            self._own.decoder = Decoder(self._samples, self._decoding, self._turns)
        into = {name: array[rows] for name, array in arrays.items()}
        filled: Filled = self._own.decoder.fill(into, self._locate(positions[rows]), positions[rows])
        return filled
