"""Writes the blocks of one split into shards: `train-000000.tar` … with an index each.

A block becomes one WebDataset sample: one member per field, in the order of the schema, `<encoded key>.<field>.npy`
for an array and `<encoded key>.<extension>` for an encoded file.

`train-000000.blocks` beside it is the table of its digests (`block_digests`).

`train-000000.index.npy` is an int64 matrix with one line per block of the shard:

    column 0           rows of the block
    columns 1 + 2 f    where the data of field f starts in the tar, in bytes: behind the member's header, and behind the
                       header of a `.npy`
    columns 2 + 2 f    how many bytes it has

Rows of one array follow each other without gaps, so row r of the block lies at `offset + r * bytes per row`: a reader
needs no header of the tar. Blocks stand in the order of the tar, and the first header of a block follows the padded end
of the block before.

Memory: a few MiB of tar, the index of the open shard, and 8 bytes per block of the split, to notice keys that
come twice.
"""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

import numpy as np

from kftrain.data.schema import Block, Field, SampleSchema
from kftrain.data.shards.keys import encode_key, split_name
from kftrain.data.shards.manifest import Shard, blocks_name, index_name, shard_name
from kftrain.data.shards.npy_header import encode_npy, npy_header, stored_dtype
from kftrain.data.shards.tar_writer import (
    BLOCK_BYTES,
    END_OF_ARCHIVE,
    MAX_MEMBER_BYTES,
    TarWriter,
    member_header,
    padding,
)
from kftrain.data.shards.verify import find_repeated
from kftrain.errors import DataError


class SplitWriter:
    """Shards of one split in a folder.

    `write` blocks, then `finish`. As a context manager it closes its files.
    """

    def __init__(
        self, folder: Path, split: str, schema: SampleSchema, shard_size_bytes: int, hash_in_line: bool = False
    ) -> None:
        """`hash_in_line`: hash in the calling thread, where processors are busy with other writers."""
        self.shards: list[Shard] = []
        """The finished ones."""
        self._folder = folder
        self._split = split
        self._shard_size_bytes = shard_size_bytes
        self._hash_in_line = hash_in_line
        self._encoder = _BlockEncoder(schema)
        self._num_columns = 1 + 2 * len(schema.fields)
        self._key_hashes = array("q")
        self._tar: TarWriter | None = None
        self._index = array("q")
        self._block_starts = array("q")

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *caught: object) -> None:
        if self._tar is not None:
            self._tar.__exit__(*caught)

    def write(self, block: Block) -> None:
        """Add a block.

        Begins a new shard where this one would grow beyond its size. Raises DataError for a wrong block.
        """
        parts, line, num_bytes = self._encoder.encode(block)
        tar = self._tar_for(num_bytes)
        self._block_starts.append(tar.num_bytes)
        self._index.extend(line)
        self._key_hashes.append(hash(block.key))
        tar.append(parts, num_bytes)

    def finish(self) -> list[Shard]:
        """End the last shard; return all of them, in order."""
        if self._tar is not None:
            self._finish_shard(self._tar)
        return self.shards

    def may_have_duplicate_keys(self) -> bool:
        """Tell whether two blocks have keys of equal hash.

        False is certain, true needs a look at the keys themselves.
        """
        return bool(find_repeated(self._key_hashes))

    def _tar_for(self, num_bytes: int) -> TarWriter:
        if self._tar is not None and self._tar.num_bytes + num_bytes + len(END_OF_ARCHIVE) > self._shard_size_bytes:
            self._finish_shard(self._tar)
        if self._tar is None:
            self._tar = TarWriter(self._folder / shard_name(self._split, len(self.shards)), self._hash_in_line)
        return self._tar

    def _finish_shard(self, tar: TarWriter) -> None:
        with tar:
            sha256, table = tar.finish()
        index = np.array(self._index, np.int64).reshape(-1, self._num_columns)
        index[:, 1::2] += np.frombuffer(self._block_starts, np.int64)[:, None]
        content, name = encode_npy(index), index_name(tar.path.name)
        (self._folder / name).write_bytes(content)
        (self._folder / blocks_name(name)).write_bytes(table)
        self.shards.append(
            Shard(
                name=tar.path.name,
                bytes=tar.num_bytes,
                sha256=sha256,
                num_blocks=len(index),
                num_samples=int(index[:, 0].sum()),
                index_sha256=hashlib.sha256(content).hexdigest(),
                blocks_sha256=hashlib.sha256(table).hexdigest(),
            )
        )
        self._tar = None
        self._index = array("q")
        self._block_starts = array("q")


class _BlockEncoder:
    """Blocks to tar members, under one schema."""

    def __init__(self, schema: SampleSchema) -> None:
        self._members = [_FileMember(field) if field.is_encoded else _ArrayMember(field) for field in schema.fields]
        self._names = {field.name for field in schema.fields}
        self._max_suffix_bytes = max(len(suffix) for field in schema.fields for suffix in field.suffixes)

    def encode(self, block: Block) -> tuple[list[bytes | memoryview], list[int], int]:
        """Return the block's members in parts, its line of the index with relative offsets, and its size in bytes."""
        num_rows = self._num_rows(block)
        names = split_name(encode_key(block.key, self._max_suffix_bytes), self._max_suffix_bytes)
        assert names is not None, block.key
        folder, base = names[0].encode("ascii"), names[1].encode("ascii")
        parts: list[bytes | memoryview] = []
        line, position = [num_rows], 0
        for member in self._members:
            suffix, head, data, num_bytes = member.encode(block, num_rows)
            size_bytes = len(head) + num_bytes
            if size_bytes > MAX_MEMBER_BYTES:
                raise _make_mismatch_error(block, f"field {member.name} exceeds the 8 GiB of a tar member")
            end = padding(size_bytes)
            parts += (member_header(folder, base + suffix, size_bytes), head, data, end)
            position += BLOCK_BYTES
            line += (position + len(head), num_bytes)
            position += size_bytes + len(end)
        return parts, line, position

    def _num_rows(self, block: Block) -> int:
        if not block.key:
            raise _make_mismatch_error(block, "a block has an empty key")
        if block.arrays.keys() != self._names:
            raise _make_mismatch_error(
                block, f"a block has the fields {sorted(block.arrays)}, not {sorted(self._names)}"
            )
        first = np.asarray(block.arrays[self._members[0].name])
        if not first.ndim or not len(first):
            raise _make_mismatch_error(block, "a block has no rows")
        return len(first)


class _ArrayMember:
    """The rows of a field of numbers, as a `.npy`."""

    def __init__(self, field: Field) -> None:
        self.name = field.name
        self._suffix = field.suffixes[0].encode("ascii")
        self._dtype = stored_dtype(field.dtype)
        self._descr = self._dtype.str
        self._shape = field.shape

    def encode(self, block: Block, num_rows: int) -> tuple[bytes, bytes, memoryview, int]:
        """Return the end of the member's name, the `.npy` header, the rows, and their size in bytes."""
        rows = np.asarray(block.arrays[self.name], order="C")
        shape = rows.shape
        if rows.dtype != self._dtype or shape != (num_rows, *self._shape):
            actual = f"{rows.dtype} {list(shape)}"
            raise _make_mismatch_error(
                block, f"field {self.name} is {actual}, not {self._dtype} {[num_rows, *self._shape]}"
            )
        return self._suffix, npy_header(self._descr, shape), rows.data, rows.nbytes


class _FileMember:
    """A file that stays as it is."""

    def __init__(self, field: Field) -> None:
        self.name = field.name
        self._suffixes = {extension: f".{extension}".encode("ascii") for extension in field.extensions}
        self._usual = field.extensions[0]

    def encode(self, block: Block, num_rows: int) -> tuple[bytes, bytes, bytes, int]:
        """Return the end of the member's name, nothing, the content, and its size in bytes."""
        extension = block.extensions.get(self.name, self._usual)
        if extension not in self._suffixes:
            raise _make_mismatch_error(
                block, f"field {self.name} is a .{extension}, not one of {sorted(self._suffixes)}"
            )
        files = block.arrays[self.name]
        content = files[0] if len(files) == 1 else None
        if not isinstance(content, bytes):
            raise _make_mismatch_error(block, f"field {self.name} is not the bytes of one file")
        return self._suffixes[extension], b"", content, len(content)


def _make_mismatch_error(block: Block, what: str) -> DataError:
    return DataError(f"{what} (encoding {block.key!r})", where="task", fix="make encode() yield what schema() says")
