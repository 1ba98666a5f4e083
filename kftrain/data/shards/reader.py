"""Reads rows of one shard by number: the index says where each lies, the tar is mapped (or read in ranges, remotely).

A row of a field is a fixed number of bytes at a known offset. Seen as an array of such byte strings, one starting at
every byte of the tar, the shard is gathered with one indexing operation per field: no header is parsed and no row is
handled in Python.
"""

from __future__ import annotations

import hashlib
import io
import mmap
from typing import Any, Protocol

import numpy as np

from kftrain import storage
from kftrain.data.schema import Arrays, SampleSchema
from kftrain.data.shards.manifest import Shard, index_name, reading, row_bytes, shard_uri
from kftrain.errors import DataError

MAX_GAP_BYTES = 1 << 16
"""Remote rows that lie closer than this are fetched with one request."""

_FIX = "verify the shards, or shard the data again"


class ShardReader:
    """An open shard."""

    def __init__(self, manifest_uri: str, shard: Shard, schema: SampleSchema) -> None:
        """Checks the size of the tar and all of the index. Raises DataError that names what is missing or damaged."""
        uri = shard_uri(manifest_uri, shard.name)
        self._schema = schema
        self._index = read_index(manifest_uri, shard, schema)
        self._row_starts = np.cumsum(self._index[:, 0]) - self._index[:, 0]
        with reading(uri):
            found = storage.size_bytes(uri)
            if found != shard.bytes:
                raise DataError(f"truncated or changed: it has {found} bytes, not {shard.bytes}", where=uri, fix=_FIX)
            self._bytes: _Bytes = _MappedBytes(uri) if storage.is_local(uri) else _RemoteBytes(uri)

    def gather(self, rows: np.ndarray) -> Arrays:
        """Field name -> the rows, in that order, as byte strings: dtype `V<bytes per row>`, `[rows]`."""
        blocks = np.searchsorted(self._row_starts, rows, side="right") - 1
        within = rows - self._row_starts[blocks]
        gathered = {}
        for number, field in enumerate(self._schema.fields, start=1):
            num_bytes = row_bytes(field)
            gathered[field.name] = self._bytes.gather(self._index[blocks, number] + within * num_bytes, num_bytes)
        return gathered


def read_index(manifest_uri: str, shard: Shard, schema: SampleSchema) -> np.ndarray:
    """The index of a shard, int64 `[blocks, 1 + fields]`. Raises DataError where it is not what the manifest says.

    All rows it speaks of lie within the shard: reading by a checked index never leaves the file.
    """
    uri = shard_uri(manifest_uri, index_name(shard.name))
    with reading(uri):
        content = storage.read_bytes(uri)
    if hashlib.sha256(content).hexdigest() != shard.index_sha256:
        raise DataError("its content has changed: the sha256 differs from the manifest's", where=uri, fix=_FIX)
    try:
        index = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"not an array: {error}", where=uri, fix=_FIX) from error
    if not _is_sound(index, shard, schema):
        raise DataError("the index does not fit its shard", where=uri, fix=_FIX)
    return np.asarray(index)


def _is_sound(index: np.ndarray, shard: Shard, schema: SampleSchema) -> bool:
    if index.dtype != np.dtype("<i8") or index.shape != (shard.num_blocks, 1 + len(schema.fields)):
        return False
    rows, offsets = index[:, :1], index[:, 1:]
    sizes = np.array([row_bytes(field) for field in schema.fields])
    if (index < 0).any() or (rows < 1).any() or (rows > shard.bytes // sizes).any() or rows.sum() != shard.num_samples:
        return False
    return bool((offsets <= shard.bytes - rows * sizes).all())


class _Bytes(Protocol):
    def gather(self, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
        """The byte strings of one length at these offsets, dtype `V<num_bytes>`."""
        ...


class _MappedBytes:
    """A file of this machine, mapped: rows are copied once, from the page cache into the batch."""

    def __init__(self, uri: str) -> None:
        with storage.open_read(uri) as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def gather(self, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
        return _strings_at(self._map, len(self._map), offsets, num_bytes)


class _RemoteBytes:
    """An object of a store: rows that lie close are fetched together, all requests of a call at once."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def gather(self, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
        ordered, places = np.unique(offsets, return_inverse=True)
        first_of_run = np.append(True, np.diff(ordered) > num_bytes + MAX_GAP_BYTES)
        starts = ordered[first_of_run]
        stops = ordered[np.append(first_of_run[1:], True)] + num_bytes
        with reading(self._uri):
            chunks = storage.read_ranges(self._uri, starts.tolist(), stops.tolist())
        content = np.frombuffer(b"".join(chunks), np.uint8)
        if content.size != (stops - starts).sum():
            raise DataError("truncated while it was read", where=self._uri, fix=_FIX)
        run_positions = np.cumsum(stops - starts) - (stops - starts)
        runs = np.cumsum(first_of_run) - 1
        local = ordered - starts[runs] + run_positions[runs]
        return _strings_at(content, content.size, local[places], num_bytes)


def _strings_at(buffer: Any, size_bytes: int, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
    """Strings of a buffer seen as one string from every byte on; `take` would first copy all of them."""
    everywhere: np.ndarray = np.ndarray((size_bytes - num_bytes + 1,), f"V{num_bytes}", buffer=buffer, strides=(1,))
    strings: np.ndarray = everywhere[offsets]
    return strings
