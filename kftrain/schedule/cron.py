"""Cron expressions of six fields in a time zone: which instant comes before a moment.

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
"""Between two instants, at most: from one 29 February to the next there may be eight."""

STEP = timedelta(hours=6)
"""Two changes of a zone's offset are farther apart."""

SECOND = timedelta(seconds=1)
LATEST = datetime(9998, 1, 1)


class Bounds(NamedTuple):
    """What a field may hold."""

    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()
    """Names of its values, from `low` on."""


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
    """0 is Sunday."""

    @property
    def is_hourly(self) -> bool:
        """Whether it matches in every hour of the day."""
        return len(self.hours) == 24

    def matches_day(self, day: date) -> bool:
        """Whether it matches at some time of a day: where both kinds of day are restricted, either is enough."""
        if day.month not in self.months:
            return False
        by_day, by_weekday = day.day in self.days, (day.isoweekday() % 7) in self.weekdays
        return by_day or by_weekday if len(self.days) < 31 and len(self.weekdays) < 7 else by_day and by_weekday

    def __str__(self) -> str:
        """Six fields that every scheduler reads alike: lists of numbers, without steps and names."""
        fields = zip(
            (self.seconds, self.minutes, self.hours, self.days, self.months, self.weekdays),
            (60, 60, 24, 31, 12, 7),
            strict=True,
        )
        return " ".join("*" if len(values) == full else ",".join(map(str, values)) for values, full in fields)


def parse(text: str, where: str = "cron") -> Cron:
    """The expression in a text. Raises ConfigError; five fields are refused with the six that are meant."""
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
        {value for part in field.split(",") for value in _range(part, bounds, where)}
        for field, bounds in zip(fields, FIELDS, strict=True)
    ]
    values[5] = {weekday % 7 for weekday in values[5]}
    cron = Cron(*(tuple(sorted(found)) for found in values))
    if not any(map(cron.matches_day, (date(2024, 1, 1) + timedelta(days=day) for day in range(366)))):
        raise ConfigError("no year has such a day", where=where, value=text)
    return cron


def _range(part: str, bounds: Bounds, where: str) -> range:
    span, _, step = part.partition("/")
    first, dash, last = span.partition("-")
    try:
        interval = int(step) if step or part.endswith("/") else 1
        if span in ("*", "?"):
            low, high = bounds.low, bounds.high - (bounds.name == "weekday")
        else:
            low = _number(first, bounds)
            high = _number(last, bounds) if dash else bounds.high if step else low
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


def _number(text: str, bounds: Bounds) -> int:
    """Raises ValueError."""
    word = text.lower()
    if word in bounds.words:
        return bounds.low + bounds.words.index(word)
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def zone(name: str, where: str = "time_zone") -> zoneinfo.ZoneInfo:
    """A time zone by its name, like `Europe/Berlin`. Raises ConfigError."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        fix = "use a name of the IANA database, e.g. Europe/Berlin; where there is none, pip install tzdata"
        raise ConfigError("no such time zone is known here", where=where, value=name, fix=fix) from error


def instant_before(cron: Cron, where: zoneinfo.ZoneInfo, moment: datetime) -> datetime:
    """The last instant at or before a moment, in UTC. Raises ConfigError where none was within nine years."""
    moment = moment.astimezone(UTC).replace(microsecond=0)
    oldest = moment - timedelta(days=366 * MAX_YEARS)
    now, end, found = moment, LATEST, None  # from span to span, a time in which the zone has one offset, back in time
    while now > oldest:
        offset = _offset(where, now)
        wall = _wall_before(cron, min(_naive(moment) + offset, end - SECOND), _naive(oldest))
        instant = oldest if wall is None else (wall - offset).replace(tzinfo=UTC)
        change = _last_change(where, now, instant - timedelta(days=1))
        before = offset if change is None else _offset(where, change - SECOND)
        first = change or instant
        if before > offset and not cron.is_hourly:  # the clock was put back: what it has shown does not count again
            first += before - offset
        own = instant if wall is not None and instant >= first else None
        if change is None or found is not None:  # what was left out after this span may be later than what came then
            found = max((at for at in (own, found) if at is not None), default=None)
            break
        found, now = own, change - SECOND
        end = _naive(change) + max(before, offset)  # put forward: with what it has left out
    if found is None:
        raise ConfigError(f"no time within {MAX_YEARS} years matches", where="cron", value=str(cron))
    return found


def days_before(cron: Cron, where: zoneinfo.ZoneInfo, instant: datetime, days: int) -> datetime:
    """The same time of the day so many days before an instant, in UTC; that of a time which the clock leaves out."""
    walls = [_naive(instant) + _offset(where, instant - timedelta(days=ago)) for ago in (0, 1)]
    wall = next(
        (wall for wall in walls if _time_before(cron, (wall.hour, wall.minute, wall.second)) == wall.time()), walls[0]
    )
    return (wall - timedelta(days=days)).replace(tzinfo=where).astimezone(UTC)


def instants(cron: Cron, where: zoneinfo.ZoneInfo, start: datetime, end: datetime) -> list[datetime]:
    """All instants from `start` to before `end`, in UTC, the oldest first."""
    found: list[datetime] = []
    instant = instant_before(cron, where, end - SECOND)
    while instant >= start:
        found.append(instant)
        instant = instant_before(cron, where, instant - SECOND)
    return found[::-1]


def _last_change(where: zoneinfo.ZoneInfo, now: datetime, oldest: datetime) -> datetime | None:
    """The first second that has the offset of `now`; None where that is older than `oldest`."""
    offset, late = _offset(where, now), now
    early = now - STEP
    while _offset(where, early) == offset:
        if early <= oldest:
            return None
        early, late = early - STEP, early
    while late - early > SECOND:
        middle = early + timedelta(seconds=(late - early) // SECOND // 2)
        early, late = (early, middle) if _offset(where, middle) == offset else (middle, late)
    return late


def _offset(where: zoneinfo.ZoneInfo, moment: datetime) -> timedelta:
    offset = moment.astimezone(where).utcoffset()
    assert offset is not None
    return offset


def _naive(moment: datetime) -> datetime:
    return moment.replace(tzinfo=None)


def _wall_before(cron: Cron, at_most: datetime, at_least: datetime) -> datetime | None:
    """The last time of a clock between both, inclusive, that the expression matches."""
    day, limit = at_most.date(), (at_most.hour, at_most.minute, at_most.second)
    while day >= at_least.date():
        found = _time_before(cron, limit) if cron.matches_day(day) else None
        if found is not None:
            wall = datetime.combine(day, found)
            return wall if wall >= at_least else None
        day, limit = day - timedelta(days=1), (23, 59, 59)
    return None


def _time_before(cron: Cron, limit: tuple[int, int, int]) -> time | None:
    """The last time of a day up to a limit."""
    hour, minute, second = limit
    found = _at_most(cron.seconds, second) if hour in cron.hours and minute in cron.minutes else None
    if found is not None:
        return time(hour, minute, found)
    found = _at_most(cron.minutes, minute - 1) if hour in cron.hours else None
    if found is not None:
        return time(hour, found, cron.seconds[-1])
    found = _at_most(cron.hours, hour - 1)
    return None if found is None else time(found, cron.minutes[-1], cron.seconds[-1])


def _at_most(values: Sequence[int], limit: int) -> int | None:
    return max((value for value in values if value <= limit), default=None)


def in_utc(cron: Cron, where: zoneinfo.ZoneInfo, now: datetime) -> Cron:
    """An expression for a scheduler that counts in UTC: it matches every instant of the next three years.

    It may match more: where a zone changes its offset, the hours of both offsets. What is no instant of its own has
    been run by then.
    """
    days = (now + timedelta(days=day) for day in range(-1, 3 * 366))
    offsets = {_offset(where, day) // timedelta(minutes=1) for day in days}
    moved = {
        divmod(hour * 60 + minute - offset, 24 * 60)
        for hour in cron.hours
        for minute in cron.minutes
        for offset in offsets
    }
    minutes, hours = {rest % 60 for _, rest in moved}, {rest // 60 for _, rest in moved}
    found = cron
    for shift in {day for day, _ in moved}:
        found = _with_neighbours(found, cron, shift)
    is_either = len(cron.days) < 31 and len(cron.weekdays) < 7
    if is_either and (len(found.days) == 31 or len(found.weekdays) == 7):  # then that one no longer restricts the other
        found = replace(found, days=tuple(range(1, 32)), weekdays=tuple(range(7)))
    return replace(found, minutes=tuple(sorted(minutes)), hours=tuple(sorted(hours)))


def _with_neighbours(found: Cron, cron: Cron, shift: int) -> Cron:
    """`found`, with the days of `cron` moved by -1, 0 or 1 day; at the ends of months with every day that it may be."""
    if not shift:
        return found
    ends = {1: [28, 29, 30, 31]} if shift < 0 else {28: [29, 1], 29: [30, 1], 30: [31, 1], 31: [1]}
    days = {moved for day in cron.days for moved in ends.get(day, [day + shift])}
    months = {(month - 1 + shift) % 12 + 1 for month in cron.months}
    return replace(
        found,
        days=tuple(sorted(days | set(found.days))),
        months=tuple(sorted(months | set(found.months))),
        weekdays=tuple(sorted({(day + shift) % 7 for day in cron.weekdays} | set(found.weekdays))),
    )
