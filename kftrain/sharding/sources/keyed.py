"""Which record is which, and what the split goes by: a record's content or columns, instead of where it stands.

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
from kftrain.sharding.canonical import canonical
from kftrain.sharding.parts.content import content_of

HASH_VALUES = 1 << 64
DIGEST_CHARACTERS = 24
"""A key shows so much of its content's digest: 96 bits."""


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
        """The records of a part. Raises DataError for one without a value in a column, beside what the source does."""
        for record in self._named(self._source.read(part)):
            if self._data.stratify and not record.split:
                fraction = int(self._data.validation_fraction * HASH_VALUES)
                limit = self.strata.get(_text_of(record, "stratify", self._data.stratify), fraction)
                is_held_out = hash_of(record.unit or record.key) < limit
                record = replace(record, split="validation" if is_held_out else "train")
            yield record

    def records(self) -> Iterator[Record]:
        """All records. Raises as `read` does."""
        return (record for part in self.parts(1 << 62) for record in self.read(part))

    def learn_strata(self, known: Mapping[str, int] | None = None) -> None:
        """Takes the thresholds that are known, or reads everything for them. Raises DataError."""
        self.strata = dict(known or {})
        hashes: dict[str, array[int]] = defaultdict(lambda: array("Q"))
        for record in self._named(self._source.records()) if self._data.stratify and not known else ():
            hashes[_text_of(record, "stratify", self._data.stratify)].append(hash_of(record.unit or record.key))
        fraction = self._data.validation_fraction
        for name, found in hashes.items():
            ordered = np.unique(found)
            self.largest_stratum = max(self.largest_stratum, len(ordered))
            num_held_out = min(len(ordered) - 1, max(1, int(fraction * len(ordered) + 0.5)))
            lowest = int(ordered[num_held_out - 1]) + 1 if num_held_out else 0
            self.strata[name] = min(max(int(fraction * HASH_VALUES), lowest), int(ordered[num_held_out]))

    def _named(self, records: Iterator[Record]) -> Iterator[Record]:
        key, group = self._data.key, self._data.group
        counts = Counter[str]()
        for record in records:
            unit = _text_of(record, "group", group) if group else record.unit
            if key == CONTENT_KEY:
                digest = _content_digest(record)
                name = "".join(record.key.rpartition(":")[:2]) + digest[:DIGEST_CHARACTERS]
                counts[name] += 1
                number = f"#{counts[name]}" if counts[name] > 1 else ""
                record = replace(record, key=name + number, unit=unit or digest, place=record.key)
            elif key or unit:
                record = replace(record, key=_text_of(record, "key", key) if key else record.key, unit=unit)
            yield record


def hash_of(name: str) -> int:
    """Compute what the split goes by: the first 64 bits of the sha256 of a name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def _content_digest(record: Record) -> str:
    content = content_of(record, ())
    if isinstance(content.get("class_names"), tuple):  # those of all images
        del content["class_names"]
    try:
        return hashlib.sha256(b"".join(canonical(content))).hexdigest()
    except TypeError as error:
        what = f"a column holds a {error}, which has no digest"
        raise DataError(what, where=record.key, fix="name the column of its key in data.key") from error


def _text_of(record: Record, setting: str, column: str) -> str:
    value = record.fields.get(column)
    if isinstance(value, bytes):  # the text
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str | int | float) or value == "" or value != value:
        where, fix = f"{record.place or record.key}: data.{setting}", f"it has: {', '.join(record.fields)}"
        raise DataError(f"the column '{column}' holds neither text nor a number", where=where, value=value, fix=fix)
    return str(value)
