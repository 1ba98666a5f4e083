"""Keys, units and splits of records by their content or columns, instead of by where they stand.

By its content a record has the key `<file>:<digest>`, an equal one after it `<file>:<digest>#2`, and the split hashes
the content alone. A part counts its own records; `ShardedDataset.group_keys` counts on over all parts.

A stratified split holds out, of n different records of a stratum, as many as the fraction says, rounded, at least one
and never all: those of the lowest hashes. That makes a threshold, which the first sharding keeps for all later ones.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from kftrain.data.schema import Record, Source, SourcePart
from kftrain.data.settings import CONTENT_KEY, DataConfig
from kftrain.errors import DataError
from kftrain.sharding.canonical import encode_canonically
from kftrain.sharding.parts.content import select_content

HASH_VALUES = 1 << 64
DIGEST_CHARACTERS = 24
"""Characters of its content's digest in a key: 96 bits."""


class KeyedSource:
    """A source whose records have the keys, units and splits that `data.key`, `data.group`, `data.stratify` say.

    Memory: about 100 bytes for each record of a part, and 8 for each of the source while strata are learned.
    """

    def __init__(self, source: Source, data: DataConfig, strata: Mapping[str, int] | None = None) -> None:
        self._source = source
        self._data = data
        self.strata = dict(strata or {})
        """Threshold of each stratum that is known; others are split by the fraction."""
        self.largest_stratum = 0
        """Different records of the largest stratum that was learned."""
        self.listing = source.listing
        self.parts = source.parts

    def read(self, part: SourcePart) -> Iterator[Record]:
        """Yield the records of a part.

        Raises DataError for one without a value in a column, beside what the source does.
        """
        for record in self._name_records(self._source.read(part)):
            if self._data.stratify and not record.split:
                fraction = int(self._data.validation_fraction * HASH_VALUES)
                limit = self.strata.get(_read_column(record, "stratify", self._data.stratify), fraction)
                is_held_out = hash_name(record.unit or record.key) < limit
                record = replace(record, split="validation" if is_held_out else "train")
            yield record

    def records(self) -> Iterator[Record]:
        """Yield all records. Raises as `read` does."""
        return (record for part in self.parts(1 << 62) for record in self.read(part))

    def learn_strata(self, known: Mapping[str, int] | None = None) -> None:
        """Take the thresholds that are known, or read everything for them. Raises DataError."""
        self.strata = dict(known or {})
        hashes: dict[str, array[int]] = defaultdict(lambda: array("Q"))
        for record in self._name_records(self._source.records()) if self._data.stratify and not known else ():
            hashes[_read_column(record, "stratify", self._data.stratify)].append(hash_name(record.unit or record.key))
        fraction = self._data.validation_fraction
        for name, stratum in hashes.items():
            ordered = np.unique(stratum)
            self.largest_stratum = max(self.largest_stratum, len(ordered))
            num_held_out = min(len(ordered) - 1, max(1, int(fraction * len(ordered) + 0.5)))
            lowest = int(ordered[num_held_out - 1]) + 1 if num_held_out else 0
            self.strata[name] = min(max(int(fraction * HASH_VALUES), lowest), int(ordered[num_held_out]))

    def _name_records(self, records: Iterator[Record]) -> Iterator[Record]:
        key, group = self._data.key, self._data.group
        counts = Counter[str]()
        for record in records:
            unit = _read_column(record, "group", group) if group else record.unit
            if key == CONTENT_KEY:
                digest = _digest_content(record)
                name = "".join(record.key.rpartition(":")[:2]) + digest[:DIGEST_CHARACTERS]
                counts[name] += 1
                number = f"#{counts[name]}" if counts[name] > 1 else ""
                record = replace(record, key=name + number, unit=unit or digest, place=record.key)
            elif key or unit:
                record = replace(record, key=_read_column(record, "key", key) if key else record.key, unit=unit)
            yield record


def hash_name(name: str) -> int:
    """Compute what the split goes by: the first 64 bits of the sha256 of a name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def _digest_content(record: Record) -> str:
    content = select_content(record, ())
    if isinstance(content.get("class_names"), tuple):  # those of all images
        del content["class_names"]
    try:
        return hashlib.sha256(b"".join(encode_canonically(content))).hexdigest()
    except TypeError as error:
        what = f"a column holds a {error}, which has no digest"
        raise DataError(what, where=record.key, fix="name the column of its key in data.key") from error


def _read_column(record: Record, setting: str, column: str) -> str:
    value = record.fields.get(column)
    if isinstance(value, bytes):  # the text
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str | int | float) or value == "" or value != value:
        where, fix = f"{record.place or record.key}: data.{setting}", f"it has: {', '.join(record.fields)}"
        raise DataError(f"the column '{column}' holds neither text nor a number", where=where, value=value, fix=fix)
    return str(value)
