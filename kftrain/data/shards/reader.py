"""Reads rows of one shard by number: the index says where each lies, the tar is mapped (or read in ranges, remotely).

A row of an array is a fixed number of bytes at a known offset: no header is parsed and no row is handled in Python.
Rows are only located here; those of all shards are then copied together. Encoded files have lengths of their own; of a
mapped tar they are views, not copies.
"""

from __future__ import annotations

import io
import math
import mmap
import os

import numpy as np

from kftrain.core import storage
from kftrain.data.schema import SampleSchema
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.gather import RowPlaces
from kftrain.data.shards.manifest import Shard, choose_fix, index_uri, reading, row_bytes, shard_uri
from kftrain.data.shards.mapped import MappedBytes
from kftrain.data.shards.npy_header import NOT_ARRAY, npy_header
from kftrain.data.shards.remote_bytes import Fetch, NameSamples, RemoteBytes, read_small_file
from kftrain.data.shards.tar_writer import BLOCK_BYTES
from kftrain.data.shards.verified import File, describe_truncation
from kftrain.errors import DataError

NAME_BYTES = 100
"""Bytes of a member's base name in the header of a tar."""


class ShardReader:
    """Open shard that reads rows by their number."""

    def __init__(
        self, manifest_uri: str, shard: Shard, schema: SampleSchema, cache: NodeCache, name_samples: NameSamples
    ) -> None:
        """Check all of the index, and the size of a tar that does not verify itself.

        `cache`: keeps the blocks of a remote shard. `name_samples`: names those that lie in bytes. Raises DataError
        that names what is missing or damaged.
        """
        uri = shard_uri(manifest_uri, shard)
        self._schema = schema
        self._index = read_index(manifest_uri, shard, schema, cache)
        self._row_starts = np.cumsum(self._index[:, 0]) - self._index[:, 0]
        self.file: File | None
        """File that must be hashed as a whole; None for one that verifies itself."""
        self._bytes: MappedBytes | RemoteBytes
        if storage.is_local(uri):
            with reading(uri):
                self.file, self._bytes = _map_file(uri, shard)
        else:
            self._bytes = RemoteBytes(manifest_uri, shard, cache, name_samples)
            self.file = self._bytes.file

    def locate(
        self, rows: np.ndarray, places: RowPlaces, chosen: np.ndarray, source: MappedBytes, length: int = 1
    ) -> None:
        """Find these rows and those after them, `length` each within one block, as the `chosen` ones of `places`.

        `source`: what `find` or `fetch` has returned for them.
        """
        blocks = self._find_blocks(rows)
        within = rows - self._row_starts[blocks]
        for number, field in enumerate(self._schema.fields):
            offsets, lengths = self._index[blocks, 1 + 2 * number], self._index[blocks, 2 + 2 * number]
            if field.is_encoded:
                places.put(chosen, field.name, source.files(offsets, lengths), None)
            else:
                num_bytes = row_bytes(field)
                places.put(chosen, field.name, source.locate(offsets + within * num_bytes, length * num_bytes), source)

    def find(self, rows: np.ndarray, length: int = 1) -> MappedBytes | None:
        """Return the bytes that hold these rows; None where the node lacks something of them."""
        if isinstance(self._bytes, RemoteBytes):
            return self._bytes.find_whole() or self._bytes.find(*self._find_spans(rows, length))
        return self._bytes

    def fetch(self, rows: np.ndarray, length: int = 1, is_sequence: bool = False) -> MappedBytes:
        """Return the same where the node lacks something, which is fetched. `is_sequence`: what follows is read next.

        Raises DataError for a damaged block.
        """
        if not isinstance(self._bytes, RemoteBytes):
            return self._bytes
        return self._bytes.fetch(*self._find_spans(rows, length), is_sequence)

    def plan(self, rows: np.ndarray) -> list[Fetch]:
        """Return the requests for what the node lacks of these rows."""
        if not isinstance(self._bytes, RemoteBytes) or self._bytes.find_whole():
            return []
        return self._bytes.plan(*self._find_spans(rows, 1))

    def _find_spans(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where each field of these rows starts and stops, int64 `[fields * rows]` each."""
        blocks = self._find_blocks(rows)
        starts, sizes = self._index[blocks, 1::2].T.copy(), self._index[blocks, 2::2].T.copy()
        for number, field in enumerate(self._schema.fields):
            if not field.is_encoded:
                starts[number] += (rows - self._row_starts[blocks]) * row_bytes(field)
                sizes[number] = length * row_bytes(field)
        return starts.ravel(), (starts + sizes).ravel()

    def rows_left(self, rows: np.ndarray) -> np.ndarray:
        """Count the rows from each of these to the end of its block, itself among them, int64 `[rows]`."""
        blocks = self._find_blocks(rows)
        left: np.ndarray = self._row_starts[blocks] + self._index[blocks, 0] - rows
        return left

    def member_names(self, rows: np.ndarray, field: str) -> list[str]:
        """Read the names that the tar has for the files of an encoded field: a member's header precedes its content."""
        number = [field_of_shard.name for field_of_shard in self._schema.fields].index(field)
        offsets = self._index[self._find_blocks(rows), 1 + 2 * number] - BLOCK_BYTES
        source = self._bytes
        if isinstance(source, RemoteBytes):
            source = source.fetch(offsets, offsets + BLOCK_BYTES)
        headers = source.files(offsets, np.full(len(offsets), BLOCK_BYTES))
        return [bytes(header[:NAME_BYTES]).partition(b"\0")[0].decode("utf-8", "replace") for header in headers]

    def sample_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Return bytes of each of these rows over all fields, int64 `[rows]`: what the index says, nothing is read."""
        blocks = self._find_blocks(rows)
        sizes: np.ndarray = self._index[blocks, 2::2].sum(axis=1) // self._index[blocks, 0]
        return sizes

    def _find_blocks(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._row_starts, rows, side="right") - 1


def _map_file(uri: str, shard: Shard) -> tuple[File, MappedBytes]:
    """Map a tar of this machine. Raises DataError where it has another size."""
    with storage.open_read(uri) as stream:
        file = File(uri, *storage.read_size_and_version(os.fstat(stream.fileno())), shard.sha256)
        if file.size_bytes != shard.bytes:
            raise DataError(describe_truncation(file.size_bytes, shard.bytes), where=uri, fix=choose_fix(shard))
        return file, MappedBytes(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def read_index(manifest_uri: str, shard: Shard, schema: SampleSchema, cache: NodeCache | None = None) -> np.ndarray:
    """Read the index of a shard, int64 `[blocks, 1 + 2 * fields]`.

    Raises DataError where it is not what the manifest says.

    All rows it speaks of lie within the shard: reading by a checked index never leaves the file.
    """
    uri = index_uri(manifest_uri, shard)
    content = read_small_file(uri, count_index_bytes(shard, schema), shard.index_sha256, cache, choose_fix(shard))
    try:
        index = _parse_array(content, (shard.num_blocks, 1 + 2 * len(schema.fields)))
    except NOT_ARRAY as error:
        raise DataError(f"not an array: {error}", where=uri, fix=choose_fix(shard)) from error
    if not _is_sound(index, shard, schema):
        raise DataError("the index does not fit its shard", where=uri, fix=choose_fix(shard))
    return index


def count_index_bytes(shard: Shard, schema: SampleSchema) -> int:
    """Return the size of a shard's index file, which follows from its shape."""
    shape = (shard.num_blocks, 1 + 2 * len(schema.fields))
    return len(npy_header("<i8", shape)) + 8 * shape[0] * shape[1]


def _parse_array(content: bytes, usual_shape: tuple[int, int]) -> np.ndarray:
    """Parse a `.npy` file; one of the usual shape without parsing its header, which takes longer than all the rest."""
    header = npy_header("<i8", usual_shape)
    if content.startswith(header) and len(content) == len(header) + 8 * math.prod(usual_shape):
        return np.frombuffer(content, "<i8", offset=len(header)).reshape(usual_shape)
    array: np.ndarray = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return array


def _is_sound(index: np.ndarray, shard: Shard, schema: SampleSchema) -> bool:
    if index.dtype != np.dtype("<i8") or index.shape != (shard.num_blocks, 1 + 2 * len(schema.fields)):
        return False
    # By columns and by their extremes: a mask for each comparison takes ten times longer.
    columns = np.ascontiguousarray(index.T)
    rows, offsets, lengths = columns[0], columns[1::2], columns[2::2]
    if columns.min() < 0 or rows.min() < 1 or rows.max() > shard.num_samples or rows.sum() != shard.num_samples:
        return False
    for number, field in enumerate(schema.fields):
        if rows.max() > (1 if field.is_encoded else shard.bytes // max(1, row_bytes(field))):  # no product overflows
            return False
        if not field.is_encoded and not np.array_equal(lengths[number], rows * row_bytes(field)):
            return False
    return bool(lengths.max() <= shard.bytes and (offsets <= shard.bytes - lengths).all())
