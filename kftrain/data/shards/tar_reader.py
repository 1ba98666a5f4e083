"""Walks the headers of a tar without unpacking anything. What is not a whole archive of plain files is a DataError.

Read are USTAR, PAX with headers of one member and of all, GNU long names, sizes in base 256, and what was before there
were standards (v7). Most readers take a damaged header or a missing end for the end of the archive and lose the rest
without a word; this one does not. Refused by name: links, devices and pipes, whose data is elsewhere; sparse files,
which hold less than they say; names that are absolute or climb.

Memory: one header, and at most `MAX_EXPLANATION_BYTES` of what explains the next, whatever sizes the archive claims.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, TypedDict

from kftrain.data.shards.tar_writer import BLOCK_BYTES
from kftrain.errors import DataError

MAX_EXPLANATION_BYTES = 1 << 20
"""Most bytes of a header that explains the next one: names have a few hundred, attributes a few thousand."""

_FIX = "the shard is damaged, cut off or compressed: write it again"
_SEARCH_BYTES = 1 << 20

_OCTAL = re.compile(rb"[ \0]*([0-7]{0,12})[ \0]*")
_DIGITS = re.compile(rb"[0-9]{1,19}")
_OF_SPARSE = (b"GNU.sparse.", b"SCHILY.realsize")
_PAX_RECORD = re.compile(rb"([0-9]{1,9}) ")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}

_FILES, _FOLDER, _LABEL, _SPARSE = (b"0", b"\0", b"7"), b"5", b"V", b"S"
_PAX, _PAX_OF_ALL, _LONG_NAME, _LONG_LINK = (b"x", b"X"), b"g", b"L", b"K"
_EXPLAINING = frozenset((*_PAX, _PAX_OF_ALL, _LONG_NAME, _LONG_LINK))
_OTHERS = {b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe", b"M": "half a file"}


class Member(NamedTuple):
    """Regular file of an archive."""

    name: str
    """Relative name, without `./` before it."""
    offset_bytes: int
    """Byte at which its content starts."""
    size_bytes: int


class _Header(NamedTuple):
    """Fields of the 512 bytes of a header."""

    name: str
    kind: bytes
    size_bytes: int


class _Explained(TypedDict, total=False):
    """Facts about a member that the headers before its own say."""

    name: str
    size_bytes: int
    is_sparse: bool


def walk(stream: BinaryIO, where: str) -> Iterator[Member]:
    """Yield all regular files of an archive, in order; folders are passed over. `where` names it in errors.

    The stream may be moved between two members. Every member lies within it, from `offset_bytes` on.
    """
    archive = _Archive(stream, where)
    of_all, position = _Explained(), 0
    while True:
        of_next, position = _read_explanations(archive, position, of_all)
        header = archive.header(position)
        if header is None:
            if of_next:
                raise archive.make_error("a header explains a member that is not there", position)
            archive.require_end(position)
            return
        said: _Explained = {"name": header.name, "size_bytes": header.size_bytes, **of_all, **of_next}
        name, start = _plain_name(said["name"], where), position + BLOCK_BYTES
        if header.kind in (_FOLDER, _LABEL) or (header.kind == b"\0" and name.endswith("/")):
            position = start
            continue
        _require_plain(header.kind, said.get("is_sparse", False), f"{where}:{name}")
        member = Member(name, start, said["size_bytes"])
        archive.require_whole(member)
        yield member
        position = _pad(start + member.size_bytes)


def _read_explanations(archive: _Archive, position: int, of_all: _Explained) -> tuple[_Explained, int]:
    """Read what the headers from `position` on say of the member behind them, and where that one's own stands.

    What they say of all members that follow goes into `of_all`.
    """
    of_next, seen = _Explained(), set[bytes]()
    while (header := archive.header(position)) is not None and header.kind in _EXPLAINING:
        if header.kind in seen:
            raise archive.make_error("two headers of one kind explain the same member", position)
        said = _read_explanation(archive, header, position)
        if header.kind == _PAX_OF_ALL:
            of_all.update(said)
        else:
            if "name" in said and "name" in of_next:
                raise archive.make_error("two headers name the same member", position)
            of_next.update(said)
            seen.add(header.kind)
        position = _pad(position + BLOCK_BYTES + header.size_bytes)
    return of_next, position


class _Archive:
    """The bytes, never asked for more than there are."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self._stream = stream
        self._where = where
        self._num_bytes = stream.seek(0, io.SEEK_END)

    def header(self, position: int) -> _Header | None:
        """Return the header there; None for an end mark."""
        block = self._read(position, BLOCK_BYTES)
        if position == 0:
            self._refuse_compressed(block)
        if len(block) < BLOCK_BYTES:
            raise self.make_error("the archive ends before its end mark", position)
        if not any(block):
            return None
        if not _has_checksum(block):
            raise self.make_error("a header has the wrong checksum", position)
        size_bytes = _parse_number(block[124:136])
        if size_bytes is None:
            raise self.make_error("a header has no size", position)
        return _Header(_read_name(block), block[156:157], size_bytes)

    def _refuse_compressed(self, start: bytes) -> None:
        for magic, kind in _COMPRESSED.items():
            if start.startswith(magic):
                raise DataError(f"not a whole tar: it is compressed ({kind})", where=self._where, fix=_FIX)

    def content(self, header: _Header, position: int) -> bytes:
        """Return the content of a header that explains the next one."""
        if header.size_bytes > MAX_EXPLANATION_BYTES:
            what = f"a header explains the next one in {header.size_bytes:,} bytes; {MAX_EXPLANATION_BYTES:,} are read"
            raise self.make_error(what, position)
        content = self._read(position + BLOCK_BYTES, header.size_bytes)
        if len(content) < header.size_bytes:
            raise self.make_error("the archive ends before its end mark", position)
        return content

    def require_whole(self, member: Member) -> None:
        """Raise DataError for a member that is not all there."""
        num_held = max(0, self._num_bytes - member.offset_bytes)
        if num_held < member.size_bytes:
            what = f"the member is cut off: it holds {num_held:,} of {member.size_bytes:,} bytes"
            raise DataError(what, where=f"{self._where}:{member.name}", fix=_FIX)

    def require_end(self, position: int) -> None:
        """Raise DataError for anything behind the end mark at `position`."""
        for start in range(position, self._num_bytes, _SEARCH_BYTES):
            if self._read(start, _SEARCH_BYTES).strip(b"\0"):
                raise self.make_error("there is something behind the end mark", position)

    def make_error(self, what: str, position: int) -> DataError:
        """Make the error for what stands at `position`."""
        return DataError(what, where=self._where, value=position, fix=_FIX)

    def _read(self, position: int, num_bytes: int) -> bytes:
        self._stream.seek(min(position, self._num_bytes))
        return self._stream.read(max(0, min(num_bytes, self._num_bytes - position)))


def _pad(position: int) -> int:
    """Return the next multiple of a block."""
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES


def _has_checksum(block: bytes) -> bool:
    """Tell whether the bytes, those of the sum as spaces, add up; some old writers took them for signed."""
    stored = _parse_number(block[148:156])
    expected = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if stored == expected:
        return True
    negative = sum(byte > 127 for byte in (*block[:148], *block[156:]))
    return stored is not None and stored == expected - 256 * negative


def _parse_number(field: bytes) -> int | None:
    """Parse octal digits, or base 256 where the first bit is set; None for what is neither. Nothing is 0."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None
    match = _OCTAL.fullmatch(field)
    return int(match[1] or b"0", 8) if match else None


def _read_name(block: bytes) -> str:
    """Read the member's name; what stands behind the device numbers is a part of it in USTAR alone."""
    folder = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    base = block[:100].split(b"\0", 1)[0]
    return _decode_text(folder + b"/" + base if folder else base)


def _decode_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _read_explanation(archive: _Archive, header: _Header, position: int) -> _Explained:
    """Read what a header says in its content of the members behind it."""
    content, said = archive.content(header, position), _Explained()
    if header.kind == _LONG_LINK:
        return said
    values = {b"path": content.rstrip(b"\0")} if header.kind == _LONG_NAME else _parse_pax_records(content)
    if values is None:
        raise archive.make_error("a PAX header is damaged", position)
    if b"path" in values:
        said["name"] = _decode_text(values[b"path"])
    if b"size" in values:
        if not _DIGITS.fullmatch(values[b"size"]):
            raise archive.make_error("a PAX header has no size", position)
        said["size_bytes"] = int(values[b"size"])
    if any(key.startswith(_OF_SPARSE) for key in values):
        said["is_sparse"] = True
    return said


def _parse_pax_records(content: bytes) -> dict[bytes, bytes] | None:
    """Records of `<length> <key>=<value>`, each with its line end; None for anything else."""
    values: dict[bytes, bytes] = {}
    position = 0
    while position < len(content):
        match = _PAX_RECORD.match(content, position)
        stop = position + int(match[1]) if match else 0
        if match is None or not match.end() < stop <= len(content) or content[stop - 1 : stop] != b"\n":
            return None if content[position:].strip(b"\0") else values
        key, equals, value = content[match.end() : stop - 1].partition(b"=")
        if not key or not equals:
            return None
        values[key] = value
        position = stop
    return values


def _plain_name(name: str, where: str) -> str:
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    problem = "is absolute" if name.startswith("/") else "climbs" if ".." in name.split("/") else ""
    if "\0" in name:
        problem = "holds a zero"
    if problem:
        fix = "write the shard again with plain names"
        raise DataError(f"the name of a member {problem}", where=where, value=name, fix=fix)
    return name


def _require_plain(kind: bytes, is_sparse: bool, where: str) -> None:
    if is_sparse or kind == _SPARSE:
        raise DataError("a sparse file, which holds less than it says", where=where, fix="write it with all its bytes")
    if kind not in _FILES:
        what = f"neither a file nor a folder, but {_OTHERS.get(kind, 'of an unknown kind')}"
        raise DataError(what, where=where, value=_decode_text(kind), fix="store links as the files that they mean")
