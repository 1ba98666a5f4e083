"""Writes the blocks of one split into shards: `train-000000.tar` … with an index each.

A block becomes one WebDataset sample: members `<encoded key>.<field>.npy`, one per field, in the order of the
schema.

`train-000000.index.npy` is an int64 matrix with one line per block of the shard:

    column 0       rows of the block column 1 + f   where the data of field f starts in the tar, in bytes
    (after the member's header and the `.npy` header)

Rows of one field follow each other without gaps, so row r of the block lies at `offset + r * bytes per row`:
a reader needs no header of the tar. Blocks stand in the order of the tar, and the first header of a block
follows the padded end of the block before.

Memory: a few MiB of tar, the index of the open shard, and 8 bytes per block of the split, to notice keys that
come twice.
"""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path
from types import TracebackType

import numpy as np

from kftrain.data.schema import Block, SampleSchema
from kftrain.data.shards.keys import encode_key, split_name
from kftrain.data.shards.manifest import Shard, index_name, repeated, shard_name
from kftrain.data.shards.npy_header import npy_bytes, npy_header, stored_dtype
from kftrain.data.shards.tar_writer import (
    BLOCK_BYTES,
    END_OF_ARCHIVE,
    MAX_MEMBER_BYTES,
    TarWriter,
    member_header,
    padding,
)
from kftrain.errors import DataError


class SplitWriter:
    """Shards of one split in a folder.

    `write` blocks, then `finish`. As a context manager it closes its files.
    """

    def __init__(self, folder: Path, split: str, schema: SampleSchema, shard_size_bytes: int) -> None:
        self.shards: list[Shard] = []
        """The finished ones."""
        self._folder = folder
        self._split = split
        self._shard_size_bytes = shard_size_bytes
        self._encoder = _BlockEncoder(schema)
        self._num_columns = 1 + len(schema.fields)
        self._key_hashes = array("q")
        self._tar: TarWriter | None = None
        self._index = array("q")

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tar is not None:
            self._tar.__exit__(kind, error, trace)

    def write(self, block: Block) -> None:
        """Adds a block.

        Begins a new shard where this one would grow beyond its size. Raises DataError for a wrong block.
        """
        parts, line, num_bytes = self._encoder.encode(block)
        tar = self._tar_for(num_bytes)
        start = tar.num_bytes
        self._index.append(line[0])
        self._index.extend([start + offset for offset in line[1:]])
        self._key_hashes.append(hash(block.key))
        tar.append(parts, num_bytes)

    def finish(self) -> list[Shard]:
        """Ends the last shard and gives all of them, in order."""
        if self._tar is not None:
            self._finish_shard(self._tar)
        return self.shards

    def may_have_duplicate_keys(self) -> bool:
        """Whether two blocks have keys of equal hash.

        False is certain, true needs a look at the keys themselves.
        """
        return bool(repeated(self._key_hashes))

    def _tar_for(self, num_bytes: int) -> TarWriter:
        if self._tar is not None and self._tar.num_bytes + num_bytes + len(END_OF_ARCHIVE) > self._shard_size_bytes:
            self._finish_shard(self._tar)
        if self._tar is None:
            self._tar = TarWriter(self._folder / shard_name(self._split, len(self.shards)))
        return self._tar

    def _finish_shard(self, tar: TarWriter) -> None:
        with tar:
            sha256 = tar.finish()
        index = np.frombuffer(self._index, np.int64).reshape(-1, self._num_columns)
        content = npy_bytes(index)
        (self._folder / index_name(tar.path.name)).write_bytes(content)
        self.shards.append(
            Shard(
                name=tar.path.name,
                bytes=tar.num_bytes,
                sha256=sha256,
                num_blocks=len(index),
                num_samples=int(index[:, 0].sum()),
                index_sha256=hashlib.sha256(content).hexdigest(),
            )
        )
        self._tar = None
        self._index = array("q")


class _BlockEncoder:
    """Blocks to tar members, under one schema."""

    def __init__(self, schema: SampleSchema) -> None:
        dtypes = [stored_dtype(f.dtype) for f in schema.fields]
        self._fields = [
            (f.name, f".{f.name}.npy".encode("ascii"), dtype, dtype.str, f.shape)
            for f, dtype in zip(schema.fields, dtypes, strict=True)
        ]
        self._names = {f.name for f in schema.fields}
        self._max_suffix_bytes = max(len(suffix) for _, suffix, *_ in self._fields)

    def encode(self, block: Block) -> tuple[list[bytes], list[int], int]:
        """The block's members in parts, its line of the index with offsets from its start, and its size in bytes."""
        num_rows = self._num_rows(block)
        names = split_name(encode_key(block.key, self._max_suffix_bytes), self._max_suffix_bytes)
        assert names is not None, block.key
        folder, base = (name.encode("ascii") for name in names)
        parts: list[bytes] = []
        line, position = [num_rows], 0
        for name, suffix, dtype, descr, shape in self._fields:
            array_ = np.asarray(block.arrays[name])
            if array_.dtype != dtype or array_.shape != (num_rows, *shape):
                found = f"{array_.dtype} {list(array_.shape)}"
                raise _mismatch(block, f"field {name} is {found}, not {dtype} {[num_rows, *shape]}")
            head, data = npy_header(descr, array_.shape), array_.tobytes()
            size_bytes = len(head) + len(data)
            if size_bytes > MAX_MEMBER_BYTES:
                raise _mismatch(block, f"field {name} exceeds the 8 GiB of a tar member")
            end = padding(size_bytes)
            parts += (member_header(folder, base + suffix, size_bytes), head, data, end)
            line.append(position + BLOCK_BYTES + len(head))
            position += BLOCK_BYTES + size_bytes + len(end)
        return parts, line, position

    def _num_rows(self, block: Block) -> int:
        if not block.key:
            raise _mismatch(block, "a block has an empty key")
        if block.arrays.keys() != self._names:
            raise _mismatch(block, f"a block has the fields {sorted(block.arrays)}, not {sorted(self._names)}")
        first = np.asarray(block.arrays[self._fields[0][0]])
        if not first.ndim or not len(first):
            raise _mismatch(block, "a block has no rows")
        return len(first)


def _mismatch(block: Block, what: str) -> DataError:
    return DataError(f"{what} (encoding {block.key!r})", where="task", fix="make encode() yield what schema() says")
