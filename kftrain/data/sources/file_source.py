"""What the sources that read files have in common: which files, and how they are listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kftrain.data.sources.listing import SourceFile, list_files
from kftrain.errors import DataError


class FileSource:
    """The files of one kind below a folder, or one such file. What they hold is a subclass's matter."""

    def __init__(
        self, uri: str, wanted: Callable[[str], bool], what: str, skipped_folders: frozenset[str] = frozenset()
    ) -> None:
        """`wanted` tells by its name whether a file is of the kind; `what` names the kind in errors."""
        self.uri = uri
        self._wanted = wanted
        self._what = what
        self._skipped_folders = skipped_folders

    def listing(self) -> list[dict[str, Any]]:
        """Names, sizes and times or versions of the files. Raises DataError where there are none."""
        return [entry.to_dict() for entry in self.entries()]

    def entries(self) -> list[SourceFile]:
        """The files, sorted by name. Raises DataError where there are none."""
        found = list_files(self.uri, self._wanted, self._skipped_folders)
        if not found:
            raise DataError(f"the source has no {self._what}", where=self.uri, fix="check data.source")
        return found
