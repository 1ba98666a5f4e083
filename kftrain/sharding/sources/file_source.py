"""Common part of the sources that read files: which files, how they are listed, and how they make parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from kftrain.data.schema import Record, Source, SourcePart
from kftrain.errors import DataError
from kftrain.sharding.sources.listing import ListedFile, SourceFile, is_hidden, list_with_times
from kftrain.sharding.sources.pieces import Piece, group_pieces, make_whole_piece
from kftrain.sharding.sources.selection import LATE, Selection


class FileSource(Source):
    """The files of one kind below a folder, or one such file. What they hold is a subclass's matter: `read_piece`."""

    hides_underscores: ClassVar[bool] = True
    """True if files and folders whose names begin with `_` are no data."""

    def __init__(
        self, uri: str, wanted: Callable[[str], bool], what: str, skipped_folders: frozenset[str] = frozenset()
    ) -> None:
        """`wanted` tells by its name whether a file is of the kind; `what` names the kind in errors."""
        self.uri = uri
        self._wanted = wanted
        self._what = what
        self._skipped_folders = skipped_folders
        self._selection = Selection()

    def select(self, selection: Selection) -> None:
        """Restrict the source to these of its files."""
        self._selection = selection

    def listing(self) -> list[dict[str, Any]]:
        """List names, sizes and times or versions of the files. Raises DataError where there are none."""
        entries = [entry.to_dict() for entry in self.entries()]
        return [{**line, LATE: True} if line["name"] in self._selection.late_names else line for line in entries]

    def entries(self) -> list[SourceFile]:
        """Return the files that are selected, in their order. Raises DataError where there are none."""
        return self._selection.chosen(self.list_all(), self.uri)

    def list_all(self) -> list[ListedFile]:
        """List all files, whether they are selected or not, sorted by name. Raises DataError where there are none."""
        files = list_with_times(self.uri, self._is_data, self._skipped_folders)
        if not files:
            raise DataError(f"the source has no {self._what}", where=self.uri, fix="check data.source")
        return files

    def _is_data(self, name: str) -> bool:
        is_left_out = self.hides_underscores and is_hidden(name) and not self.uri.endswith(f"/{name}")
        return self._wanted(name) and not is_left_out

    def parts(self, target_bytes: int) -> list[SourcePart]:
        """Group the files, and ranges of those that are larger, in order. Raises DataError."""
        pieces = (piece for file in self.entries() for piece in self.pieces(file, target_bytes))
        return group_pieces(pieces, target_bytes, folder_of=self._selection.folder_of)

    def read(self, part: SourcePart) -> Iterator[Record]:
        """Yield the records of a part. Raises DataError naming the file."""
        for document in part.pieces:
            yield from self.read_piece(Piece.from_dict(document))

    def pieces(self, file: SourceFile, target_bytes: int) -> Iterable[Piece]:
        """Cut a file into ranges of about `target_bytes`; it stays whole where it is only readable from its start."""
        return (make_whole_piece(file),)

    def read_piece(self, piece: Piece) -> Iterator[Record]:
        """Yield the records of a file, or of a range of one. Raises DataError naming the file."""
        raise NotImplementedError
