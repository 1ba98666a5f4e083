"""Cuts a listing into parts whose ends depend on what stands there, never on what stands elsewhere.

Cut after every so many bytes, a file that is added moves all ends behind it, and everything is encoded again. Here each
piece decides by the hash of its own name whether it is the last one of its part, the likelier the larger it is: parts
have about the size that is asked for on average, and a piece that is added changes the part that it falls into, or cuts
it in two. A piece that grows beyond a power of two, or goes, may be the end of a part no more: then two parts are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kftrain.core import storage
from kftrain.data.schema import SourcePart
from kftrain.sharding.sources.keyed import hash_of
from kftrain.sharding.sources.listing import SourceFile

PIECE_BYTES = 4096
"""What a piece counts for beside its bytes: opening a file takes as long as reading so much."""


@dataclass(frozen=True)
class Piece:
    """A file, or a range of one."""

    file: SourceFile
    start: int = 0
    """First byte, row or row group of the range."""
    stop: int = 0
    """The end of the range; 0: the whole file."""
    first: int = 1
    """Number of the range's first line or row in the file."""
    size_bytes: int = 0

    @property
    def name(self) -> str:
        """What it is known by: what decides whether a part ends here."""
        return f"{self.file.name}@{self.start}" if self.start else self.file.name

    def to_dict(self) -> dict[str, Any]:
        """JSON: what it is known by, and where it lies."""
        document = asdict(self)
        del document["file"]["state"]
        return document

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Piece:
        """The inverse of `to_dict`."""
        return cls(**{**document, "file": SourceFile(**document["file"])})


def whole(file: SourceFile) -> Piece:
    """All of a file."""
    return Piece(file, size_bytes=file.size_bytes)


def group(
    pieces: Iterable[Piece],
    target_bytes: int,
    context: dict[str, Any] | None = None,
    folder_of: Callable[[str], str] | None = None,
) -> list[SourcePart]:
    """Pieces in order as parts of about `target_bytes` on average.

    `folder_of`: of a file's name; no part holds files of two folders.
    """
    return [
        SourcePart(
            tuple(piece.to_dict() for piece in part),
            dict(context or {}),
            sum(piece.size_bytes + PIECE_BYTES for piece in part),
            storage.digest_json([piece.file.state for piece in part]),
        )
        for folder in _by_folder(pieces, folder_of)
        for part in _grouped(folder, target_bytes)
    ]


def ends_part(name: str, size_bytes: int, target_bytes: int) -> bool:
    """Whether a part ends after a piece of this name: with the probability of its size over the target's."""
    size = 1 << (size_bytes + PIECE_BYTES).bit_length()  # the next power of two: a small change of a file moves no end
    return hash_of(name) * target_bytes < size << 64


def _by_folder(pieces: Iterable[Piece], folder_of: Callable[[str], str] | None) -> Iterator[Iterable[Piece]]:
    if folder_of is None:
        yield pieces
        return
    for _, found in itertools.groupby(pieces, key=lambda piece: folder_of(piece.file.name)):
        yield found


def _grouped(pieces: Iterable[Piece], target_bytes: int) -> Iterator[list[Piece]]:
    part: list[Piece] = []
    for piece in pieces:
        part.append(piece)
        if ends_part(piece.name, piece.size_bytes, target_bytes):
            yield part
            part = []
    if part:
        yield part
