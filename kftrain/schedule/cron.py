"""Cron expressions of six fields in a time zone, and the instants at which they are due.

An instant is a time of the zone's clock that the expression matches. A time that the clock leaves out in spring is the
moment at which a clock that was not put forward would show it. A time that the clock shows twice in autumn counts once,
but for expressions of every hour, where both count: so a nightly run is due once a day, and an hourly one every hour.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta, timezone
from typing import NamedTuple

from kftrain.errors import ConfigError

UTC = timezone.utc

MAX_YEARS = 9
"""Years that may lie between two instants: from one 29 February to the next there may be eight."""

STEP = timedelta(hours=6)
"""Step of the search for a change of a zone's offset; two changes are always farther apart."""

SECOND = timedelta(seconds=1)
LATEST = datetime(9998, 1, 1)


class Bounds(NamedTuple):
    """The name of a field, and the range of its values."""

    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()
    """Names that stand for the values from `low` on, such as `jan`; empty where numbers alone are allowed."""


MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")

FIELDS = (
    Bounds("second", 0, 59),
    Bounds("minute", 0, 59),
    Bounds("hour", 0, 23),
    Bounds("day of the month", 1, 31),
    Bounds("month", 1, 12, MONTHS),
    Bounds("weekday", 0, 7, WEEKDAYS),
)


@dataclass(frozen=True)
class Cron:
    """A cron expression: the values that each field may have, sorted."""

    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]
    """Days of the week; 0 is Sunday."""

    @property
    def is_hourly(self) -> bool:
        """True where it matches in every hour of the day."""
        return len(self.hours) == 24

    def matches_day(self, day: date) -> bool:
        """Tell whether it matches at some time of a day: where both kinds of day are restricted, either is enough."""
        if day.month not in self.months:
            return False
        by_day, by_weekday = day.day in self.days, (day.isoweekday() % 7) in self.weekdays
        return by_day or by_weekday if len(self.days) < 31 and len(self.weekdays) < 7 else by_day and by_weekday

    def __str__(self) -> str:
        """Write six fields that every scheduler reads alike: lists of numbers, without steps and names."""
        fields = zip(
            (self.seconds, self.minutes, self.hours, self.days, self.months, self.weekdays),
            (60, 60, 24, 31, 12, 7),
            strict=True,
        )
        return " ".join("*" if len(values) == full else ",".join(map(str, values)) for values, full in fields)


def parse_cron(text: str, where: str = "cron") -> Cron:
    """Parse an expression. Raises ConfigError; for five fields it names the six that are meant."""
    fields = text.split()
    if len(fields) == 5:
        raise ConfigError(
            "a cron expression has six fields here, the first is the second",
            where=where,
            value=text,
            fix=f"write '0 {' '.join(fields)}'",
        )
    if len(fields) != 6:
        raise ConfigError(
            "not a cron expression", where=where, value=text, fix="second minute hour day month weekday: '0 0 2 * * *'"
        )
    values = [
        {value for part in field.split(",") for value in _parse_range(part, bounds, where)}
        for field, bounds in zip(fields, FIELDS, strict=True)
    ]
    values[5] = {weekday % 7 for weekday in values[5]}
    cron = Cron(*(tuple(sorted(allowed)) for allowed in values))
    if not any(map(cron.matches_day, (date(2024, 1, 1) + timedelta(days=day) for day in range(366)))):
        raise ConfigError("no year has such a day", where=where, value=text)
    return cron


def _parse_range(part: str, bounds: Bounds, where: str) -> range:
    span, _, step = part.partition("/")
    first, dash, last = span.partition("-")
    try:
        interval = int(step) if step or part.endswith("/") else 1
        if span in ("*", "?"):
            low, high = bounds.low, bounds.high - (bounds.name == "weekday")
        else:
            low = _parse_number(first, bounds)
            high = _parse_number(last, bounds) if dash else bounds.high if step else low
    except ValueError:
        low = high = interval = -1
    if not bounds.low <= low <= high <= bounds.high or interval < 1:
        named = f" or {bounds.words[0]}-{bounds.words[-1]}" if bounds.words else ""
        raise ConfigError(
            f"not a {bounds.name} of a cron expression",
            where=where,
            value=part,
            fix=f"{bounds.low}-{bounds.high}{named}, lists (1,2), ranges (1-5), steps (*/2)",
        )
    return range(low, high + 1, interval)


def _parse_number(text: str, bounds: Bounds) -> int:
    """Parse a number or a name of a value. Raises ValueError."""
    word = text.lower()
    if word in bounds.words:
        return bounds.low + bounds.words.index(word)
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def load_zone(name: str, where: str = "time_zone") -> zoneinfo.ZoneInfo:
    """Load a time zone by its name, like `Europe/Berlin`. Raises ConfigError."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        fix = "use a name of the IANA database, e.g. Europe/Berlin; where there is none, pip install tzdata"
        raise ConfigError("no such time zone is known here", where=where, value=name, fix=fix) from error


def find_instant_before(cron: Cron, where: zoneinfo.ZoneInfo, moment: datetime) -> datetime:
    """Find the last instant at or before a moment, in UTC. Raises ConfigError where none was within nine years."""
    moment = moment.astimezone(UTC).replace(microsecond=0)
    oldest = moment - timedelta(days=366 * MAX_YEARS)
    now, end, latest = moment, LATEST, None
    # Back in time from span to span: within one, the zone has one offset, and its clock is UTC plus that.
    while now > oldest:
        offset = _read_offset(where, now)
        wall = _find_wall_before(cron, min(_drop_zone(moment) + offset, end - SECOND), _drop_zone(oldest))
        instant = oldest if wall is None else (wall - offset).replace(tzinfo=UTC)
        change = _find_last_change(where, now, instant - timedelta(days=1))
        before = offset if change is None else _read_offset(where, change - SECOND)
        first = change or instant
        if before > offset and not cron.is_hourly:  # the clock was put back: what it has shown does not count again
            first += before - offset
        in_span = instant if wall is not None and instant >= first else None
        if change is None or latest is not None:  # what was left out after this span may be later than what came then
            latest = max((at for at in (in_span, latest) if at is not None), default=None)
            break
        latest, now = in_span, change - SECOND
        end = _drop_zone(change) + max(before, offset)  # put forward: with what it has left out
    if latest is None:
        raise ConfigError(f"no time within {MAX_YEARS} years matches", where="cron", value=str(cron))
    return latest


def find_days_before(cron: Cron, where: zoneinfo.ZoneInfo, instant: datetime, days: int) -> datetime:
    """Return the same time of the clock so many days before an instant, in UTC.

    For an instant whose time the clock left out, that is the time which the expression names.
    """
    walls = [_drop_zone(instant) + _read_offset(where, instant - timedelta(days=ago)) for ago in (0, 1)]
    wall = next(
        (wall for wall in walls if _find_time_before(cron, (wall.hour, wall.minute, wall.second)) == wall.time()),
        walls[0],
    )
    return (wall - timedelta(days=days)).replace(tzinfo=where).astimezone(UTC)


def list_instants(cron: Cron, where: zoneinfo.ZoneInfo, start: datetime, end: datetime) -> list[datetime]:
    """List all instants from `start` to before `end`, in UTC, the oldest first."""
    matches: list[datetime] = []
    instant = find_instant_before(cron, where, end - SECOND)
    while instant >= start:
        matches.append(instant)
        instant = find_instant_before(cron, where, instant - SECOND)
    return matches[::-1]


def _find_last_change(where: zoneinfo.ZoneInfo, now: datetime, oldest: datetime) -> datetime | None:
    """Find the first second that has the offset of `now`; None where that is older than `oldest`."""
    offset, late = _read_offset(where, now), now
    early = now - STEP
    while _read_offset(where, early) == offset:
        if early <= oldest:
            return None
        early, late = early - STEP, early
    while late - early > SECOND:  # bisection: `early` has another offset, `late` the one of now
        middle = early + timedelta(seconds=(late - early) // SECOND // 2)
        early, late = (early, middle) if _read_offset(where, middle) == offset else (middle, late)
    return late


def _read_offset(where: zoneinfo.ZoneInfo, moment: datetime) -> timedelta:
    offset = moment.astimezone(where).utcoffset()
    assert offset is not None
    return offset


def _drop_zone(moment: datetime) -> datetime:
    return moment.replace(tzinfo=None)


def _find_wall_before(cron: Cron, at_most: datetime, at_least: datetime) -> datetime | None:
    """Find the last time of a clock between both, inclusive, that the expression matches."""
    day, limit = at_most.date(), (at_most.hour, at_most.minute, at_most.second)
    while day >= at_least.date():
        time_of_day = _find_time_before(cron, limit) if cron.matches_day(day) else None
        if time_of_day is not None:
            wall = datetime.combine(day, time_of_day)
            return wall if wall >= at_least else None
        day, limit = day - timedelta(days=1), (23, 59, 59)
    return None


def _find_time_before(cron: Cron, limit: tuple[int, int, int]) -> time | None:
    """Find the last matching time of a day up to a limit of (hour, minute, second)."""
    hour, minute, second = limit
    value = _find_at_most(cron.seconds, second) if hour in cron.hours and minute in cron.minutes else None
    if value is not None:
        return time(hour, minute, value)
    value = _find_at_most(cron.minutes, minute - 1) if hour in cron.hours else None
    if value is not None:
        return time(hour, value, cron.seconds[-1])
    value = _find_at_most(cron.hours, hour - 1)
    return None if value is None else time(value, cron.minutes[-1], cron.seconds[-1])


def _find_at_most(values: Sequence[int], limit: int) -> int | None:
    return max((value for value in values if value <= limit), default=None)


def convert_to_utc(cron: Cron, where: zoneinfo.ZoneInfo, now: datetime) -> Cron:
    """Build an expression for a scheduler that counts in UTC: it matches every instant of the next three years.

    The expression may match more: where a zone changes its offset, the hours of both offsets. A match that is no
    instant has no work to do: the run for the instant before has been made by then.
    """
    days = (now + timedelta(days=day) for day in range(-1, 3 * 366))
    offsets = {_read_offset(where, day) // timedelta(minutes=1) for day in days}
    # (days, minute of that day in UTC) of every time of the clock, under every offset that the zone has.
    moved = {
        divmod(hour * 60 + minute - offset, 24 * 60)
        for hour in cron.hours
        for minute in cron.minutes
        for offset in offsets
    }
    minutes, hours = {rest % 60 for _, rest in moved}, {rest // 60 for _, rest in moved}
    widened = cron
    for shift in {day for day, _ in moved}:
        widened = _add_shifted_days(widened, cron, shift)
    is_either = len(cron.days) < 31 and len(cron.weekdays) < 7
    if is_either and (
        len(widened.days) == 31 or len(widened.weekdays) == 7
    ):  # then that one no longer restricts the other
        widened = replace(widened, days=tuple(range(1, 32)), weekdays=tuple(range(7)))
    return replace(widened, minutes=tuple(sorted(minutes)), hours=tuple(sorted(hours)))


def _add_shifted_days(widened: Cron, cron: Cron, shift: int) -> Cron:
    """Add to `widened` the days of `cron` moved by `shift`; at the ends of months, every day that it may be."""
    if not shift:
        return widened
    ends = {1: [28, 29, 30, 31]} if shift < 0 else {28: [29, 1], 29: [30, 1], 30: [31, 1], 31: [1]}
    days = {moved for day in cron.days for moved in ends.get(day, [day + shift])}
    months = {(month - 1 + shift) % 12 + 1 for month in cron.months}
    return replace(
        widened,
        days=tuple(sorted(days | set(widened.days))),
        months=tuple(sorted(months | set(widened.months))),
        weekdays=tuple(sorted({(day + shift) % 7 for day in cron.weekdays} | set(widened.weekdays))),
    )
