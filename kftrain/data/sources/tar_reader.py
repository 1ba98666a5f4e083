"""Walks the headers of a tar without unpacking anything. What is not a whole, correctly summed archive is a DataError.

Most readers take a damaged header or a missing end for the end of the archive and lose the rest without a
word; this one does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from kftrain.data.shards.tar_writer import BLOCK_BYTES
from kftrain.errors import DataError

_FIX = "the shard is damaged: shard the data again"
_OCTAL = re.compile(rb" *([0-7]{1,11})[ \0]*")


class Member(NamedTuple):
    """One file of an archive."""

    name: str
    offset_bytes: int
    """Where its content starts."""
    size_bytes: int


def walk(stream: BinaryIO, where: str) -> Iterator[Member]:
    """All regular files of an archive, in order. `where` names it in errors."""
    position = 0
    while True:
        stream.seek(position)
        header = stream.read(BLOCK_BYTES)
        if len(header) < BLOCK_BYTES:
            raise DataError("the archive ends before its end mark", where=where, value=position, fix=_FIX)
        if not any(header):
            return
        member = parse_header(header, position, where)
        yield member
        position = member.offset_bytes + -(-member.size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def parse_header(header: bytes, position: int, where: str) -> Member:
    """The member whose header of 512 bytes stands at `position`."""
    checksum = _octal(header[148:156])
    if checksum != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise DataError("a header has the wrong checksum", where=where, value=position, fix=_FIX)
    size_bytes = _octal(header[124:136])
    if size_bytes is None or header[156:157] not in (b"0", b"\0"):
        raise DataError("not a plain file in USTAR format", where=where, value=position, fix=_FIX)
    base, folder = (_text(field) for field in (header[:100], header[345:500]))
    return Member(f"{folder}/{base}" if folder else base, position + BLOCK_BYTES, size_bytes)


def _octal(field: bytes) -> int | None:
    match = _OCTAL.fullmatch(field)
    return int(match[1], 8) if match else None


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "replace")
