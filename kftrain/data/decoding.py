"""Rows as they are stored become rows as they are used, one by one, in arrays that are there already.

The random numbers of a sample are a function of the seed and of its position in the training order, counted on through
all epochs: neither the number of processes nor of workers, nor where an attempt began, changes one of them. Philox
makes them from a key (of the seed) and a counter (of the position) without any state between samples, so that one
generator is put where it is wanted, which takes a tenth of making a new one.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from kftrain.core import traffic
from kftrain.core.plugins import user_code
from kftrain.data.counters import Counters
from kftrain.data.schema import Arrays
from kftrain.errors import DataError, KftrainError, UserCodeError, error_from_dict
from kftrain.process.machine import read_busy_seconds

if TYPE_CHECKING:
    from kftrain.tasks.base import TrainingTask

DecodeRow = Callable[[Arrays, np.random.Generator], Arrays]
"""Function from a sample as it is stored to the same as it is used. The generator is for this call only."""


class Samples(Protocol):
    """Samples that are read by number: a split, or a view of one or of several."""

    @property
    def num_samples(self) -> int:
        """Number of samples of one epoch."""

    def read(self, samples: np.ndarray) -> Arrays:
        """Read samples by number, int64 `[k]`, as they are stored: field name -> `[k, *shape]`, files as `object`."""

    def place_of(self, sample: int) -> str:
        """Tell people where a sample lies: the shard and the key. Slow."""


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be decoded."""

    number: int
    """Number in stored order."""
    error: KftrainError
    """Error that names the shard and the key."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for another process."""
        return {"number": self.number, "error": self.error.to_dict()}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> BadSample:
        """Build it from the result of `to_dict`."""
        return cls(document["number"], error_from_dict(document["error"]))


class Generators:
    """A generator of random numbers that is put to any position of the training order.

    Not for several threads.
    """

    def __init__(self, seed: int) -> None:
        key = np.frombuffer(hashlib.sha256(f"decode/{seed}".encode()).digest()[:16], "<u8").astype(np.uint64)
        self._philox = np.random.Philox(key=key)
        self._generator = np.random.Generator(self._philox)
        self._start: Any = self._philox.state
        self._counter = self._start["state"]["counter"]

    def at(self, position: int) -> np.random.Generator:
        """Return the generator at the first random number of a position; the one returned before is the same object.

        The first two words of the counter are the generator's own: each position has 2^130 numbers for itself.
        """
        self._counter[2] = position
        self._philox.state = self._start
        return self._generator


@dataclass(frozen=True)
class Layout:
    """Names, types and shapes of a decoded sample: all samples of a dataset have the same."""

    example: Arrays
    """The first good sample of the training order. It stands where a bad one would, with weight 0: a row of zeros might
    give what is not a number."""

    @classmethod
    def of(cls, decoded: Any) -> Layout:
        """Take the layout of a decoded sample. Raises UserCodeError where it is none."""
        if not isinstance(decoded, Mapping) or not decoded:
            raise UserCodeError(f"must return a dict of arrays, got {type(decoded).__name__}", where="task.decode")
        example = {str(name): np.array(value) for name, value in decoded.items()}
        for name, value in example.items():
            if value.dtype.kind not in "biufc":
                raise UserCodeError(f"must return numbers, got {value.dtype} as {name!r}", where="task.decode")
        return cls(example)

    @property
    def row_bytes(self) -> int:
        """Bytes of one decoded sample."""
        return sum(value.nbytes for value in self.example.values())

    def to_list(self) -> list[tuple[str, str, list[int]]]:
        """Return name, dtype and shape of each field, as plain data."""
        return [(name, value.dtype.str, list(value.shape)) for name, value in self.example.items()]

    def make_arrays(self, num_rows: int) -> Arrays:
        """Make empty arrays for so many samples."""
        return {name: np.empty((num_rows, *value.shape), value.dtype) for name, value in self.example.items()}


def wrap_decode(task: TrainingTask, is_random: bool = True) -> DecodeRow:
    """Wrap the task's own `decode`: what it raises is a UserCodeError, or an error of ours as it is."""

    def decode(sample: Arrays, generator: np.random.Generator) -> Arrays:
        with user_code("task.decode"):
            return task.decode(sample, generator if is_random else None)

    return decode


def put_row(into: Arrays, row: int, decoded: Any) -> None:
    """Write a decoded sample to its row. Raises UserCodeError where it has another layout."""
    if not isinstance(decoded, Mapping) or decoded.keys() != into.keys():
        shown = sorted(decoded) if isinstance(decoded, Mapping) else type(decoded).__name__
        raise UserCodeError(f"must return {sorted(into)} for each sample, got {shown}", where="task.decode")
    for name, array in into.items():
        value = np.asarray(decoded[name])
        if value.dtype != array.dtype or value.shape != array.shape[1:]:
            raise UserCodeError(
                f"must return {name!r} as {array.dtype} {list(array.shape[1:])} for each sample, "
                f"got {value.dtype} {list(value.shape)}",
                where="task.decode",
            )
        array[row] = value


@dataclass(frozen=True)
class Decoding:
    """Settings of decoding."""

    decode: DecodeRow
    seed: int
    max_bad_samples: int = 0
    """Most samples of the dataset that may be bad; with 0 the first one is raised, else they are left out here and
    counted by the consumer."""


@dataclass
class Filled:
    """Result of decoding some rows: what it has cost, and bad samples."""

    counters: Counters = field(default_factory=Counters)
    bad: dict[int, BadSample] = field(default_factory=dict)
    """Row -> what is wrong with its sample."""

    def add(self, other: Filled, first_row: int) -> None:
        """Take in the rows that begin at `first_row`."""
        self.counters.add(other.counters)
        self.bad.update({first_row + row: sample for row, sample in other.bad.items()})


class Turns(NamedTuple):
    """Turns of threads that share readers and decoders; entered to read, and to decode what was read."""

    to_read: threading.Semaphore
    to_decode: threading.Semaphore


class Decoder:
    """Reader and decoder of samples; one for each thread."""

    def __init__(self, samples: Samples, decoding: Decoding, turns: Turns | None = None) -> None:
        self._samples = samples
        self._decoding = decoding
        self._turns = turns or Turns(threading.Semaphore(), threading.Semaphore())
        self._generators = Generators(decoding.seed)

    def find_layout(self, locate: Callable[[np.ndarray], np.ndarray]) -> Layout:
        """Find the layout by the first sample in training order that can be decoded: equal in every process.

        `locate`: positions -> numbers of samples.
        """
        problem: KftrainError | None = None
        for position in range(min(self._decoding.max_bad_samples + 1, self._samples.num_samples)):
            numbers = locate(np.array([position]))
            try:
                return Layout.of(self._decode(_take_row(self._samples.read(numbers), 0), position))
            except (DataError, UserCodeError) as error:
                problem = problem or self._name_sample(error, int(numbers[0]))
        assert problem is not None, "an epoch has samples"
        raise problem

    def fill(self, into: Arrays, numbers: np.ndarray, positions: np.ndarray) -> Filled:
        """Decode the samples of these numbers at these positions of the training order into the rows of `into`.

        The row of a bad sample is left as it is. Raises what reading raises, and DataError or UserCodeError, with shard
        and key, for a bad sample where none is tolerated.
        """
        with self._turns.to_read:
            arrays, counters = read_samples(self._samples, numbers)
        filled = Filled(counters)
        with self._turns.to_decode:
            start, busy = time.perf_counter(), read_busy_seconds()
            self._decode_rows(into, arrays, numbers, positions, filled)
            counters.busy_seconds = read_busy_seconds() - busy
            counters.decode_seconds = time.perf_counter() - start
        return filled

    def _decode_rows(
        self, into: Arrays, arrays: Arrays, numbers: np.ndarray, positions: np.ndarray, filled: Filled
    ) -> None:
        for row, position in enumerate(positions.tolist()):
            try:
                put_row(into, row, self._decode(_take_row(arrays, row), position))
            except (DataError, UserCodeError) as error:
                problem = self._name_sample(error, int(numbers[row]))
                if not self._decoding.max_bad_samples:
                    raise problem from error
                filled.bad[row] = BadSample(int(numbers[row]), problem)

    def _decode(self, sample: Arrays, position: int) -> Arrays:
        return self._decoding.decode(sample, self._generators.at(position))

    def _name_sample(self, error: KftrainError, number: int) -> KftrainError:
        """Name shard and key in an error."""
        return at_place(error, self._samples.place_of(number))


def at_place(error: KftrainError, place: str) -> KftrainError:
    """Name the place of a sample in its error."""
    where = f"{place}: {error.where}" if error.where else place
    return error_from_dict({**error.to_dict(), "where": where})


def read_samples(samples: Samples, numbers: np.ndarray) -> tuple[Arrays, Counters]:
    """Read samples by number; return them, and what that has cost."""
    start = time.perf_counter()
    arrays = samples.read(numbers)
    seconds = time.perf_counter() - start
    num_bytes = sum(sum(map(len, array)) if array.dtype == object else array.nbytes for array in arrays.values())
    return arrays, Counters(num_bytes, seconds, slowest_seconds=seconds, **traffic.take_counts())


def _take_row(arrays: Arrays, row: int) -> Arrays:
    return {name: array[row] for name, array in arrays.items()}
