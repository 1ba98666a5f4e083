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
    """When it is due: second minute hour day month weekday."""
    time_zone: KeepsTraining[str] = "UTC"
    """Whose clock `cron` reads, e.g. `Europe/Berlin`."""
    window: KeepsTraining[Literal["", "since_last_trained"]] = ""
    """`since_last_trained`: a run reads what no training before it has; the default where `data.window.by` is set, and
    neither `window_hours` nor `data.window.start`."""
    window_hours: KeepsTraining[Hours] = 0
    """Length of a window of data (`data.window`) that slides: each 24 are a day of the time zone, though its clock
    changes, what is left are hours. 0: it does not slide."""
    window_start: KeepsTraining[str] = ""
    """Since the last training: data from before this instant is never read; empty: the first run reads everything."""
    max_window_hours: KeepsTraining[Hours] = 0
    """Since the last training: a longer window, but for a first one without `window_start`, ends so long after its
    start, and the next run goes on there; 0: none does."""
    settle_hours: KeepsTraining[Hours] = 0
    """A window ends so long before the run was due: time for data to arrive."""
    skip_unchanged: KeepsTraining[bool] = True
    """A run that would train what its predecessor has trained ends at once, and registers nothing."""
    pause_after_failures: KeepsTraining[Amount] = 3
    """So many failures in a row pause the schedule; 0: none does."""
    alert_over_http: KeepsTraining[bool] = False
    """Alerts may go to a URL that is not https."""

    @property
    def first(self) -> datetime:
        """Moment before which no data is read; `EARLIEST` where none is set. Raises ConfigError."""
        return parse_instant(self.window_start, "window_start") if self.window_start else EARLIEST


class ScheduleConfig(Policy):
    """The schedule that a run belongs to: written by `kftrain schedule`, empty for a run that somebody has started."""

    name: KeepsTraining[Annotated[str, Field(pattern=rf"^$|{NAME}")]] = ""
    """Name of the schedule; empty: the run belongs to none."""
    trigger: KeepsTraining[Literal["cron", "manual", "backfill"]] = "cron"
    """What has started the run: the schedule, `kftrain schedule run-now` or `backfill`. Only the first one is skipped
    where a run was started for the same instant before."""
    instant: KeepsTraining[str] = ""
    """When the run was due, in UTC (`2026-11-22T02:00:00Z`); empty: the last time before it was created."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.name:
            try:
                cron.parse(self.cron, "schedule.cron")
                cron.zone(self.time_zone, "schedule.time_zone")
                self.due(datetime.now(timezone.utc))
                assert self.first
            except ConfigError as error:  # pydantic gives it a place of its own
                raise ValueError(error.line) from error
        return self

    def due(self, created: datetime) -> datetime:
        """Return when a run that was created at a moment was due, in UTC. Raises ConfigError."""
        if self.instant:
            return parse_instant(self.instant, "schedule.instant")
        return cron.instant_before(cron.parse(self.cron), cron.zone(self.time_zone), created)


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
