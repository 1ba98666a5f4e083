"""What flows through sharding: records of a source in, blocks of samples out.

A *record* is what a source has: a document, an image with its label. A task turns records into *blocks*: one block is
one WebDataset sample, that is one key with a member per field: an array is a `.npy`, what is encoded (a JPEG, a text)
stays the file that it was. A block of arrays holds one or more *rows*; a row is what training counts as a sample. A
sequence of 256 bytes would waste most of a tar in headers, so language modelling puts many rows into a block; stock
`webdataset` reads such a member as one array `[rows, length]`.

A block is also a *group*: what evaluation's bootstrap resamples (a document, an image), unless the task names larger
units, *clusters* of groups that are alike (the images of one patient).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

Arrays = dict[str, np.ndarray]
"""Field name -> array `[rows, *field shape]`; of an encoded field `[rows]` of `object`, each holding bytes."""

SPLITS = ("train", "validation")

BYTES = "bytes"
"""The dtype of a field that is encoded: its member is stored as it came, and decoded when it is read."""

PICKLES = frozenset({"pyd", "pkl", "pickle", "pt", "pth"})
"""Extensions of members that only `pickle` could read, and thus could run anything."""

CLUSTER = "cluster"
"""Field that sharding adds where a task names clusters: a number for the cluster of each validation sample, else 0."""


class Lazy(NamedTuple):
    """Field that is made when it is asked for: pixels, which not every task wants."""

    content: bytes
    """The file that it is made of."""
    make: Callable[[bytes], Any]
    """Function that makes the value; it may raise DataError."""


class LazyFields(Mapping[str, Any]):
    """Fields of a record, some of them lazy."""

    def __init__(self, values: Mapping[str, Any], lazy: Mapping[str, Lazy]) -> None:
        self._values = dict(values)
        self._lazy = dict(lazy)
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._lazy:
            return self._values[name]
        if name not in self._made:
            self._made[name] = self._lazy[name].make(self._lazy[name].content)
        return self._made[name]

    def as_it_came(self, name: str) -> Any:
        """Return the value, or the file that a lazy one is made of."""
        return self._lazy[name].content if name in self._lazy else self._values[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out what was made: it is made again."""
        return LazyFields, (self._values, self._lazy)

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._lazy

    def __iter__(self) -> Iterator[str]:
        yield from (*self._values, *self._lazy)

    def __len__(self) -> int:
        return len(self._values) + len(self._lazy)

    def __repr__(self) -> str:
        return f"LazyFields({list(self)})"


@dataclass(frozen=True)
class Record:
    """Raw item of a source.

    `key` is unique within its source and names it in errors, slices and shards.
    """

    key: str
    fields: Mapping[str, Any]
    split: str = ""
    """`train` or `validation` where the source itself decides; empty: by a hash of the key."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Extension in lower case -> the file as it came. An encoded field takes the one that its extensions name."""
    unit: str = ""
    """Text that the split hashes, so that equal ones are on one side; empty: the key."""
    place: str = ""
    """Place in its source, for people; empty: the key says it."""


@dataclass(frozen=True)
class Field:
    """Field of a sample: an array of a fixed shape and dtype, or an encoded file (`dtype` = `BYTES`)."""

    name: str
    dtype: str
    """Numpy name, little endian: `uint8`, `uint16`, `int64`, `float32` …; or `BYTES`."""
    shape: tuple[int, ...] = ()
    """Shape of one row; `()` is a scalar, or a file."""
    extensions: tuple[str, ...] = ()
    """Extensions of the files of an encoded field: `("jpg", "png")`."""

    @property
    def is_encoded(self) -> bool:
        """True if each sample holds a file of its own length."""
        return self.dtype == BYTES

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Ends of the names of its members, behind the key."""
        return tuple(f".{ending}" for ending in self.extensions) if self.is_encoded else (f".{self.name}.npy",)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; what is empty is left out, so that schemas of before keep their digests."""
        document = {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}
        return {**document, "extensions": list(self.extensions)} if self.extensions else document

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Field:
        """Build a field from the result of `to_dict`."""
        return cls(document["name"], document["dtype"], tuple(document["shape"]), tuple(document.get("extensions", ())))


@dataclass(frozen=True)
class SampleSchema:
    """The fields of every sample of a dataset."""

    fields: tuple[Field, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the manifest and its digest."""
        return {"fields": [field.to_dict() for field in self.fields]}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> SampleSchema:
        """Build a schema from the result of `to_dict`."""
        return cls(tuple(Field.from_dict(field) for field in document["fields"]))


@dataclass(frozen=True)
class Block:
    """Samples under one key of a shard: the same number of rows in all fields, one where a field is encoded."""

    key: str
    arrays: Arrays = field(repr=False)
    """Field name -> `[rows, *field shape]`; of an encoded field `[1]` of `object`, holding bytes."""
    extensions: dict[str, str] = field(default_factory=dict)
    """Extension of each encoded field whose file has another one than the first of its field."""

    @property
    def num_rows(self) -> int:
        """Number of samples in it."""
        return len(next(iter(self.arrays.values())))


@dataclass(frozen=True)
class SourcePart:
    """A fixed range of a source: some of its files, or rows or lines of one. Plain data, for another process."""

    pieces: tuple[dict[str, Any], ...] = ()
    """Descriptions of what to read, in order; JSON. Equal pieces mean unchanged data."""
    context: dict[str, Any] = field(default_factory=dict)
    """Data that its records depend on beside the pieces: the classes of all images; JSON."""
    size_bytes: int = 0
    """Bytes that are read for it, about."""
    state: str = ""
    """State of its files that shows that they have changed, and is no part of what it is known by."""

    def identity(self) -> list[Any]:
        """Return what the part is made from, wherever its files lie."""
        return [self.context, *map(_remove_place, self.pieces)]


def _remove_place(piece: dict[str, Any]) -> dict[str, Any]:
    file = piece.get("file")
    return {**piece, "file": {**file, "uri": ""}} if isinstance(file, dict) else piece


@dataclass(frozen=True)
class Window:
    """Cut of a stream, rows of no shape that follow each other, into samples."""

    length: int
    """Number of rows of a sample."""
    stride: int
    """Rows from the start of one to that of the next; what is left is what they share."""
    fill: Mapping[str, int] = field(default_factory=dict)
    """Field name -> value behind the stream's last row, in the last sample."""


class Source(Protocol):
    """Raw data, read in a stream, in the same order every time. Reads in a stream, in the same order every time."""

    def listing(self) -> list[dict[str, Any]]:
        """List what is there, cheaply (names, sizes, times or versions): equal listings mean unchanged data.

        Raises DataError where the source is missing, empty or unreadable.
        """
        ...

    def parts(self, target_bytes: int) -> list[SourcePart]:
        """Cut all of it, in order, into parts of about `target_bytes`, each encoded by itself, and again if it changes.

        The listing alone decides where one ends, by the names and sizes of what stands there, so that data which is
        added, changed or removed changes the part that it belongs to and leaves the others. Raises as `listing` does.
        """
        ...

    def read(self, part: SourcePart) -> Iterator[Record]:
        """Yield the records of a part, in order. Raises DataError that names the bad item."""
        ...

    def records(self) -> Iterator[Record]:
        """Yield all records: those of one part after the other, whatever their size. Raises as `read` does."""
        for part in self.parts(sys.maxsize):
            yield from self.read(part)
