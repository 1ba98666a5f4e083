"""Cron expressions against a clock that is looked at second by second."""

import random
import zoneinfo
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.errors import ConfigError
from kftrain.schedule import cron

UTC = timezone.utc
SECOND = timedelta(seconds=1)


def oracle_matches(text, wall):
    """Whether a text of plain numbers, lists and stars matches a time of the clock: no code in common."""
    names = [wall.second, wall.minute, wall.hour, wall.day, wall.month, (wall.weekday() + 1) % 7]
    fields = text.split()
    hits = [field == "*" or str(value) in field.split(",") for field, value in zip(fields, names, strict=True)]
    days = hits[3] or hits[5] if fields[3] != "*" and fields[5] != "*" else hits[3] and hits[5]
    return all(hits[:3]) and days and hits[4]


def oracle_instants(text, zone, start, hours, every_seconds):
    """Every instant from `start` on: the clock is read again and again, and what it leaves out is put in its place."""
    found = set()
    for past in range(0, hours * 3600, every_seconds):
        moment = start + past * SECOND
        wall = moment.astimezone(zone)
        if oracle_matches(text, wall) and (wall.fold == 0 or text.split()[2] == "*"):
            found.add(moment)
        naive = start.replace(tzinfo=None) + past * SECOND
        real = naive.replace(tzinfo=zone).astimezone(UTC)
        if real.astimezone(zone).replace(tzinfo=None) != naive and oracle_matches(text, naive):
            found.add(real)  # Python takes the offset of before for a time that is left out
    return sorted(found)


CHANGES = [
    ("Europe/Berlin", datetime(2026, 3, 29, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2026, 10, 25, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 3, 8, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 11, 1, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 4, 4, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 10, 3, tzinfo=UTC)),
    ("Asia/Kolkata", datetime(2026, 6, 1, tzinfo=UTC)),
    ("Pacific/Apia", datetime(2011, 12, 30, tzinfo=UTC)),
    ("UTC", datetime(2024, 2, 28, 12, tzinfo=UTC)),
]


@pytest.mark.parametrize("text", ["0 30 2 * * *", "15 0,30 1,2,3 * * *", "0 0 * * * *", "30 45 * * * 0,6"])
@pytest.mark.parametrize(("name", "start"), CHANGES)
def test_instants_around_a_change_of_the_clock(name, start, text):
    zone = zoneinfo.ZoneInfo(name)
    seen = oracle_instants(text, zone, start - timedelta(hours=14), hours=53, every_seconds=15)
    assert cron.list_instants(cron.parse_cron(text), zone, start, start + timedelta(hours=24)) == [
        at for at in seen if start <= at < start + timedelta(hours=24)
    ]


def test_every_second_of_the_hours_around_a_change():
    zone, start, text = zoneinfo.ZoneInfo("Europe/Berlin"), datetime(2026, 3, 29, 0, tzinfo=UTC), "7,8,59 * 1,2,3 * * *"
    seen = oracle_instants(text, zone, start, hours=3, every_seconds=1)
    after = [at for at in seen if at >= start + timedelta(hours=1)]
    found = cron.list_instants(cron.parse_cron(text), zone, start + timedelta(hours=1), start + timedelta(hours=2))
    assert found == [at for at in after if at < start + timedelta(hours=2)]
    assert len(found) == 3 * 60


def some(values):
    lists = st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)
    return st.one_of(st.just("*"), lists.map(lambda found: ",".join(map(str, found))))


expressions = st.builds(
    " ".join,
    st.tuples(
        st.sampled_from(["0", "30", "0,59"]),
        some([0, 1, 15, 30, 59]),
        some([0, 1, 2, 3, 12, 22, 23]),
        some([1, 2, 15, 28, 29, 30, 31]),
        some([1, 2, 3, 10, 11, 12]),
        some(range(7)),
    ),
)
moments = st.datetimes(datetime(2023, 1, 1), datetime(2027, 12, 31)).map(
    lambda at: at.replace(tzinfo=UTC, microsecond=0)
)
zones = st.sampled_from(sorted({name for name, _ in CHANGES}))


@settings(max_examples=60, deadline=None)
@given(expressions, zones, moments)
def test_the_instant_before_a_moment_matches_and_nothing_between_does(text, name, moment):
    zone = zoneinfo.ZoneInfo(name)
    try:
        parsed = cron.parse_cron(text)
    except ConfigError:  # 30 February
        return
    found = cron.find_instant_before(parsed, zone, moment)
    assert found <= moment
    assert cron.find_instant_before(parsed, zone, found) == found
    wall = found.astimezone(zone).replace(tzinfo=None)
    left_out = [wall - gap for gap in (timedelta(minutes=30), timedelta(hours=1), timedelta(hours=24))]
    assert any(oracle_matches(text, at) for at in (wall, *left_out))
    between = random.Random(text).sample(range(1, max(2, (moment - found) // SECOND + 1)), 1)[0]
    assert cron.find_instant_before(parsed, zone, min(moment, found + between * SECOND)) == found


@settings(max_examples=60, deadline=None)
@given(expressions, zones, moments)
def test_the_expression_in_utc_matches_every_instant(text, name, moment):
    zone = zoneinfo.ZoneInfo(name)
    try:
        parsed = cron.parse_cron(text)
    except ConfigError:
        return
    text_in_utc = str(cron.convert_to_utc(parsed, zone, moment))
    instant = cron.find_instant_before(parsed, zone, moment + timedelta(days=700))
    for _ in range(20):
        if instant < moment:
            break
        assert oracle_matches(text_in_utc, instant), (text_in_utc, instant)
        instant = cron.find_instant_before(parsed, zone, instant - SECOND)


def test_in_utc_nothing_is_added_where_the_zone_has_one_offset():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert (
        str(cron.convert_to_utc(cron.parse_cron("0 0 2 * * mon-fri"), cron.load_zone("UTC"), now))
        == "0 0 2 * * 1,2,3,4,5"
    )
    assert (
        str(cron.convert_to_utc(cron.parse_cron("0 0 2 * * *"), cron.load_zone("Asia/Kolkata"), now)) == "0 30 20 * * *"
    )
    assert (
        str(cron.convert_to_utc(cron.parse_cron("0 0 2 * * *"), cron.load_zone("Europe/Berlin"), now))
        == "0 0 0,1 * * *"
    )


def test_five_fields_are_refused_with_the_six():
    with pytest.raises(ConfigError, match=r"six fields.*write '0 0 2 \* \* \*'"):
        cron.parse_cron("0 2 * * *")


WRONG = ["", "@daily", "0 0 24 * * *", "60 0 0 * * *", "0 0 2 0 * *", "0 0 2 * 13 *", "0 0 2 * * 8", "0 0 5-2 * * *"]
WRONG += ["0 0 */0 * * *", "0 0 2/ * * *", "0 0 ² * * *", "0 0 2 * * someday", "0 0 2 30 2 *", "0 0 1,, * * *"]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(ConfigError):
        cron.parse_cron(text)


def test_names_ranges_steps_and_both_sundays():
    assert str(cron.parse_cron("*/20 5-7 1/11 ? jan-mar 5-7")) == "0,20,40 5,6,7 1,12,23 * 1,2,3 0,5,6"
    assert cron.parse_cron("0 0 0 * * 0") == cron.parse_cron("0 0 0 * * 7") == cron.parse_cron("0 0 0 * * SUN")


def test_a_29_february_is_found_after_eight_years():
    found = cron.find_instant_before(
        cron.parse_cron("0 0 0 29 2 *"), cron.load_zone("UTC"), datetime(2104, 2, 28, tzinfo=UTC)
    )
    assert found == datetime(2096, 2, 29, tzinfo=UTC)


def test_an_unknown_zone_is_refused():
    for name in ("Europe/Berlim", "", "../etc/passwd"):
        with pytest.raises(ConfigError, match="no such time zone"):
            cron.load_zone(name)
