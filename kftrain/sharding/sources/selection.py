"""Selection of files that lie in a window of time, by dates in their paths or by when they were written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from kftrain.core.progress import to_log
from kftrain.core.records import parse_number
from kftrain.data.settings import WindowConfig
from kftrain.data.time_window import UTC, TimeWindow, instant, partition_of
from kftrain.errors import DataError, EmptyWindowError
from kftrain.run.watermark import read_names, read_watermark
from kftrain.sharding.sources.listing import ListedFile, SourceFile

DATE_COLUMN = "date"
"""Name of the date in a path, unless `data.window.column` says otherwise."""

LATE = "late"
"""Key in the listing of a window: the file came too late for the windows before, or may hold records that did."""


class AskedFiles:
    """Request of a window to one source: what lies in it and, after a watermark, what came too late for those before.

    `window` begins where this source was trained on up to, which is not where others were; `whole` has all time before
    it, too, of which files that were not read are.
    """

    def __init__(self, config: WindowConfig, source: str) -> None:
        """Raises DataError where the watermark is damaged."""
        self.window = config.window()
        self.whole = self.window
        if parse_number(config.watermark):
            ends, first = read_watermark(config.watermark).ends, config.late_from
            self.whole = TimeWindow(instant(first), self.window.end)
            self.window = TimeWindow(max(self.whole.start, instant(ends.get(source, first))), self.window.end)
        self._names_before = read_names(config.watermark, source)

    def is_new(self, name: str) -> bool:
        """Tell whether no window before this one, if there were any, has read a file."""
        return self.whole != self.window and name not in self._names_before

    def is_late(self, moment: datetime, name: str) -> bool:
        """Tell whether a file of a time before the window came too late for those before."""
        return self.whole.start <= moment < self.window.start and self.is_new(name)


class Selection:
    """Selection of all files, sorted by name."""

    late_names: frozenset[str] = frozenset()
    """Files among the chosen ones that came late."""
    folder_of: Callable[[str], str] | None = None
    """Function from a file's name to the folder that no part of the source reaches beyond."""

    def chosen(self, listed: Sequence[ListedFile], where: str) -> list[SourceFile]:
        """Return the files that are selected. Raises DataError for a file of no known time; EmptyWindowError."""
        return [listed_file.file for listed_file in listed]

    def without_dates(self, name: str) -> str:
        """Return the name of a file without the folders that only say its time."""
        return name


class _InWindow(Selection):
    """Select the files that a window asks for."""

    def __init__(self, config: WindowConfig, source: str) -> None:
        self._asked = AskedFiles(config, source)

    def _choose_within(self, dated: list[tuple[datetime, SourceFile]], where: str) -> list[tuple[datetime, SourceFile]]:
        late = frozenset(file.name for moment, file in dated if self._asked.is_late(moment, file.name))
        chosen = [pair for pair in dated if self._asked.window.holds(pair[0]) or pair[1].name in late]
        if not chosen:
            raise make_empty_window_error(where, self._asked.window)
        self.late_names = late
        return chosen


class ByPath(_InWindow):
    """Select files of the partitions that end in the window.

    Each partition is encoded by itself: none changes another.
    """

    def __init__(self, config: WindowConfig, source: str) -> None:
        super().__init__(config, source)
        self._column = config.column or DATE_COLUMN
        self._is_told = False
        self._zone = config.zone() or UTC
        self.folder_of = self._folder_of

    def chosen(self, listed: Sequence[ListedFile], where: str) -> list[SourceFile]:
        """Return the files sorted by name.

        Partitions of no known time (`__HIVE_DEFAULT_PARTITION__`) are told of, and in no window.

        Raises DataError for a file in no partition, and where the time of none is known.
        """
        last_moments: dict[str, datetime | None] = {}
        dated: list[tuple[datetime, SourceFile]] = []
        for file, _ in listed:
            folder = file.name.rpartition("/")[0]
            if folder not in last_moments:
                last_moments[folder] = self._find_last_moment(file)
            if (moment := last_moments[folder]) is not None:
                dated.append((moment, file))
        unknown = [folder for folder, moment in last_moments.items() if moment is None]
        counts = f"{len(unknown):,} of {len(last_moments):,} partitions are of no known time: {', '.join(unknown[:3])}"
        if len(unknown) == len(last_moments):
            raise DataError(counts, where=where, fix="set data.window.by or data.window.column")
        if unknown and not self._is_told:
            to_log(f"{counts}; no window has them")
        self._is_told = True
        return [file for _, file in self._choose_within(dated, where)]

    def without_dates(self, name: str) -> str:
        """Remove `date=…`, `hour=…` and the like."""
        keys = {self._column, "year", "month", "day", "hour"}
        return "/".join(part for part in name.split("/") if part.partition("=")[0] not in keys)

    def _folder_of(self, name: str) -> str:
        return partition_of(name, self._column, self._zone).folder

    def _find_last_moment(self, file: SourceFile) -> datetime | None:
        try:
            return partition_of(file.name, self._column, self._zone).last_moment
        except ValueError as error:
            if "=" in file.name:
                return None
            fix = "move it, or set data.window.by or data.window.column"
            raise DataError(f"when it is of is not known: {error}", where=file.uri, fix=fix) from error


class ByTime(_InWindow):
    """Select files that were written in the window, in the order in which they were: what is old goes from one end."""

    def chosen(self, listed: Sequence[ListedFile], where: str) -> list[SourceFile]:
        """Return the files sorted by time, then by name.

        Raises DataError where the store does not say when a file was written.
        """
        dated: list[tuple[datetime, SourceFile]] = []
        for file, modified in listed:
            if modified is None:
                fix = "use data.window.by: path or column"
                raise DataError("its store does not say when it was written", where=file.uri, fix=fix)
            dated.append((modified, file))
        ordered = sorted(
            self._choose_within(dated, where), key=lambda listed_file: (listed_file[0], listed_file[1].name)
        )
        return [file for _, file in ordered]


def make_empty_window_error(where: str, window: object) -> EmptyWindowError:
    """Make the error of a source that has nothing in a window."""
    return EmptyWindowError(
        "nothing of the source lies in the window", where=where, value=str(window), fix="wait for data, or widen it"
    )
