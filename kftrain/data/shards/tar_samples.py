"""The samples of a WebDataset shard: members side by side whose names differ in their extension alone."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import BinaryIO

from kftrain.data.shards import tar_reader
from kftrain.data.shards.tar_reader import Member
from kftrain.errors import DataError

_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
"""Key and extension of a member, as `webdataset` splits its name."""
_NO_DATA = re.compile(r"__[^/]*__($|/)")
"""Members that `webdataset` keeps for itself."""


def group_members(stream: BinaryIO, where: str) -> Iterator[tuple[str, dict[str, Member]]]:
    """Yield key and members by extension of each sample. Memory: one sample, and the keys of the shard.

    Raises DataError, with the member's name, where a key or a member comes again.
    """
    seen: set[str] = set()
    for key, group in itertools.groupby(_iterate_members(stream, where), key=lambda named: named[0]):
        members: dict[str, Member] = {}
        for _, extension, member in group:
            if key in seen or extension in members:
                what = "the key comes again after others" if key in seen else "the member comes twice"
                raise DataError(what, where=f"{where}:{key}.{extension}", fix="put the files of a sample side by side")
            members[extension] = member
        seen.add(key)
        yield key, members


def _iterate_members(stream: BinaryIO, where: str) -> Iterator[tuple[str, str, Member]]:
    for member in tar_reader.walk(stream, where):
        match = _MEMBER.fullmatch(member.name)
        if match and not _NO_DATA.match(member.name):
            yield match[1], match[2].lower(), member
