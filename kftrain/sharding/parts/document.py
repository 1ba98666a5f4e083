"""`part.json`: the shards and records of one encoded part of a source.

    <root>/shards/parts/<part digest>/   part.json   train-000000.tar   train-000000.index.npy   …
                                         records.npy   keys.gz   (records.py)
    <root>/shards/parts/by-input/<input digest>.json   leads to it: the digest of what the part was made from

A part is named by the digest of its content, so that equal input gives one folder, whoever lists it under which times.
Datasets name the parts' shards; a part that no dataset names any more stays until somebody deletes it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kftrain.core import storage
from kftrain.data.schema import SPLITS
from kftrain.data.shards.manifest import FORMAT_VERSION, Shard
from kftrain.errors import DataError
from kftrain.run import documents

PART_NAME = "part.json"
PARTS_FOLDER = "parts"


class SplitStatistics(BaseModel):
    """Counts over the records of one split of a part."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_records: int = 0
    content_bytes: int = 0
    """Bytes of the records' contents, before they were encoded."""
    size_counts: dict[str, int] = {}
    """Number of bits of a record's size in bytes -> records."""
    classes: dict[str, dict[str, int]] = {}
    """Field that is learned -> its value -> samples; left out where there are more values than classes would have."""


MAX_NAMED = 10
"""Number of findings of each kind that are named; the others are counted."""


class Named(BaseModel):
    """A kind of finding: how often it came, and the names of the first ones."""

    model_config = ConfigDict(extra="forbid")

    count: int = 0
    first: list[str] = []

    def add(self, count: int, names: Iterable[str]) -> None:
        """Count more of them. `names`: of the first ones, of which no more are taken than are wanted."""
        self.count += count
        self.first = [*self.first, *itertools.islice(names, MAX_NAMED - len(self.first))]


class PartDocument(documents.Document):
    """Description of one encoded part of a source."""

    format_version: int = FORMAT_VERSION
    part_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    splits: dict[str, list[Shard]]
    """A part may have no samples of a split."""
    records_sha256: str
    """Digest of the table of its records."""
    statistics: dict[str, SplitStatistics]
    findings: dict[str, Named]

    def locate_shards(self, split: str) -> list[Shard]:
        """Return the split's shards as a dataset's manifest names them: by their place relative to it."""
        folder = f"../{PARTS_FOLDER}/{self.part_digest}"
        return [shard.model_copy(update={"folder": folder}) for shard in self.splits[split]]


def add_statistics(parts: Sequence[PartDocument]) -> dict[str, Any]:
    """Add up the statistics of parts: those of the dataset, as plain data by split."""
    totals: dict[str, Any] = {}
    for split in SPLITS:
        parts_of_split = [part.statistics[split] for part in parts]
        classes = {name: Counter[str]() for statistics in parts_of_split for name in statistics.classes}
        sizes = Counter[str]()
        for statistics in parts_of_split:
            sizes.update(statistics.size_counts)
            for name, counts in statistics.classes.items():
                classes[name].update(counts)
        totals[split] = {
            "num_records": sum(statistics.num_records for statistics in parts_of_split),
            "content_bytes": sum(statistics.content_bytes for statistics in parts_of_split),
            "size_counts": dict(sizes),
            "classes": {name: dict(counts) for name, counts in classes.items()},
        }
    return totals


def part_digest(
    schemas: list[dict[str, Any]], settings: dict[str, Any], splits: dict[str, list[Shard]], records: str
) -> str:
    """Digest of the part's content; the name of its folder."""
    return storage.digest_json(
        {
            "format_version": FORMAT_VERSION,
            "schemas": schemas,
            "task_settings": settings,
            "splits": {name: [[shard.sha256, shard.index_sha256] for shard in splits[name]] for name in SPLITS},
            "records": records,
        }
    )


def read_part(part_uri: str) -> PartDocument:
    """Read the part in a folder. Raises DataError where it is missing, damaged or of another format."""
    uri = storage.join(part_uri, PART_NAME)
    document = documents.read(PartDocument, uri)
    if document.format_version != FORMAT_VERSION:
        raise DataError("the part has another format", where=uri, value=document.format_version, fix="delete it")
    if document.part_digest != part_uri.rsplit("/", 1)[-1]:
        raise DataError("the part lies under another's name", where=uri, value=document.part_digest, fix="delete it")
    return document
