"""Runs over windows of time: what a run of one window is configured with, and one window after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from kftrain.config import Config
from kftrain.data import mixing
from kftrain.data.time_window import TimeWindow
from kftrain.errors import ConfigError, DataError, EmptyWindowError
from kftrain.progress import Progress, to_log
from kftrain.run.config import is_opened, read_config
from kftrain.run.paths import RunPaths

T = TypeVar("T")

MAX_WINDOWS = 10_000
"""Of one backfill: more are a mistake in a length or in a year."""


@dataclass(frozen=True)
class WindowResult(Generic[T]):
    """What became of one window of a backfill."""

    window: TimeWindow
    result: T | None
    """What the run returned; None where nothing lay in the window."""


def consecutive_windows(start: datetime, end: datetime, length: timedelta) -> list[TimeWindow]:
    """Windows of one length, one after another from `start` on; one that would end after `end` is left out.

    `start` and `end` name a zone. Raises ConfigError for a length that is not above 0, and for too many windows.
    """
    if length <= timedelta():
        raise ConfigError("a window has a length above 0", where="length", value=str(length))
    count = max(0, (end - start) // length)
    if count > MAX_WINDOWS:
        raise ConfigError(
            f"more than {MAX_WINDOWS:,} windows", where="length", value=str(length), fix="use longer ones"
        )
    return [TimeWindow(start + number * length, start + (number + 1) * length) for number in range(count)]


def windows_ending_at(ends: Sequence[datetime], length: timedelta) -> list[TimeWindow]:
    """The window of this length that ends at each of these instants: those of a schedule. Raises ConfigError."""
    if length <= timedelta():
        raise ConfigError("a window has a length above 0", where="length", value=str(length))
    return [TimeWindow(end - length, end) for end in ends]


def with_window(config: Config, window: TimeWindow) -> Config:
    """The configuration of a run of that window. Raises ConfigError where `data.window.by` says nothing."""
    settings = config.data.window
    if not settings.is_set:
        fix = "set it to path, modified or column"
        raise ConfigError("nothing says what lies in a window", where="data.window.by", value=settings.by, fix=fix)
    data = config.data.model_copy(update={"window": settings.placed(window)})
    return config.model_copy(update={"data": data})


def without_promotion(config: Config) -> Config:
    """The same, whose model never becomes champion."""
    return config.model_copy(update={"registry": config.registry.model_copy(update={"promotion": "never"})})


def with_replay(config: Config, paths: RunPaths, progress: Progress) -> Config:
    """The configuration that says whether there is anything to see again: as the run has kept it, or as it is now.

    Raises ConfigError where the window has no instants.
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
            is_empty = mixing.holds_nothing(data.of_component(data.components[-1]), config.run.storage_root)
        except DataError:  # sharding says it, in the run's folder
            return config
        if is_empty:
            progress("nothing lies before the window: all samples are new")
    return config.model_copy(update={"data": without}) if is_empty else config


def backfill(
    config: Config, windows: Sequence[TimeWindow], run: Callable[[Config], T], progress: Progress = to_log
) -> list[WindowResult[T]]:
    """Runs one window after another, oldest first; none is promoted. A window with nothing in it is passed over.

    `run`: a whole run, to its end. What it raises beside EmptyWindowError ends the backfill; the windows before have
    been run. Raises ConfigError where the configuration says nothing of windows.
    """
    found: list[WindowResult[T]] = []
    ordered = sorted(windows, key=lambda window: (window.start, window.end))
    configs = [with_window(without_promotion(config), window) for window in ordered]
    for number, (window, placed) in enumerate(zip(ordered, configs, strict=True), start=1):
        progress(f"window {number} of {len(ordered)}: {window}")
        try:
            found.append(WindowResult(window, run(placed)))
        except EmptyWindowError as error:
            progress(f"passed over: {error.line}")
            found.append(WindowResult(window, None))
    return found
