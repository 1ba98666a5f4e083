"""Cuts a listing into parts whose ends depend on what stands there, never on what stands elsewhere.

Cut after every so many bytes, a file that is added moves all ends behind it, and everything is encoded again. Here each
piece decides by the hash of its own name whether it is the last one of its part, the likelier the larger it is: parts
have about the size that is asked for on average, and a piece that is added changes the part that it falls into, or cuts
it in two. A piece that grows beyond a power of two, or goes, may be the end of a part no more: then two parts are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kftrain.core import storage
from kftrain.data.schema import SourcePart
from kftrain.sharding.sources.keyed import hash_name
from kftrain.sharding.sources.listing import SourceFile

PIECE_BYTES = 4096
"""Bytes that a piece counts for beside its own: opening a file takes as long as reading so much."""


@dataclass(frozen=True)
class Piece:
    """A file, or a range of one."""

    file: SourceFile
    start: int = 0
    """First byte, row or row group of the range."""
    stop: int = 0
    """End of the range; 0: the whole file."""
    first: int = 1
    """Number of the range's first line or row in the file."""
    size_bytes: int = 0

    @property
    def name(self) -> str:
        """Name by which the piece is known: it decides whether a part ends here."""
        return f"{self.file.name}@{self.start}" if self.start else self.file.name

    def to_dict(self) -> dict[str, Any]:
        """Return as JSON what the piece is known by, and where it lies."""
        file = {name: value for name, value in vars(self.file).items() if name != "state"}
        return {**vars(self), "file": file}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Piece:
        """Build a piece from the result of `to_dict`."""
        return cls(**{**document, "file": SourceFile(**document["file"])})


def make_whole_piece(file: SourceFile) -> Piece:
    """Make the piece that is all of a file."""
    return Piece(file, size_bytes=file.size_bytes)


def group_pieces(
    pieces: Iterable[Piece],
    target_bytes: int,
    context: dict[str, Any] | None = None,
    folder_of: Callable[[str], str] | None = None,
) -> list[SourcePart]:
    """Group pieces in order into parts of about `target_bytes` on average.

    `folder_of`: of a file's name; no part holds files of two folders.
    """
    return [
        SourcePart(
            tuple(piece.to_dict() for piece in part),
            dict(context or {}),
            sum(piece.size_bytes + PIECE_BYTES for piece in part),
            storage.digest_json([piece.file.state for piece in part]),
        )
        for folder in _split_by_folder(pieces, folder_of)
        for part in _group_within_folder(folder, target_bytes)
    ]


def ends_part(name: str, size_bytes: int, target_bytes: int) -> bool:
    """Tell whether a part ends after a piece of this name: with the probability of its size over the target's."""
    size = 1 << (size_bytes + PIECE_BYTES).bit_length()  # the next power of two: a small change of a file moves no end
    return hash_name(name) * target_bytes < size << 64


def _split_by_folder(pieces: Iterable[Piece], folder_of: Callable[[str], str] | None) -> Iterator[Iterable[Piece]]:
    if folder_of is None:
        yield pieces
        return
    for _, of_folder in itertools.groupby(pieces, key=lambda piece: folder_of(piece.file.name)):
        yield of_folder


def _group_within_folder(pieces: Iterable[Piece], target_bytes: int) -> Iterator[list[Piece]]:
    part: list[Piece] = []
    for piece in pieces:
        part.append(piece)
        if ends_part(piece.name, piece.size_bytes, target_bytes):
            yield part
            part = []
    if part:
        yield part
