"""The section `schedule` of the configuration, the keys that it shares with `schedule.yaml`, and moments as text."""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kftrain.errors import ConfigError
from kftrain.schedule import cron
from kftrain.settings.section import Amount, KeepsTraining, Section

SINCE = "since_last_trained"

EARLIEST = datetime(1, 1, 2, tzinfo=timezone.utc)
"""Moment before all data, by the calendar of any zone; a day late, so that no zone leaves Python's first year."""

Hours = Annotated[int, Field(ge=0, le=1_000_000)]

NAME = r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"


class Policy(Section):
    """The keys that `schedule.yaml` and a run's section share: when a schedule is due and what its runs do."""

    cron: KeepsTraining[str] = ""
    """Times at which the schedule is due: second minute hour day month weekday."""
    time_zone: KeepsTraining[str] = "UTC"
    """Time zone of `cron`, e.g. `Europe/Berlin`."""
    window: KeepsTraining[Literal["", "since_last_trained"]] = ""
    """`since_last_trained`: a run reads what no earlier training has read. This is the default if `data.window.by` is
    set, and neither `window_hours` nor `data.window.start`."""
    window_hours: KeepsTraining[Hours] = 0
    """Length of a sliding window of data (`data.window`); 0 does not slide. Each 24 hours count as a day of the time
    zone, even if its clock changes; the rest are hours."""
    window_start: KeepsTraining[str] = ""
    """Instant before which `since_last_trained` never reads data; empty: the first run reads everything."""
    max_window_hours: KeepsTraining[Hours] = 0
    """Maximum length of a window since the last training: a longer one is cut, and the next run continues there. A
    first window without `window_start` is not cut. 0: no maximum."""
    settle_hours: KeepsTraining[Hours] = 0
    """Time between the end of a window and the moment when the run is due: time for data to arrive."""
    skip_unchanged: KeepsTraining[bool] = True
    """End a run at once, without registering a model, if it would train what its predecessor has trained."""
    pause_after_failures: KeepsTraining[Amount] = 3
    """Failures in a row that pause the schedule; 0: it is never paused."""
    alert_over_http: KeepsTraining[bool] = False
    """Allow alerts to a URL that is not https."""

    @property
    def first(self) -> datetime:
        """Moment before which no data is read; `EARLIEST` where none is set. Raises ConfigError."""
        return parse_instant(self.window_start, "window_start") if self.window_start else EARLIEST


class ScheduleConfig(Policy):
    """The schedule that a run belongs to: written by `kftrain schedule`, empty for a run that somebody has started."""

    name: KeepsTraining[Annotated[str, Field(pattern=rf"^$|{NAME}")]] = ""
    """Name of the schedule; empty: the run belongs to none."""
    trigger: KeepsTraining[Literal["cron", "manual", "backfill"]] = "cron"
    """Origin of the run: the schedule, `kftrain schedule run-now` or `backfill`. Only a run of the schedule is skipped
    if an earlier run was started for the same instant."""
    instant: KeepsTraining[str] = ""
    """Moment when the run was due, in UTC (`2026-11-22T02:00:00Z`); empty: the last due time before it was created."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.name:
            try:
                cron.parse_cron(self.cron, "schedule.cron")
                cron.load_zone(self.time_zone, "schedule.time_zone")
                self.due(datetime.now(timezone.utc))
                assert self.first
            except ConfigError as error:  # pydantic gives it a place of its own
                raise ValueError(error.line) from error
        return self

    def due(self, created: datetime) -> datetime:
        """Return when a run that was created at a moment was due, in UTC. Raises ConfigError."""
        if self.instant:
            return parse_instant(self.instant, "schedule.instant")
        return cron.find_instant_before(cron.parse_cron(self.cron), cron.load_zone(self.time_zone), created)


def parse_instant(text: str, where: str) -> datetime:
    """Parse a moment in RFC 3339 that names its zone; return it in UTC. Raises ConfigError."""
    with contextlib.suppress(ValueError, OverflowError):
        moment = datetime.fromisoformat(text.replace("Z", "+00:00").replace("z", "+00:00"))
        if (
            moment.tzinfo is not None and 1970 <= moment.year < 9000
        ):  # where calendars of Python have room on both sides
            return moment.astimezone(timezone.utc)
    raise ConfigError("not a moment in UTC", where=where, value=text, fix="write 2026-11-22T02:00:00Z")


def format_time(seconds: float) -> str:
    """Write seconds since the epoch as a moment in RFC 3339, in UTC; empty for 0."""
    return format_instant(datetime.fromtimestamp(seconds, timezone.utc)) if seconds else ""


def format_instant(moment: datetime) -> str:
    """Write a moment in RFC 3339, in UTC, to the second."""
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
