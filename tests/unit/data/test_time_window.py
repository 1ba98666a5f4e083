"""Windows of time against the standard library's calendar, and what is refused because it says no single moment."""

import itertools
from datetime import date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain import config
from kftrain.data.time_window import TimeWindow, instant, moment_of, partition_of, utc_text, zone_of
from kftrain.errors import ConfigError

UTC = timezone.utc
BERLIN = ZoneInfo("Europe/Berlin")
MOMENTS = st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC))


@settings(max_examples=200, deadline=None)
@given(st.lists(MOMENTS, min_size=3, max_size=6, unique=True), st.lists(MOMENTS, max_size=20))
def test_windows_that_follow_each_other_hold_each_moment_once(borders, moments):
    borders = sorted(borders)
    windows = [TimeWindow(*pair) for pair in itertools.pairwise(borders)]
    for moment in [*moments, *borders]:
        assert sum(window.holds(moment) for window in windows) == (borders[0] <= moment < borders[-1])


@settings(max_examples=200, deadline=None)
@given(MOMENTS, st.timedeltas(timedelta(seconds=1), timedelta(days=40)), st.integers(1, 9), MOMENTS)
def test_what_comes_before_a_window_is_as_many_of_them(start, length, count, moment):
    window = TimeWindow(start, start + length)
    several = window.before(count)
    alone, each = [], window
    for _ in range(count):
        each = each.before(1)
        alone.append(each)
    assert several.end == window.start and several.holds(moment) == any(each.holds(moment) for each in alone)


@settings(max_examples=200, deadline=None)
@given(MOMENTS)
def test_an_instant_is_read_as_it_is_written_whatever_its_zone(moment):
    assert instant(utc_text(moment)) == moment
    assert instant(moment.astimezone(BERLIN).isoformat()) == moment


@pytest.mark.parametrize(
    "text",
    [
        *("2026-11-21", "2026-11-21T00:00:00", "2026-11-21T00:00Z", "20261121T000000Z", "2026-W47-6T00:00:00Z", "now"),
        *("2026-02-30T00:00:00Z", "2026-11-21T24:00:00Z", "2026-11-21T00:00:60Z", "2026-11-21T00:00:00+1:00", ""),
        *("0001-01-01T00:00:00+23:59", "٢٠٢٦-11-21T00:00:00Z"),
    ],
)
def test_what_is_no_instant_of_rfc_3339_is_refused(text):
    with pytest.raises(ValueError, match="RFC 3339"):
        instant(text)


@settings(max_examples=300, deadline=None)
@given(st.dates(date(1990, 1, 1), date(2089, 12, 31)), st.integers(0, 23), st.sampled_from(["day", "hour"]))
def test_the_partitions_of_a_path_are_days_and_hours(day, hour, kind):
    """Days and hours of UTC, counted by adding seconds to 1970."""
    seconds = (day.toordinal() - date(1970, 1, 1).toordinal()) * 86400
    end = seconds + 86400 if kind == "day" else seconds + 3600 * (hour + 1)
    folders = f"date={day}" if kind == "day" else f"date={day}/hour={hour:02d}"
    found = partition_of(f"raw/{folders}/more/a.txt", "date", UTC)
    counted = f"year={day.year}/month={day.month:02d}/day={day.day}" + ("" if kind == "day" else f"/hour={hour}")
    assert found.folder == f"raw/{folders}" and partition_of(f"{counted}/a", "date", UTC).folder == counted
    for each in (
        found,
        partition_of(f"{counted}/a", "date", UTC),
        partition_of(f"dt={day:%Y%m%d}/{folders[16:]}/a", "dt", UTC),
    ):
        assert (each.last_moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) == end * 10**6 - 1


def test_months_and_years_end_where_the_next_begins():
    assert partition_of("year=2024/month=02/a", "date", UTC).last_moment == instant("2024-02-29T23:59:59.999999Z")
    assert partition_of("year=2024/month=12/a", "date", UTC).last_moment == instant("2024-12-31T23:59:59.999999Z")
    assert partition_of("year=2024/a", "date", UTC).last_moment == instant("2024-12-31T23:59:59.999999Z")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a.txt", "names no time"),
        ("date=2026-11-21", "names no time"),
        ("hour=05/a", "names no time"),
        ("month=11/day=21/a", "names no time"),
        ("date=2026-11-21/date=2026-11-22/a", "two of 'date'"),
        ("date=2026-11-21/year=2026/a", "both 'date' and a year"),
        ("date=2026-02-30/a", "day"),
        ("date=2026-11/a", "is no date"),
        ("date=2026-1121/a", "is no date"),
        ("date=__HIVE_DEFAULT_PARTITION__/a", "is no date"),
        ("date=2026-11-21/hour=24/a", "hour must be in 0..23"),
        ("date=2026-11-21/hour=five/a", "is no number"),
        ("year=2026/month=13/a", "month must be in 1..12"),
        ("year=9999/a", "no calendar|out of range"),
    ],
)
def test_a_path_that_says_no_single_time_is_refused(path, said):
    with pytest.raises(ValueError, match=said):
        partition_of(path, "date", UTC)


def test_a_day_has_as_many_hours_as_the_clocks_of_its_zone_say():
    days = [
        partition_of(f"date=2026-{day}/a", "date", BERLIN).last_moment for day in ("03-28", "03-29", "10-24", "10-25")
    ]
    assert [str(later - earlier) for earlier, later in (days[:2], days[2:])] == ["23:00:00", "1 day, 1:00:00"]


def test_an_hour_that_comes_twice_or_never_is_refused():
    with pytest.raises(ValueError, match="2026-10-25T02:00:00 comes twice in Europe/Berlin"):
        partition_of("date=2026-10-25/hour=02/a", "date", BERLIN)
    with pytest.raises(ValueError, match="2026-03-29T02:00:00 comes never in Europe/Berlin"):
        partition_of("date=2026-03-29/hour=02/a", "date", BERLIN)
    with pytest.raises(ValueError, match="twice"):
        moment_of("2026-10-25T02:30:00", BERLIN, "")
    assert moment_of("2026-10-25T02:30:00+01:00", BERLIN, "") == instant("2026-10-25T01:30:00Z")


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        ("2026-11-21T05:00:00+02:00", "", "2026-11-21T03:00:00Z"),
        (datetime(2026, 11, 21, 5, tzinfo=UTC), "", "2026-11-21T05:00:00Z"),
        (datetime(2026, 11, 21, 5), "", "2026-11-21T04:00:00Z"),
        ("2026-11-21", "", "2026-11-21T22:59:59.999999Z"),
        (date(2026, 11, 21), "", "2026-11-21T22:59:59.999999Z"),
        (0, "seconds", "1970-01-01T00:00:00Z"),
        (-1.5, "seconds", "1969-12-31T23:59:58.500000Z"),
        (1795219200123, "milliseconds", "2026-11-21T00:00:00.123000Z"),
        (1795219200123456, "microseconds", "2026-11-21T00:00:00.123456Z"),
        (1795219200123456999, "nanoseconds", "2026-11-21T00:00:00.123456Z"),
    ],
)
def test_what_columns_hold_is_a_moment(value, unit, expected):
    assert utc_text(moment_of(value, BERLIN, unit)) == expected


@pytest.mark.parametrize(
    "value", [None, True, [], {}, b"2026-11-21", "yesterday", "2026-11-21T25:00:00Z", float("nan"), 10**30]
)
def test_what_is_no_time_is_refused(value):
    with pytest.raises(ValueError, match=r"\S"):
        moment_of(value, UTC, "seconds")


@pytest.mark.parametrize("value", ["2026-11-21", "2026-11-21T00:00:00", date(2026, 11, 21), datetime(2026, 11, 21), 7])
def test_what_could_be_several_moments_is_refused(value):
    with pytest.raises(ValueError, match=r"set data\.window"):
        moment_of(value, None, "")


def test_a_zone_is_known_by_its_name():
    assert zone_of("UTC") is UTC
    for name in ("Europe/Atlantis", "../etc/passwd", "", "Europe"):
        with pytest.raises(ValueError, match="no such time zone"):
            zone_of(name)


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ("{by: path, start: 2026-11-21T00:00:00Z, end: 2026-11-21T00:00:00Z}", "not after its start"),
        ("{by: path, start: 2026-11-21T00:00:00Z}", "a start and an end"),
        ("{by: path, start: 2026-11-21, end: 2026-11-22}", "RFC 3339"),
        ("{start: 2026-11-21T00:00:00Z, end: 2026-11-22T00:00:00Z}", "a window needs by: path, modified or column"),
        ("{by: column}", "needs the name of a column"),
        ("{by: path, time_zone: Europe/Atlantis}", "no such time zone"),
        ("{by: name}", "data.window.by"),
        ("{by: path, begin: x}", "unknown key"),
    ],
)
def test_a_wrong_window_is_refused_in_a_line_that_says_why(window, said):
    with pytest.raises(ConfigError) as caught:
        config.parse(f"data: {{window: {window}}}")
    assert said in caught.value.line


def test_a_window_is_kept_in_utc_and_read_again():
    own = config.parse("data: {window: {by: path, start: 2026-11-21T00:00:00+01:00, end: 2026-11-22T00:00:00+01:00}}")
    assert (own.data.window.start, own.data.window.end) == ("2026-11-20T23:00:00Z", "2026-11-21T23:00:00Z")
    assert config.parse(own.to_yaml()) == own
    assert str(own.data.window.window()) == "2026-11-20T23:00:00Z to 2026-11-21T23:00:00Z"


def test_a_window_whose_instants_nobody_has_set_is_refused_when_it_is_used():
    with pytest.raises(ConfigError, match="a schedule sets both"):
        config.parse("data: {window: {by: path}}").data.window.window()


def test_the_window_is_no_part_of_the_training_but_by_what_lies_in_it():
    window = "{by: path, start: 2026-11-21T00:00:00Z, end: 2026-11-22T00:00:00Z}"
    assert config.parse(f"data: {{window: {window}}}").training_digest("d") == config.parse("").training_digest("d")
