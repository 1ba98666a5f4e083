"""What the sources that read files have in common: which files, how they are listed, and how they make parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from kftrain.data.schema import Record, Source, SourcePart
from kftrain.errors import DataError
from kftrain.sharding.sources.listing import ListedFile, SourceFile, is_hidden, list_with_times
from kftrain.sharding.sources.pieces import Piece, group, whole
from kftrain.sharding.sources.selection import LATE, Selection


class FileSource(Source):
    """The files of one kind below a folder, or one such file. What they hold is a subclass's matter: `read_piece`."""

    hides_underscores: ClassVar[bool] = True
    """Whether files and folders whose names begin with `_` are no data."""

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
        """From now on only these of its files are there."""
        self._selection = selection

    def listing(self) -> list[dict[str, Any]]:
        """Names, sizes and times or versions of the files. Raises DataError where there are none."""
        entries = [entry.to_dict() for entry in self.entries()]
        return [{**each, LATE: True} if each["name"] in self._selection.late_names else each for each in entries]

    def entries(self) -> list[SourceFile]:
        """The files that are selected, in their order. Raises DataError where there are none."""
        return self._selection.chosen(self.listed(), self.uri)

    def listed(self) -> list[ListedFile]:
        """All files, whether they are selected or not, sorted by name. Raises DataError where there are none."""
        found = list_with_times(self.uri, self._is_data, self._skipped_folders)
        if not found:
            raise DataError(f"the source has no {self._what}", where=self.uri, fix="check data.source")
        return found

    def _is_data(self, name: str) -> bool:
        is_left_out = self.hides_underscores and is_hidden(name) and not self.uri.endswith(f"/{name}")
        return self._wanted(name) and not is_left_out

    def parts(self, target_bytes: int) -> list[SourcePart]:
        """The files, and ranges of those that are larger, in order. Raises DataError."""
        pieces = (piece for file in self.entries() for piece in self.pieces(file, target_bytes))
        return group(pieces, target_bytes, folder_of=self._selection.folder_of)

    def read(self, part: SourcePart) -> Iterator[Record]:
        """The records of a part. Raises DataError naming the file."""
        for document in part.pieces:
            yield from self.read_piece(Piece.from_dict(document))

    def pieces(self, file: SourceFile, target_bytes: int) -> Iterable[Piece]:
        """A file's ranges of about `target_bytes`; the whole file where it can only be read from its beginning."""
        return (whole(file),)

    def read_piece(self, piece: Piece) -> Iterator[Record]:
        """The records of a file, or of a range of one. Raises DataError naming the file."""
        raise NotImplementedError
