"""Reads rows of one shard by number: the index says where each lies, the tar is mapped (or read in ranges, remotely).

A row of an array is a fixed number of bytes at a known offset. Seen as an array of such byte strings, one starting at
every byte of the tar, the shard is gathered with one indexing operation per field: no header is parsed and no row is
handled in Python. Encoded files have lengths of their own; of a mapped tar they are views, not copies.
"""

from __future__ import annotations

import io
import math
import mmap
import os
from typing import Any, BinaryIO, Protocol

import numpy as np

from kftrain.core import storage
from kftrain.data.schema import Arrays, SampleSchema
from kftrain.data.shards.manifest import Shard, index_uri, reading, row_bytes, shard_uri
from kftrain.data.shards.npy_header import NOT_ARRAY, npy_header
from kftrain.data.shards.tar_writer import BLOCK_BYTES
from kftrain.data.shards.verified import File, Uses, describe_truncation, require_content, require_shard_size
from kftrain.errors import DataError

MAX_GAP_BYTES = 1 << 16
"""Remote rows that lie closer than this are fetched with one request."""

NAME_BYTES = 100
"""Bytes of a member's base name in the header of a tar."""

_FIX = "verify the shards, or shard the data again"


class ShardReader:
    """Open shard that reads rows by their number."""

    def __init__(self, manifest_uri: str, shard: Shard, schema: SampleSchema, uses: Uses | None = None) -> None:
        """Check the size of the tar and all of the index. Raises DataError that names what is missing or damaged.

        `uses`: knows whether the node has a copy of a remote shard.
        """
        uri = shard_uri(manifest_uri, shard)
        self._schema = schema
        self._index = read_index(manifest_uri, shard, schema)
        self._row_starts = np.cumsum(self._index[:, 0]) - self._index[:, 0]
        with reading(uri):
            self.file, self._bytes = _open_bytes(uri, shard, uses)

    def gather(self, rows: np.ndarray, length: int = 1) -> Arrays:
        """Read these rows and those after them, `length` each within one block: field name -> byte strings.

        `[rows]` of `V<bytes of these rows>`, or of `object`.
        """
        blocks = self._find_blocks(rows)
        within = rows - self._row_starts[blocks]
        gathered = {}
        for number, field in enumerate(self._schema.fields):
            offsets, lengths = self._index[blocks, 1 + 2 * number], self._index[blocks, 2 + 2 * number]
            if field.is_encoded:
                gathered[field.name] = self._bytes.files(offsets, lengths)
            else:
                num_bytes = row_bytes(field)
                gathered[field.name] = self._bytes.gather(offsets + within * num_bytes, length * num_bytes)
        return gathered

    def rows_left(self, rows: np.ndarray) -> np.ndarray:
        """Count the rows from each of these to the end of its block, itself among them, int64 `[rows]`."""
        blocks = self._find_blocks(rows)
        left: np.ndarray = self._row_starts[blocks] + self._index[blocks, 0] - rows
        return left

    def member_names(self, rows: np.ndarray, field: str) -> list[str]:
        """Read the names that the tar has for the files of an encoded field: a member's header precedes its content."""
        number = [field_of_shard.name for field_of_shard in self._schema.fields].index(field)
        offsets = self._index[self._find_blocks(rows), 1 + 2 * number] - BLOCK_BYTES
        headers = self._bytes.files(offsets, np.full(len(offsets), BLOCK_BYTES))
        return [bytes(header[:NAME_BYTES]).partition(b"\0")[0].decode("utf-8", "replace") for header in headers]

    def sample_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Return bytes of each of these rows over all fields, int64 `[rows]`: what the index says, nothing is read."""
        blocks = self._find_blocks(rows)
        sizes: np.ndarray = self._index[blocks, 2::2].sum(axis=1) // self._index[blocks, 0]
        return sizes

    def _find_blocks(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._row_starts, rows, side="right") - 1


def _open_bytes(uri: str, shard: Shard, uses: Uses | None) -> tuple[File, _Bytes]:
    """Open a shard's tar. Raises DataError where it has another size."""
    if not storage.is_local(uri):
        file = File(uri, *require_shard_size(uri, shard.bytes, _FIX), shard.sha256)
        return file, _RemoteBytes(uri) if uses is None else _CopiedBytes(file, uses)
    with storage.open_read(uri) as stream:
        file = File(uri, *storage.read_size_and_version(os.fstat(stream.fileno())), shard.sha256)
        if file.size_bytes != shard.bytes:
            raise DataError(describe_truncation(file.size_bytes, shard.bytes), where=uri, fix=_FIX)
        return file, _MappedBytes(stream)


def read_index(manifest_uri: str, shard: Shard, schema: SampleSchema) -> np.ndarray:
    """Read the index of a shard, int64 `[blocks, 1 + 2 * fields]`.

    Raises DataError where it is not what the manifest says.

    All rows it speaks of lie within the shard: reading by a checked index never leaves the file.
    """
    uri = index_uri(manifest_uri, shard)
    with reading(uri):
        content = storage.read_bytes(uri)
    if storage.sha256_bytes(content) != shard.index_sha256:
        require_content(uri, shard.index_sha256, _FIX)
        return read_index(manifest_uri, shard, schema)
    try:
        index = _parse_array(content, (shard.num_blocks, 1 + 2 * len(schema.fields)))
    except NOT_ARRAY as error:
        raise DataError(f"not an array: {error}", where=uri, fix=_FIX) from error
    if not _is_sound(index, shard, schema):
        raise DataError("the index does not fit its shard", where=uri, fix=_FIX)
    return index


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
    rows, offsets, lengths = index[:, 0], index[:, 1::2], index[:, 2::2]
    if (index < 0).any() or (rows < 1).any() or (rows > shard.num_samples).any() or rows.sum() != shard.num_samples:
        return False
    for number, field in enumerate(schema.fields):
        expected = rows * (0 if field.is_encoded else row_bytes(field))
        if (rows > 1).any() if field.is_encoded else (lengths[:, number] != expected).any():
            return False
    return bool((lengths <= shard.bytes).all() and (offsets <= shard.bytes - lengths).all())


class _Bytes(Protocol):
    def gather(self, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
        """Return the byte strings of one length at these offsets, dtype `V<num_bytes>`."""
        ...

    def files(self, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return those of any length, `[k]` of `object`: bytes, or views of them."""
        ...


class _MappedBytes:
    """A file of this machine, mapped: rows are copied once, from the page cache into the batch."""

    def __init__(self, stream: BinaryIO) -> None:
        self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def gather(self, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
        return _gather_strings(self._map, len(self._map), offsets, num_bytes)

    def files(self, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        view, contents = memoryview(self._map), np.empty(len(offsets), object)
        for number, (start, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
            contents[number] = view[start : start + length]
        return contents


class _RemoteBytes:
    """An object of a store: rows that lie close are fetched together, all requests of a call at once."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def gather(self, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
        ordered, places = np.unique(offsets, return_inverse=True)
        content, local = self._fetch(ordered, ordered + num_bytes)
        return _gather_strings(content, len(content), local[places], num_bytes)

    def files(self, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        ordered, first, places = np.unique(offsets, return_index=True, return_inverse=True)
        content, local = self._fetch(ordered, ordered + lengths[first])
        contents = np.empty(len(offsets), object)
        for number, (start, length) in enumerate(zip(local[places].tolist(), lengths.tolist(), strict=True)):
            contents[number] = content[start : start + length]
        return contents

    def _fetch(self, starts: np.ndarray, stops: np.ndarray) -> tuple[bytes, np.ndarray]:
        """Fetch the content of ascending ranges; return it, and where each of them begins in it."""
        # A request costs as much as some 64 KiB of bytes: what lies in small gaps is fetched, too, and thrown away.
        first_of_run = np.append(True, starts[1:] - stops[:-1] > MAX_GAP_BYTES)
        run_starts = starts[first_of_run]
        run_stops = stops[np.append(first_of_run[1:], True)]
        with reading(self._uri):
            content = b"".join(storage.read_ranges(self._uri, run_starts.tolist(), run_stops.tolist()))
        sizes = run_stops - run_starts
        runs = np.cumsum(first_of_run) - 1
        return content, starts - run_starts[runs] + (np.cumsum(sizes) - sizes)[runs]


class _CopiedBytes:
    """An object of a store, until this node has a copy of it; then the copy, which stays as long as this."""

    def __init__(self, file: File, uses: Uses) -> None:
        self._file = file
        self._uses = uses
        self._bytes: _RemoteBytes | _MappedBytes = _RemoteBytes(file.uri)

    def gather(self, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
        return self._choose_bytes().gather(offsets, num_bytes)

    def files(self, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return self._choose_bytes().files(offsets, lengths)

    def _choose_bytes(self) -> _Bytes:
        if isinstance(self._bytes, _RemoteBytes):
            stream = self._uses.open_copy(self._file)
            if stream is not None:
                with stream:  # the mapping keeps the copy's lock
                    self._bytes = _MappedBytes(stream)
        return self._bytes


def _gather_strings(buffer: Any, size_bytes: int, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
    """Gather strings of a buffer, seen as one string from every byte on; `take` would first copy all of them."""
    # A stride of one byte makes overlapping strings, so any offset is an index; numpy copies only those that are asked
    # for.
    everywhere: np.ndarray = np.ndarray((size_bytes - num_bytes + 1,), f"V{num_bytes}", buffer=buffer, strides=(1,))
    strings: np.ndarray = everywhere[offsets]
    return strings
