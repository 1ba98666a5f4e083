"""What flows through sharding: records of a source in, blocks of samples out.

A *record* is what a source has: a document, an image with its label. A task turns records into *blocks*: one block is
one WebDataset sample, that is one key with one `.npy` member per field. A block holds one or more *rows*; a row is what
training counts as a sample. A sequence of 256 bytes would waste most of a tar in headers, so language modelling puts
many rows into a block; stock `webdataset` reads such a member as one array `[rows, length]`.

A block is also a *group*: what evaluation's bootstrap resamples (a document, an image), unless the task names larger
units, *clusters* of groups that are alike (the images of one patient).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Arrays = dict[str, np.ndarray]
"""Field name -> array `[rows, *field shape]`."""

SPLITS = ("train", "validation")

CLUSTER = "cluster"
"""Field that sharding adds where a task names clusters: a number for the cluster of each validation sample, else 0."""


@dataclass(frozen=True)
class Record:
    """One raw item. `key` is unique within its source and names it in errors, slices and shards."""

    key: str
    fields: dict[str, Any]
    split: str = ""
    """`train` or `validation` where the source itself decides; empty: by a hash of the key."""


@dataclass(frozen=True)
class Field:
    """One field of a sample: a fixed shape and dtype."""

    name: str
    dtype: str
    """Numpy name, little endian: `uint8`, `uint16`, `int64`, `float32` …"""
    shape: tuple[int, ...] = ()
    """Shape of one row; `()` is a scalar."""


@dataclass(frozen=True)
class SampleSchema:
    """The fields of every sample of a dataset."""

    fields: tuple[Field, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the manifest and its digest."""
        return {"fields": [{"name": f.name, "dtype": f.dtype, "shape": list(f.shape)} for f in self.fields]}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> SampleSchema:
        """The inverse of `to_dict`."""
        return cls(tuple(Field(f["name"], f["dtype"], tuple(f["shape"])) for f in document["fields"]))


@dataclass(frozen=True)
class Block:
    """One key of a shard: its rows, all fields with the same number of them."""

    key: str
    arrays: Arrays = field(repr=False)

    @property
    def num_rows(self) -> int:
        """Samples in it."""
        return len(next(iter(self.arrays.values())))


class Source(Protocol):
    """Raw data. Reads in a stream, in the same order every time."""

    def listing(self) -> list[dict[str, Any]]:
        """What is there, cheaply (names, sizes, times or versions): equal listings mean unchanged data.

        Raises DataError where the source is missing, empty or unreadable.
        """
        ...

    def records(self) -> Iterator[Record]:
        """All records, keys ascending or in the order of their files. Raises DataError that names the bad item."""
        ...
