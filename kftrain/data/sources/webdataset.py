"""WebDataset shards that others wrote: uncompressed tars in which the files of a sample stand side by side.

The stock reader takes a damaged header or a missing end for the end of a shard, and joins or repeats keys
without a word; this one refuses them. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import itertools
import re
import tarfile
import tokenize
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from kftrain import storage
from kftrain.data.schema import Record
from kftrain.data.shards.tar_writer import BLOCK_BYTES
from kftrain.data.sources.bounded import BoundedStream
from kftrain.data.sources.decoding import IMAGE_SUFFIXES, checked_text, decode_image, parse_json, with_text
from kftrain.data.sources.file_source import FileSource
from kftrain.data.sources.listing import SourceFile, list_files, reading_source
from kftrain.errors import DataError

PICKLES = frozenset({"pyd", "pkl", "pickle", "pt", "pth"})
"""Extensions of members that only `pickle` could read, and thus could run anything."""

_IMAGES = frozenset(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)
_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
"""Key and extension of a member, as `webdataset` splits its name."""
_NO_DATA = re.compile(r"__[^/]*__($|/)")
"""Members that `webdataset` keeps for itself."""
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_NOT_ARRAY = (ValueError, SyntaxError, TypeError, EOFError, OverflowError, MemoryError, tokenize.TokenError)
"""What numpy raises for a damaged `.npy`; its header may ask for any size."""

_NOT_TAR = (tarfile.TarError, EOFError, ValueError, LookupError, OverflowError, RecursionError)
"""What `tarfile` raises for a damaged archive: headers of headers recurse, and their texts may be anything."""

_FIX = "the shard is damaged, cut off or compressed: write it again"


class WebDatasetSource(FileSource):
    """A `.tar` file, a folder of them, or a pattern of names as `shard-{000..012}.tar`: one record per sample.

    Key = `<shard>:<key of the sample>`, since shards may repeat each other's keys. By extension a member
    becomes

        .txt .text             `text`, bytes of UTF-8
        .jpg .png … (images)   `image`, uint8 `[height, width, channels]`
        .cls                   `label`, int
        .npy, .<name>.npy      `npy` or `<name>`, an array
        .json                  its fields, as a line of JSON lines; the sample's other members win over them
        anything else          its bytes, under the extension
    """

    def __init__(self, uri: str, text_field: str) -> None:
        super().__init__(uri, is_shard, "shards (*.tar)")
        self._text_field = text_field

    def entries(self) -> list[SourceFile]:
        """The shards, sorted by name. Raises DataError where there are none, or one of a pattern is missing."""
        if not is_shard_pattern(self.uri) or storage.exists(self.uri):
            return super().entries()
        folder, _, _ = self.uri.partition("{")[0].rpartition("/")
        below = {entry.name: entry for entry in list_files(folder or ".", is_shard)}
        entries = {}
        for name in expand_braces(self.uri.removeprefix(folder).removeprefix("/"), self.uri):
            if name not in below:
                raise DataError("there is no such shard", where=self.uri, value=name, fix="check the pattern")
            entries[name] = below[name]
        return [entries[name] for name in sorted(entries)]

    def records(self) -> Iterator[Record]:
        """The samples of each shard in its order. Raises DataError naming shard and member."""
        for entry in self.entries():
            with reading_source(entry.uri), storage.open_read(entry.uri) as stream:
                for key, members in _samples(stream, entry.uri):
                    fields = sample_fields(members, self._text_field, f"{entry.uri}:{key}")
                    yield Record(f"{entry.name}:{key}", fields)


def is_shard(name: str) -> bool:
    """Whether a file counts as a shard, by its suffix."""
    return name.lower().endswith(".tar")


def is_shard_pattern(source: str) -> bool:
    """Whether a source is a pattern of shards' names: with braces, and `.tar` at its end."""
    return is_shard(source) and _BRACES.search(source) is not None


def expand_braces(pattern: str, where: str) -> Iterator[str]:
    """The names behind `{000..012}` and `{a,b}`, in order. Raises DataError for other braces."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    for choice in _choices(match[1], where):
        yield from expand_braces(pattern[: match.start()] + choice + pattern[match.end() :], where)


def sample_fields(members: dict[str, bytes], text_field: str, where: str) -> dict[str, Any]:
    """The fields of one sample, from the contents of its members by extension. Raises DataError."""
    fields: dict[str, Any] = {}
    for extension, content in members.items():
        if extension != "json":
            name, value = _decode(extension, content, f"{where}.{extension}")
            if name in fields:
                raise DataError(f"two members give the field '{name}'", where=where, value=sorted(members))
            fields[name] = value
    if "json" not in members:
        return fields
    described = parse_json(members["json"], f"{where}.json")
    if not isinstance(described, dict):
        raise DataError("not a JSON object", where=f"{where}.json", value=type(described).__name__)
    if not fields or isinstance(described.get(text_field), str):
        described = with_text(described, text_field, f"{where}.json")
    return {**described, **fields}


def _choices(braces: str, where: str) -> Iterator[str]:
    match = _RANGE.fullmatch(braces)
    if match and int(match[1]) <= int(match[2]):
        digits = max(map(len, match.groups())) if any(re.match("0.", bound) for bound in match.groups()) else 0
        return (f"{number:0{digits}d}" for number in range(int(match[1]), int(match[2]) + 1))
    if match or "," not in braces:
        raise DataError("not a pattern of shards", where=where, value=f"{{{braces}}}", fix="e.g. {000..012} or {a,b}")
    return iter(braces.split(","))


def _samples(stream: BinaryIO, where: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Key and contents by extension of each sample. Memory holds one sample, and the keys of the shard."""
    seen: set[str] = set()
    for key, group in itertools.groupby(_members(stream, where), key=lambda member: member[0]):
        members: dict[str, bytes] = {}
        for _, extension, content in group:
            if key in seen or extension in members:
                what = "the key comes again after others" if key in seen else "the member comes twice"
                raise DataError(what, where=f"{where}:{key}.{extension}", fix="put the files of a sample side by side")
            members[extension] = content
        seen.add(key)
        yield key, members


def _members(stream: BinaryIO, where: str) -> Iterator[tuple[str, str, bytes]]:
    """Key, extension in lower case and content of each member that belongs to a sample."""
    bounded = BoundedStream(stream)
    try:
        with tarfile.open(fileobj=bounded, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            position = -1
            while (member := archive.next()) is not None:
                if archive.offset <= position:
                    raise tarfile.ReadError("a header leads back")
                position = archive.offset
                archive.members = []  # type: ignore[attr-defined]  # or it keeps them all
                name = member.name.removeprefix("./")
                match = _MEMBER.fullmatch(name)
                if member.isdir() or match is None or _NO_DATA.match(name):
                    continue
                yield match[1], match[2].lower(), _content(bounded, member, f"{where}:{name}")
            _require_end(bounded, archive.offset, where)
    except _NOT_TAR as error:
        raise DataError(f"not a whole tar: {error}", where=where, fix=_FIX) from error


def _content(stream: BoundedStream, member: tarfile.TarInfo, where: str) -> bytes:
    """What the archive holds of a member: its content lies there in one piece, whatever its header asks for."""
    if not member.isreg():
        raise DataError("neither a file nor a folder", where=where, fix="store links as the files that they mean")
    if member.issparse():
        raise DataError("a sparse file, which holds less than it says", where=where, fix="write it with all its bytes")
    stream.seek(member.offset_data)
    content = stream.read(member.size)
    if len(content) < member.size:
        what = f"the member is cut off: it holds {len(content):,} of {member.size:,} bytes"
        raise DataError(what, where=where, fix=_FIX)
    return content


def _require_end(stream: BoundedStream, position: int, where: str) -> None:
    """Raises DataError unless an end mark stands at `position` and nothing comes after it."""
    stream.seek(position)
    block = stream.read(BLOCK_BYTES)
    if len(block) < BLOCK_BYTES:
        raise DataError("the archive ends before its end mark", where=where, value=position, fix=_FIX)
    while block:
        if any(block):
            raise DataError("there is no header and no end mark", where=where, value=position, fix=_FIX)
        block = stream.read(storage.HASH_CHUNK_BYTES)


def _decode(extension: str, content: bytes, where: str) -> tuple[str, Any]:
    """Name and value of the field that a member gives."""
    ending = extension.rsplit(".", 1)[-1]
    if ending in PICKLES:
        raise DataError("a pickle, which can run anything, is not read", where=where, fix="store it as .npy or .json")
    if extension in ("txt", "text"):
        return "text", checked_text(content, where)
    if extension in _IMAGES:
        return "image", decode_image(content, where)
    if extension == "cls":
        return "label", _whole_number(content, where)
    if ending == "npy":
        return extension.removesuffix(".npy"), _array(content, where)
    return extension, content


def _whole_number(content: bytes, where: str) -> int:
    try:
        return int(content)
    except ValueError as error:
        raise DataError("not a whole number", where=where, value=content, fix="correct or delete it") from error


def _array(content: bytes, where: str) -> np.ndarray:
    try:
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except _NOT_ARRAY as error:
        raise DataError(
            f"not an array: {error}", where=where, fix="store it with numpy.save, without objects"
        ) from error
