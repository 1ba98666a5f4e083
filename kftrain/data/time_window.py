"""Windows of time: instants, dates in paths and values of columns, and which of them lie in a window. Pure.

A window is half-open, `[start, end)`: windows that follow each other hold everything exactly once. What lasts, a day or
an hour, belongs to the window that its last moment is in: a day that has not ended at the end of a window is not whole.

Instants are text as in RFC 3339 (`2026-11-21T00:00:00Z`). Nothing is guessed: a time that is none, that no zone is
known of, or that a clock shows twice or never where summer time begins or ends, is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

UTC = timezone.utc
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOMENT = timedelta(microseconds=1)
"""The shortest time that is told apart."""

UNITS = {"seconds": 10**9, "milliseconds": 10**6, "microseconds": 10**3, "nanoseconds": 1}
"""Name of a unit of numbers that count from 1970 -> nanoseconds."""

_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_DATE = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)", re.ASCII)
_NUMBER = re.compile(r"\d{1,4}", re.ASCII)
_FIELDS = ("year", "month", "day", "hour")


@dataclass(frozen=True)
class TimeWindow:
    """Window of all moments from `start` on and before `end`, both in UTC."""

    start: datetime
    end: datetime

    def __str__(self) -> str:
        """Return a text for people, and for `parse`."""
        return f"{utc_text(self.start)} to {utc_text(self.end)}"

    @classmethod
    def parse(cls, start: str, end: str) -> TimeWindow:
        """Parse two texts of RFC 3339. Raises ValueError for what is none, and where it would hold nothing."""
        window = cls(instant(start), instant(end))
        if window.start >= window.end:
            raise ValueError(f"the window ends at {utc_text(window.end)}, which is not after its start")
        return window

    def holds(self, moment: datetime) -> bool:
        """Tell whether a moment lies in the window."""
        return self.start <= moment < self.end

    def before(self, count: int) -> TimeWindow:
        """Return as much time as `count` such windows, right before this one; or all that the calendar has."""
        try:
            return TimeWindow(self.start - count * (self.end - self.start), self.start)
        except OverflowError:
            return TimeWindow(datetime.min.replace(tzinfo=UTC), self.start)


def instant(text: str) -> datetime:
    """Return the instant of a text, in UTC. Raises ValueError for what is not RFC 3339, which names a zone."""
    try:
        if _RFC_3339.fullmatch(text):
            return datetime.fromisoformat(text.upper().replace(" ", "T")).astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"'{text}' is no instant as in RFC 3339: write it like 2026-11-21T00:00:00Z")


def utc_text(moment: datetime) -> str:
    """Return the text of an instant in UTC: RFC 3339."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def from_nanoseconds(count: int) -> datetime:
    """Return the moment so many nanoseconds after 1970; what is below a microsecond is cut off.

    Raises OverflowError.
    """
    return EPOCH + timedelta(microseconds=count // 1000)


@dataclass(frozen=True)
class Partition:
    """Time of the files in a path, as far as it says one."""

    folder: str
    """The part of the path that says it."""
    last_moment: datetime


def partition_of(name: str, column: str, zone: tzinfo) -> Partition:
    """Return the partition that a file lies in, by the folders of its path.

        date=2026-11-21/…   date=20261121/…   date=2026-11-21/hour=05/…       the date is called `column`
        year=2026/month=11/day=21/hour=5/…                                    also without the last ones

    Raises ValueError for a path that says no time, more than one, or an impossible one.
    """
    folders = name.split("/")[:-1]
    values: dict[str, str] = {}
    depth = 0
    for number, folder in enumerate(folders, start=1):
        key, is_pair, value = folder.partition("=")
        if is_pair and key in (column, *_FIELDS):
            if key in values:
                raise ValueError(f"its path names two of '{key}'")
            values[key], depth = value, number
    is_date = column in values and (column not in _FIELDS or _DATE.fullmatch(values[column]) is not None)
    if is_date and values.keys() & ({"year", "month", "day"} - {column}):
        raise ValueError(f"its path names both '{column}' and a year, month or day")
    if is_date:
        fields = _date_fields(values[column], column)
        fields += [_number(values["hour"], "hour")] if "hour" in values else []
    else:
        fields = _read_date_fields(values, column)
    return Partition("/".join(folders[:depth]), _find_last_moment(fields, zone))


def moment_of(value: object, zone: tzinfo | None, unit: str) -> datetime:
    """Return the last moment of what a column holds: a time, a date, a text of one, or a number of units since 1970.

    Args:
        value: As Python has it.
        zone: Of dates, and of times that name none; None: those are refused.
        unit: Of numbers, one of `UNITS`; '': those are refused.

    Raises ValueError.
    """
    if isinstance(value, str):
        value = _parse(value)
    try:
        if isinstance(value, datetime):
            return _in_utc(value, zone)
        if isinstance(value, date):
            return _find_last_moment([value.year, value.month, value.day], _require_whole(zone))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _count_from_1970(value, unit)
    except OverflowError as error:
        raise ValueError("a time that no calendar has") from error
    raise ValueError(f"{type(value).__name__} instead of a time")


def zone_of(name: str) -> tzinfo:
    """Return a time zone by its name, as `Europe/Berlin`. Raises ValueError for an unknown one."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"no such time zone: '{name}'") from error


def _parse(text: str) -> datetime | date:
    try:
        return date.fromisoformat(text) if len(text) <= len("2026-11-21") else datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"'{text[:40]}' is no time as in ISO 8601") from error


def _count_from_1970(value: int | float, unit: str) -> datetime:
    if not unit:
        raise ValueError("a number, and of no known unit: set data.window.number_unit")
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("not a finite number")
    return from_nanoseconds(value * UNITS[unit] if isinstance(value, int) else round(value * UNITS[unit]))


def _in_utc(value: datetime, zone: tzinfo | None) -> datetime:
    """Convert a time to UTC; one without a zone is one of `zone`. Subclasses become plain ones."""
    clock = (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    if value.tzinfo is not None:
        return datetime(*clock, tzinfo=value.tzinfo, fold=value.fold).astimezone(UTC)
    return _convert_local(datetime(*clock), _require_whole(zone))


def _require_whole(zone: tzinfo | None) -> tzinfo:
    if zone is None:
        raise ValueError("a time without a time zone: set data.window.time_zone")
    return zone


def _convert_local(value: datetime, zone: tzinfo) -> datetime:
    """Return in UTC what a clock of the zone shows. Raises ValueError for what it shows twice, or never."""
    first, second = (value.replace(tzinfo=zone, fold=fold) for fold in (0, 1))
    if first.utcoffset() != second.utcoffset():
        is_twice = first.astimezone(UTC).astimezone(zone).replace(tzinfo=None, fold=0) == value
        raise ValueError(f"{value.isoformat()} comes {'twice' if is_twice else 'never'} in {zone}")
    return first.astimezone(UTC)


def _date_fields(value: str, column: str) -> list[int]:
    match = _DATE.fullmatch(value)
    if match is None or value.count("-") == 1:
        raise ValueError(f"'{column}={value[:40]}' is no date as 2026-11-21")
    return [int(part) for part in match.groups()]


def _read_date_fields(values: dict[str, str], column: str) -> list[int]:
    """Return year, month, … as far as they are there."""
    fields = [_number(values[field], field) for field in _FIELDS if field in values]
    if not fields or [field for field in _FIELDS if field in values] != list(_FIELDS[: len(fields)]):
        raise ValueError(f"its path names no time: neither '{column}=2026-11-21' nor year=, month=, day=")
    return fields


def _number(value: str, field: str) -> int:
    if not _NUMBER.fullmatch(value):
        raise ValueError(f"'{field}={value[:40]}' is no number")
    return int(value)


def _find_last_moment(fields: list[int], zone: tzinfo) -> datetime:
    """Return the last moment of a year, a month, a day or an hour in a zone, in UTC.

    Raises ValueError for one that is in no calendar.
    """
    year, month, day, hour = (*fields, *(1, 1, 1, 0)[len(fields) :])
    try:
        if len(fields) == len(_FIELDS):
            return _convert_local(datetime(year, month, day, hour), zone) + timedelta(hours=1) - MOMENT
        following = _following(date(year, month, day), _FIELDS[len(fields) - 1])
        # Of a midnight that comes twice the day begins with the first; of one that never comes, when it would.
        return datetime(following.year, following.month, following.day, tzinfo=zone).astimezone(UTC) - MOMENT
    except OverflowError as error:
        raise ValueError("a time that no calendar has") from error


def _following(day: date, field: str) -> date:
    """Return the first day after the year, the month or the day that begins with this one."""
    if field == "day":
        return day + timedelta(days=1)
    is_last = field == "year" or day.month == 12
    return date(day.year + 1, 1, 1) if is_last else date(day.year, day.month + 1, 1)
