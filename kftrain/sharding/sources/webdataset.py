"""WebDataset shards that others wrote: uncompressed tars in which the files of a sample stand side by side.

The stock reader takes a damaged header or a missing end for the end of a shard, and joins or repeats keys
without a word; this one refuses them. Nothing is ever unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from kftrain.core import storage
from kftrain.data.sample_members import decode_members
from kftrain.data.schema import Record
from kftrain.data.shards import tar_samples
from kftrain.data.shards.tar_reader import Member
from kftrain.errors import DataError
from kftrain.sharding.sources.file_source import FileSource
from kftrain.sharding.sources.listing import ListedFile, list_with_times, reading_source
from kftrain.sharding.sources.pieces import Piece

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class WebDatasetSource(FileSource):
    """A `.tar` file, a folder of them, or a pattern of names as `shard-{000..012}.tar`: one record per sample.

    Key = `<shard>:<key of the sample>`, since shards may repeat each other's keys. By extension a member
    becomes a field, and stays as it came among the files of the record

        .txt .text             `text`, bytes of UTF-8
        .jpg .png … (images)   `image`, uint8 `[height, width, channels]`, decoded when it is asked for
        .cls                   `label`, int
        .npy, .<name>.npy      `npy` or `<name>`, an array
        .json                  its fields, as a line of JSON lines; the sample's other members win over them
        anything else          its bytes, under the extension
    """

    def __init__(self, uri: str, text_field: str) -> None:
        super().__init__(uri, is_shard, "shards (*.tar)")
        self._text_field = text_field

    def list_all(self) -> list[ListedFile]:
        """Return the shards, sorted by name. Raises DataError where there are none, or one of a pattern is missing."""
        if not is_shard_pattern(self.uri) or storage.exists(self.uri):
            return super().list_all()
        folder, _, _ = self.uri.partition("{")[0].rpartition("/")
        below = {listed.file.name: listed for listed in list_with_times(folder or ".", is_shard)}
        entries = {}
        for name in expand_braces(self.uri.removeprefix(folder).removeprefix("/"), self.uri):
            if name not in below:
                raise DataError("there is no such shard", where=self.uri, value=name, fix="check the pattern")
            entries[name] = below[name]
        return [entries[name] for name in sorted(entries)]

    def read_piece(self, piece: Piece) -> Iterator[Record]:
        """Yield the samples of a shard in its order. Raises DataError naming shard and member."""
        file = piece.file
        with reading_source(file.uri), storage.open_read(file.uri) as stream:
            for key, shard_members in tar_samples.group_members(stream, file.uri):
                members = {extension: _content(stream, member) for extension, member in shard_members.items()}
                fields = decode_members(members, self._text_field, f"{file.uri}:{key}")
                yield Record(f"{file.name}:{key}", fields, files=members)


def is_shard(name: str) -> bool:
    """Tell whether a file counts as a shard, by its suffix."""
    return name.lower().endswith(".tar")


def is_shard_pattern(source: str) -> bool:
    """Tell whether a source is a pattern of shards' names: with braces, and `.tar` at its end."""
    return is_shard(source) and _BRACES.search(source) is not None


def source_folder(source: str) -> str:
    """Return the absolute folder below which a source's shards lie: of one shard or a pattern its own folder."""
    if is_shard_pattern(source) and not storage.exists(source):
        source = source.partition("{")[0]
    elif not is_shard(source):
        return storage.absolute(source)
    return storage.absolute(source.rpartition("/")[0] or ("/" if source.startswith("/") else "."))


def expand_braces(pattern: str, where: str) -> Iterator[str]:
    """Yield the names behind `{000..012}` and `{a,b}`, in order. Raises DataError for other braces."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    for choice in _choices(match[1], where):
        yield from expand_braces(pattern[: match.start()] + choice + pattern[match.end() :], where)


def _choices(braces: str, where: str) -> Iterator[str]:
    match = _RANGE.fullmatch(braces)
    if match and int(match[1]) <= int(match[2]):
        digits = max(map(len, match.groups())) if any(re.match("0.", bound) for bound in match.groups()) else 0
        return (f"{number:0{digits}d}" for number in range(int(match[1]), int(match[2]) + 1))
    if match or "," not in braces:
        raise DataError("not a pattern of shards", where=where, value=f"{{{braces}}}", fix="e.g. {000..012} or {a,b}")
    return iter(braces.split(","))


def _content(stream: BinaryIO, member: Member) -> bytes:
    stream.seek(member.offset_bytes)
    return stream.read(member.size_bytes)
