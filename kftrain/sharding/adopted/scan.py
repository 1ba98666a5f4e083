"""Reading one shard of others from its first byte to its last: members' places, and the digest of it all."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from kftrain.core import storage
from kftrain.core.remote import PositionedStream
from kftrain.data.schema import PICKLES
from kftrain.data.shards import tar_samples
from kftrain.data.shards.block_digests import HASHED_BYTES, hash_blocks
from kftrain.data.shards.tar_reader import Member
from kftrain.errors import DataError
from kftrain.sharding.sources.listing import SourceFile, reading_source

MAX_EXTENSIONS = 64
"""Most kinds of members of a shard. More come from keys with dots, which end at the first one."""

ABSENT = -1
"""Value in the place of an offset: the sample has no such member."""


@dataclass(frozen=True)
class Scanned:
    """Content of a shard that was scanned."""

    file: SourceFile
    sha256: str
    extensions: tuple[str, ...]
    table: Path
    """int64 `[samples, 1 + 2 * extensions]`: 1 in the validation split, else 0; offset and length of each member."""
    num_passed_over: int
    """Members with extensions that nobody wants."""
    blocks: Path
    """Table of the shard's digests."""


def scan(file: SourceFile, table: Path, wanted: frozenset[str] | None, is_held_out: Callable[[str], bool]) -> Scanned:
    """Read a shard once.

    Args:
        file: The shard.
        table: Where to write the table.
        wanted: Extensions; None: all.
        is_held_out: Whether the sample of a key is in the validation split.

    Memory: the table, and the keys. Raises DataError with the member's name for anything but whole, plain files.
    """
    columns: dict[str, int] = {}
    rows, num_passed_over = _Table(), 0
    with reading_source(file.uri), storage.open_read(file.uri) as stream:
        hashed = HashedStream(stream)
        for key, members in tar_samples.group_members(cast(BinaryIO, hashed), file.uri):
            chosen = _choose_members(members, wanted, f"{file.uri}:{key}")
            num_passed_over += len(members) - len(chosen)
            for extension in chosen:
                columns.setdefault(extension, len(columns))
            if len(columns) > MAX_EXTENSIONS:
                raise DataError(
                    f"more than {MAX_EXTENSIONS} kinds of members",
                    where=f"{file.uri}:{key}",
                    value=sorted(columns)[:10],
                    fix="name those that you want in data.fields; a key ends at the first dot of its name",
                )
            rows.add(is_held_out(key), {columns[extension]: member for extension, member in chosen.items()})
        sha256 = hashed.finish()
    if hashed.size_bytes != file.size_bytes:
        raise DataError("changed while it was read", where=file.uri, fix="adopt it when nobody writes to it")
    np.save(table, rows.finish(len(columns)))
    blocks = table.with_suffix(".blocks")
    blocks.write_bytes(hashed.blocks)
    return Scanned(file, sha256, tuple(columns), table, num_passed_over, blocks)


def _choose_members(members: Mapping[str, Member], wanted: frozenset[str] | None, where: str) -> dict[str, Member]:
    if wanted is not None:
        return {extension: member for extension, member in members.items() if extension in wanted}
    for extension in members:
        if extension.rsplit(".", 1)[-1] in PICKLES:
            raise DataError(
                "a pickle, which can run anything, is not read",
                where=f"{where}.{extension}",
                fix="name the members that you want in data.fields",
            )
    return dict(members)


class _Table:
    """Rows of different lengths, one after the other: a shard's extensions are known at its end."""

    def __init__(self) -> None:
        self._cells = array("q")
        self._lengths = array("q")

    def add(self, is_held_out: bool, members: dict[int, Member]) -> None:
        row = [ABSENT, 0] * (1 + max(members, default=-1))
        for column, member in members.items():
            row[2 * column : 2 * column + 2] = member.offset_bytes, member.size_bytes
        self._cells.append(int(is_held_out))
        self._cells.extend(row)
        self._lengths.append(1 + len(row))

    def finish(self, num_extensions: int) -> np.ndarray:
        """Build the table, `[samples, 1 + 2 * extensions]`."""
        lengths = np.frombuffer(self._lengths, np.int64)
        table = np.zeros((len(lengths), 1 + 2 * num_extensions), np.int64)
        table[:, 1::2] = ABSENT
        table[np.arange(table.shape[1]) < lengths[:, np.newaxis]] = np.frombuffer(self._cells, np.int64)
        return table


class HashedStream(PositionedStream):
    """Stream that is read forwards, and hashes all of it: also what is passed over."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream.seek(0, 2))
        stream.seek(0)
        self._stream = stream
        self._digest = hashlib.sha256()
        self.blocks = b""
        """Table of the digests of what was read."""
        self._chunk = b""
        self._stop = 0
        """Where the chunk ends."""

    def read(self, size: int | None = -1) -> bytes:
        """Read at most `size` bytes. Never of what lies before the chunk that was read last."""
        stop = self.size_bytes if size is None or size < 0 else min(self.size_bytes, self._position + size)
        while self._stop < stop and self._read_chunk():
            pass
        start = self._stop - len(self._chunk)
        assert start <= self._position or self._position >= stop, (start, self._position)
        content = self._chunk[self._position - start : max(0, stop - start)]
        self._position += len(content)
        return content

    def finish(self) -> str:
        """Return the sha256 of everything."""
        self._position = self.size_bytes
        while self._read_chunk():
            pass
        return self._digest.hexdigest()

    def _read_chunk(self) -> bool:
        """Read on, and keep what is not passed over."""
        content = self._stream.read(HASHED_BYTES)
        self._digest.update(content)
        self.blocks += hash_blocks(content)
        kept = self._chunk[max(0, len(self._chunk) - max(0, self._stop - self._position)) :]
        self._chunk = kept + content
        self._stop += len(content)
        return bool(content)
