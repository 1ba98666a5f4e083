"""Windows of time: some of a source's files, or some of the records of any source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from kftrain.core import storage
from kftrain.data.schema import Record, Source, SourcePart
from kftrain.data.settings import DataConfig, WindowConfig
from kftrain.data.time_window import TimeWindow, instant, moment_of, utc_text
from kftrain.errors import ConfigError, DataError
from kftrain.sharding.sources.file_source import FileSource
from kftrain.sharding.sources.selection import LATE, AskedFiles, ByPath, ByTime, make_empty_window_error

TIMES_FOLDER = "times"
"""Folder below `shards/` with the first and last time of the records of each part."""

CLIPPED = "window"
"""Key in the context of a part that the window cuts: which of its records lie in the window."""

Times = tuple[datetime, ...]
"""Times of the first and of the last record of a part; empty where it has none."""


def restrict_to_window(source: Source, data: DataConfig, times_uri: str) -> Source:
    """Restrict a source to what lies in `data.window`, if there is one.

    Raises ConfigError for a source that cannot be cut so, and for a window without instants.
    """
    config = data.window
    if not config.is_set:
        return source
    if config.by == "column":
        return RecordsInWindow(source, config, data.source, times_uri)
    if not isinstance(source, FileSource):
        fix = "use by: column, or a source of files"
        raise ConfigError("its records are in no files", where="data.window.by", value=config.by, fix=fix)
    source.select((ByPath if config.by == "path" else ByTime)(config, data.source))
    return source


class RecordsInWindow(Source):
    """The records of a source whose time, a field of theirs, lies in the window.

    Each part is read once to learn from when to when its records are, which is remembered. One that lies in the window
    as a whole is the same in every such window, and is encoded once for all of them; of one that the window cuts only
    the cut ends are part of what it is known by.
    """

    def __init__(self, source: Source, config: WindowConfig, name: str, times_uri: str) -> None:
        """`name`: of the source, in errors."""
        self._source = source
        self._config = config
        self._asked = AskedFiles(config, name)
        self._has_files = isinstance(source, FileSource)
        self._zone = config.zone()
        self._name = name
        self._times_uri = times_uri
        self._known: dict[str, Times] = {}

    def listing(self) -> list[dict[str, Any]]:
        """List what the source lists, and the window. Raises DataError."""
        listed = [{**line, LATE: True} if self._is_new(line) else line for line in self._source.listing()]
        return [*listed, {"window": str(self._asked.window), **self._describe_column()}]

    def parts(self, target_bytes: int) -> list[SourcePart]:
        """Return the parts of the source that have records in the window.

        Raises DataError for a record of no known time; EmptyWindowError.
        """
        asked = (pair for part in self._source.parts(target_bytes) for pair in self._split_by_age(part))
        clipped = [self._clip(part, window) for part, window in asked]
        chosen = [part for part in clipped if part is not None]
        if not any(CLIPPED not in part.context or next(self.read(part), None) is not None for part in chosen):
            raise make_empty_window_error(self._name, self._asked.window)
        return chosen

    def read(self, part: SourcePart) -> Iterator[Record]:
        """Yield the records of a part that lie in the window. Raises DataError."""
        clipped = part.context.get(CLIPPED)
        if clipped is None:
            yield from self._source.read(part)
            return
        context = {key: value for key, value in part.context.items() if key != CLIPPED}
        first, end = (instant(text) if text else None for text in (clipped["start"], clipped["end"]))
        for record in self._source.read(replace(part, context=context)):
            moment = self._read_time(record)
            if (first is None or first <= moment) and (end is None or moment < end):
                yield record

    def _is_new(self, file: dict[str, Any]) -> bool:
        """Tell whether no window before this one has read a file."""
        return self._has_files and self._asked.is_new(file["name"])

    def _split_by_age(self, part: SourcePart) -> Iterator[tuple[SourcePart, TimeWindow]]:
        """Yield a part, and what is asked of it: of files that were not read before also what came late."""
        pieces: tuple[list[dict[str, Any]], ...] = ([], [])
        for piece in part.pieces:
            pieces[self._has_files and self._is_new(piece["file"])].append(piece)
        if pieces[False] or not part.pieces:
            yield replace(part, pieces=tuple(pieces[False])), self._asked.window
        if pieces[True]:
            yield replace(part, pieces=tuple(pieces[True])), self._asked.whole

    def _clip(self, part: SourcePart, window: TimeWindow) -> SourcePart | None:
        """Return the part as far as it lies in a window; None where nothing of it does."""
        times = self._find_times(part)
        if not times or times[1] < window.start or times[0] >= window.end:
            return None
        start = utc_text(window.start) if times[0] < window.start else ""
        end = utc_text(window.end) if times[1] >= window.end else ""
        if not start and not end:
            return part
        return replace(part, context={**part.context, CLIPPED: {"start": start, "end": end, **self._describe_column()}})

    def _find_times(self, part: SourcePart) -> Times:
        digest = storage.digest_json({"part": part.identity(), **self._describe_column()})
        if digest not in self._known:
            uri = storage.join(self._times_uri, f"{digest}.json") if self._times_uri else ""
            times = _read_times(uri) if uri else None
            if times is None:
                times = self._read_times_of(part)
                if uri:
                    storage.publish_json(uri, {"times": [utc_text(moment) for moment in times]})
            self._known[digest] = times
        return self._known[digest]

    def _read_times_of(self, part: SourcePart) -> Times:
        times: Times = ()
        for moment in map(self._read_time, self._source.read(part)):
            times = min((moment, *times)), max((moment, *times))
        return times

    def _describe_column(self) -> dict[str, str]:
        """Return what decides the time of a record."""
        config = self._config
        return {"column": config.column, "number_unit": config.number_unit, "time_zone": config.time_zone}

    def _read_time(self, record: Record) -> datetime:
        column = self._config.column
        if column not in record.fields:
            where, fix = f"{self._name} {record.key}", f"it has: {', '.join(record.fields)}"
            raise DataError("the record has no such column", where=where, value=column, fix=fix)
        value = record.fields[column]
        try:
            return moment_of(value, self._zone, self._config.number_unit)
        except ValueError as error:
            raise DataError(
                f"the column '{column}' says no time: {error}",
                where=f"{self._name} {record.key}",
                value=value,
                fix="correct or delete the record, or set data.window",
            ) from error


def _read_times(uri: str) -> Times | None:
    """Read what was remembered; None where that is nothing, or damaged."""
    try:
        document = storage.read_json_if_exists(uri)
        times = None if document is None else tuple(map(instant, document["times"]))
    except (DataError, ValueError, KeyError, TypeError):  # not where storage is away
        return None
    return times if times is None or len(times) in (0, 2) else None
