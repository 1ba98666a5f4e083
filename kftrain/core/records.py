"""Numbered records: the files `1.json`, `2.json`, … of a folder, each created once and never changed.

Attempts, promotions, tries, turns, pauses and watermarks are kept so. Somebody who adds a record reads what is there,
decides, and appends under the next number. Of several processes that decided upon the same records only one gets that
number: an append is a compare-and-set, which neither file systems nor object stores have for a file's content.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kftrain.core import storage

RecordType = TypeVar("RecordType")


class JsonDocument(Protocol):
    """A document that can be written as JSON. Its content is unique, as `storage.create` asks for."""

    def to_dict(self) -> dict[str, Any]: ...  # noqa: D102


@dataclass(frozen=True)
class NumberedRecords(Generic[RecordType]):
    """The records in the folder `uri`; `read_file` reads one by its URI and decides what it raises."""

    uri: str
    read_file: Callable[[str], RecordType]

    def build_uri(self, number: int) -> str:
        """Return the URI of a record, whether it is there or not."""
        return storage.join(self.uri, f"{number}.json")

    def list_names(self) -> list[str]:
        """List the names of all JSON files by their numbers; one that is no record's comes first."""
        return sorted((name for name in storage.list_names(self.uri) if name.endswith(".json")), key=parse_number)

    def last_number(self) -> int:
        """Return the highest number of a record; 0 where there is none."""
        return max(map(parse_number, self.list_names()), default=0)

    def read(self, number: int) -> RecordType:
        """Read one record."""
        return self.read_file(self.build_uri(number))

    def read_last(self) -> RecordType | None:
        """Read the record with the highest number; None where there is none."""
        number = self.last_number()
        return self.read(number) if number else None

    def read_all(self, *skipped: type[Exception]) -> list[RecordType]:
        """Read all JSON files by their numbers; leave out those that raise one of these errors when they are read."""
        records = []
        for name in self.list_names():
            with contextlib.suppress(*skipped):
                records.append(self.read_file(storage.join(self.uri, name)))
        return records

    def append(self, number: int, record: JsonDocument) -> bool:
        """Create the record of this number; return False if another process has created it before."""
        try:
            storage.create_json(self.build_uri(number), record.to_dict())
        except FileExistsError:
            return False
        return True


def parse_number(uri: str) -> int:
    """Return n of a file `<n>.json`, wherever it lies; 0 for any other name."""
    stem = uri.rpartition("/")[2].removesuffix(".json")
    return int(stem) if stem.isdecimal() else 0
