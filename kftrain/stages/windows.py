"""Windows of time: chooses the one that a scheduled run reads, and runs a backfill, one window after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress, to_log
from kftrain.data.settings import WindowConfig
from kftrain.data.time_window import TimeWindow, utc_text
from kftrain.errors import ConfigError, DataError, EmptyWindowError
from kftrain.run import documents
from kftrain.run.config import is_opened, read_config
from kftrain.run.paths import RunPaths
from kftrain.run.watermark import WindowFiles, find_watermark, move_watermark, read_names, read_watermark
from kftrain.schedule import cron
from kftrain.schedule.settings import EARLIEST, SINCE, Policy, parse_instant
from kftrain.schedule.state import History
from kftrain.sharding import mixing
from kftrain.sharding.sources.selection import LATE

T = TypeVar("T")

MAX_WINDOWS = 10_000
"""Most windows of a backfill: more are a mistake in a length or in a year."""


@dataclass(frozen=True)
class WindowResult(Generic[T]):
    """A window of a backfill with the result of its run."""

    window: TimeWindow
    result: T | None
    """The value that the run returned; None if nothing lay in the window."""


def consecutive_windows(start: datetime, end: datetime, length: timedelta) -> list[TimeWindow]:
    """Return windows of equal length, one after another from `start` on, as long as they end by `end`.

    `start` and `end` have a time zone. Raises ConfigError for a length that is not above 0, and for too many windows.
    """
    if length <= timedelta():
        raise ConfigError("a window has a length above 0", where="length", value=str(length))
    count = max(0, (end - start) // length)
    if count > MAX_WINDOWS:
        raise ConfigError(
            f"more than {MAX_WINDOWS:,} windows", where="length", value=str(length), fix="use longer ones"
        )
    return [TimeWindow(start + number * length, start + (number + 1) * length) for number in range(count)]


def scheduled_window(schedule: Policy, instant: datetime, ends: Sequence[datetime]) -> TimeWindow | None:
    """Return the window of a run that was due at an instant; None if it is empty. Pure.

    The window slides if `schedule.window_hours` is set; else it begins where the last training's ended. `ends`: the
    instants up to which sources were trained on; a source that never was counts as `schedule.first`.
    """
    until = instant - timedelta(hours=schedule.settle_hours)
    if schedule.window_hours:
        days, hours = divmod(schedule.window_hours, 24)
        start = cron.find_days_before(cron.parse_cron(schedule.cron), cron.load_zone(schedule.time_zone), instant, days)
        return TimeWindow(start - timedelta(hours=hours + schedule.settle_hours), until)
    start = max([*ends, schedule.first])
    if schedule.max_window_hours and start > EARLIEST:
        until = start + min(until - start, timedelta(hours=schedule.max_window_hours))
    return TimeWindow(start, until) if start < until else None


def with_scheduled_window(config: Config, instant: datetime, run_uri: str, progress: Progress) -> Config | None:
    """Return the configuration of a scheduled run with its window; None if nothing can lie in it. Raises DataError.

    A run for an instant that a person has named reads the time since the instant before; it moves no watermark.
    """
    schedule, settings, uri, ends = config.schedule, config.data.window, "", []
    if not schedule.window_hours and schedule.window != SINCE and (settings.start or not settings.is_set):
        return with_window(config, settings.window()) if settings.watermark else config
    settle = timedelta(hours=schedule.settle_hours)
    if schedule.instant:
        before = cron.find_instant_before(
            cron.parse_cron(schedule.cron), cron.load_zone(schedule.time_zone), instant - cron.SECOND
        )
        ends = [before - settle]
    elif not schedule.window_hours:
        history = History.of(config.run.storage_root, schedule.name)
        uri = find_watermark(storage.join(history.uri, "watermarks"), run_uri)
        known = read_watermark(uri).ends
        ends = [parse_instant(known[source], uri) for source in config.data.windowed_sources if source in known]
    window = scheduled_window(schedule, instant, ends)
    if window is None:
        return None
    if not uri:
        return with_window(config, window)
    rest = f"; max_window_hours leaves what comes until {instant - settle}" if window.end < instant - settle else ""
    progress(f"window: {window}{rest}")
    return with_window(config, window, watermark=uri, late_from=utc_text(schedule.first))


def find_new_files(
    window: WindowConfig, listings: Mapping[str, list[dict[str, Any]]], progress: Progress
) -> WindowFiles | None:
    """Return the files in the listings of sources that no run before has read, and tell how many of them came late.

    None if the window follows no other.
    """
    if not window.watermark:
        return None
    files, num_late = {}, 0
    for source, listing in listings.items():
        entries = [entry for entry in listing if isinstance(entry, dict) and "name" in entry]  # others are people's own
        files[source] = sorted({str(entry["name"]) for entry in entries} - read_names(window.watermark, source))
        num_late += sum(LATE in entry for entry in entries)
    if num_late:
        what = "are read for the first time, with what they hold" if window.by == "column" else "came late, and are"
        progress(f"{num_late} files {what} from before {window.start}")
    return WindowFiles(files=files)


def pass_window(config: Config, paths: RunPaths, progress: Progress) -> None:
    """Move the watermark to the end of a run's window, unless another run has moved it. Raises DataError."""
    window = config.data.window
    document = documents.read_if_exists(WindowFiles, paths.window_files)
    ends = dict.fromkeys(config.data.windowed_sources, window.end)
    if move_watermark(window.watermark, ends, document.files if document else {}, paths.uri):
        progress(f"the next window begins at {window.end}")
    else:
        progress("warning: another run was trained from where this window begins: the next one begins behind that")


def with_window(config: Config, window: TimeWindow, **beside: str) -> Config:
    """Return the configuration of a run of a window; `beside`: further keys of `data.window`.

    Raises ConfigError if `data.window.by` is not set.
    """
    settings = config.data.window
    if not settings.is_set:
        fix = "set it to path, modified or column"
        raise ConfigError("nothing says what lies in a window", where="data.window.by", value=settings.by, fix=fix)
    data = config.data.model_copy(update={"window": settings.placed(window).model_copy(update=beside)})
    return config.model_copy(update={"data": data})


def with_replay(config: Config, paths: RunPaths, progress: Progress) -> Config:
    """Return the configuration with `data.replay.is_empty` settled: as the run has kept it, or as it is now.

    The replay is empty if nothing lies before the window. Raises ConfigError if the window has no instants.
    """
    data = config.data
    if not data.replay.windows or data.replay.is_empty:
        return config
    kept = read_config(paths).data if is_opened(paths) else None
    without = data.model_copy(update={"replay": data.replay.model_copy(update={"is_empty": True})})
    if kept == data:
        return config
    is_empty = kept == without
    if kept is None or not is_empty:
        try:
            is_empty = mixing.is_window_empty(data.of_component(data.components[-1]), config.run.storage_root)
        except DataError:  # sharding says it, in the run's folder
            return config
        if is_empty:
            progress("nothing lies before the window: all samples are new")
    return config.model_copy(update={"data": without}) if is_empty else config


def backfill(
    config: Config, windows: Sequence[TimeWindow], run: Callable[[Config], T], progress: Progress = to_log
) -> list[WindowResult[T]]:
    """Run one window after another, oldest first; none is promoted. A window with nothing in it is passed over.

    `run`: makes a whole run, to its end. Any error of it but EmptyWindowError ends the backfill; the windows before it
    stay as they were run. Raises ConfigError if the configuration has no windows.
    """
    results: list[WindowResult[T]] = []
    ordered = sorted(windows, key=lambda window: (window.start, window.end))
    registry = config.registry.model_copy(update={"promotion": "never"})
    configs = [with_window(config.model_copy(update={"registry": registry}), window) for window in ordered]
    for number, (window, placed) in enumerate(zip(ordered, configs, strict=True), start=1):
        progress(f"window {number} of {len(ordered)}: {window}")
        try:
            results.append(WindowResult(window, run(placed)))
        except EmptyWindowError as error:
            progress(f"passed over: {error.line}")
            results.append(WindowResult(window, None))
    return results
