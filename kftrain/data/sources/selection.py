"""Which files of a source lie in its window of time: by the dates in their paths, or by when they were written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from kftrain.data.settings import WindowConfig
from kftrain.data.sources.listing import ListedFile, SourceFile
from kftrain.data.time_window import UTC, partition_of
from kftrain.errors import DataError, EmptyWindowError
from kftrain.progress import to_log

DATE_COLUMN = "date"
"""What the date in a path is called, unless `data.window.column` says otherwise."""


class Selection:
    """All files, sorted by name."""

    folder_of: Callable[[str], str] | None = None
    """Of a file's name; what no part of the source reaches beyond."""

    def chosen(self, listed: Sequence[ListedFile], where: str) -> list[SourceFile]:
        """The files that are selected. Raises DataError for a file of no known time; EmptyWindowError."""
        return [each.file for each in listed]

    def without_dates(self, name: str) -> str:
        """The name of a file without the folders that only say its time."""
        return name


class ByPath(Selection):
    """Those of the partitions that end in the window. Each partition is encoded by itself: none changes another."""

    def __init__(self, config: WindowConfig) -> None:
        self._window = config.window()
        self._column = config.column or DATE_COLUMN
        self._is_told = False
        self._zone = config.zone() or UTC
        self.folder_of = self._folder_of

    def chosen(self, listed: Sequence[ListedFile], where: str) -> list[SourceFile]:
        """Sorted by name. Partitions of no known time (`__HIVE_DEFAULT_PARTITION__`) are told of, and in no window.

        Raises DataError for a file in no partition, and where the time of none is known.
        """
        last_moments: dict[str, datetime | None] = {}
        found = []
        for file, _ in listed:
            folder = file.name.rpartition("/")[0]
            if folder not in last_moments:
                last_moments[folder] = self._last_moment(file)
            if (moment := last_moments[folder]) is not None and self._window.holds(moment):
                found.append(file)
        unknown = [folder for folder, moment in last_moments.items() if moment is None]
        counts = f"{len(unknown):,} of {len(last_moments):,} partitions are of no known time: {', '.join(unknown[:3])}"
        if len(unknown) == len(last_moments):
            raise DataError(counts, where=where, fix="set data.window.by or data.window.column")
        if unknown and not self._is_told:
            to_log(f"{counts}; no window has them")
        self._is_told = True
        return _required(found, where, self._window)

    def without_dates(self, name: str) -> str:
        """Without `date=…`, `hour=…` and the like."""
        keys = {self._column, "year", "month", "day", "hour"}
        return "/".join(part for part in name.split("/") if part.partition("=")[0] not in keys)

    def _folder_of(self, name: str) -> str:
        return partition_of(name, self._column, self._zone).folder

    def _last_moment(self, file: SourceFile) -> datetime | None:
        try:
            return partition_of(file.name, self._column, self._zone).last_moment
        except ValueError as error:
            if "=" in file.name:
                return None
            fix = "move it, or set data.window.by or data.window.column"
            raise DataError(f"when it is of is not known: {error}", where=file.uri, fix=fix) from error


class ByTime(Selection):
    """Those that were written in the window, in the order in which they were: what is old goes from one end."""

    def __init__(self, config: WindowConfig) -> None:
        self._window = config.window()

    def chosen(self, listed: Sequence[ListedFile], where: str) -> list[SourceFile]:
        """Sorted by time, then by name. Raises DataError where the store does not say when a file was written."""
        found = []
        for file, modified in listed:
            if modified is None:
                fix = "use data.window.by: path or column"
                raise DataError("its store does not say when it was written", where=file.uri, fix=fix)
            if self._window.holds(modified):
                found.append((modified, file))
        ordered = sorted(found, key=lambda each: (each[0], each[1].name))
        return _required([file for _, file in ordered], where, self._window)


def _required(files: list[SourceFile], where: str, window: object) -> list[SourceFile]:
    if not files:
        raise empty_window(where, window)
    return files


def empty_window(where: str, window: object) -> EmptyWindowError:
    """Of a source that has nothing in a window."""
    return EmptyWindowError(
        "nothing of the source lies in the window", where=where, value=str(window), fix="wait for data, or widen it"
    )
