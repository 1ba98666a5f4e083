"""Records of a part: hashes of key and content, and the keys; so that copies are found afterwards.

    records.npy    int64 [records, 3]: hash of the name, hash of the content, 0 in training and 1 in validation
    keys.gz        a line of JSON for each record: its name, which is its key or, where that is of content, its place

Memory while writing: 24 bytes per record of the part.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from array import array
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import numpy as np

from kftrain.core import storage
from kftrain.data.schema import SPLITS, Record
from kftrain.data.shards.manifest import reading
from kftrain.data.shards.npy_header import encode_npy
from kftrain.errors import DataError
from kftrain.sharding.parts.content import hash_content, hash_key, select_content
from kftrain.sharding.parts.document import Named

RECORDS_NAME = "records.npy"
KEYS_NAME = "keys.gz"

COLUMNS = 3


class RecordLog:
    """Log of a part's records, in two files of a folder; as a context manager it closes them.

    As a context manager it closes them.
    """

    def __init__(self, folder: Path, content_names: Collection[str], max_bytes: int) -> None:
        """`content_names`: fields by which equal records are known. `max_bytes`: what is larger is oversized."""
        self._path = folder / RECORDS_NAME
        self._names = content_names
        self._max_bytes = max_bytes
        self._table = array("q")
        self._stream = (folder / KEYS_NAME).open("xb")
        self._keys = gzip.GzipFile("", "wb", compresslevel=1, fileobj=self._stream, mtime=0)
        self.empty = Named()
        self.oversized = Named()
        self.num_bytes = dict.fromkeys(SPLITS, 0)
        """Of the contents of each split."""
        self.size_counts = {split: [0] * 64 for split in SPLITS}
        """Records of each split by the number of bits of their size in bytes."""

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keys.close()
        self._stream.close()

    def note(self, record: Record, split: str) -> None:
        """Remember a record."""
        hashed, size_bytes = hash_content(select_content(record, self._names))
        name = record.place or record.key  # an equal record of another part has this key, too
        self._table.extend((hash_key(name), hashed, SPLITS.index(split)))
        self._keys.write(json.dumps(name).encode() + b"\n")
        self.num_bytes[split] += size_bytes
        self.size_counts[split][min(63, size_bytes.bit_length())] += 1
        if not size_bytes:
            self.empty.add(1, [name])
        if size_bytes > self._max_bytes:
            self.oversized.add(1, [name])

    def finish(self) -> str:
        """End the files; return the sha256 of the table."""
        self._keys.close()
        content = encode_npy(np.frombuffer(self._table, np.int64).reshape(-1, COLUMNS))
        with self._path.open("xb") as stream:
            stream.write(content)
        return hashlib.sha256(content).hexdigest()


def read_table(part_uri: str) -> np.ndarray:
    """Read `records.npy` of a part. Raises DataError."""
    uri = storage.join(part_uri, RECORDS_NAME)
    with reading(uri):
        content = storage.read_bytes(uri)
    try:
        table = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"not an array: {error}", where=uri, fix="delete the part and shard again") from error
    return np.asarray(table, np.int64).reshape(-1, COLUMNS)


def read_keys(part_uri: str, numbers: Collection[int]) -> dict[int, str]:
    """Read the keys of some records of a part, by their numbers. Raises DataError."""
    uri, last = storage.join(part_uri, KEYS_NAME), max(numbers, default=-1)
    keys = {}
    with reading(uri), storage.open_read(uri) as stream, gzip.GzipFile(fileobj=stream, mode="rb") as lines:
        for number, line in enumerate(lines):
            if number > last:
                break
            if number in numbers:
                keys[number] = json.loads(line)
    return keys
