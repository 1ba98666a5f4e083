"""Turns to change a schedule: who waits for whom, what a killed process leaves, and who comes too late."""

import fsspec
import pytest

from kftrain.core import storage
from kftrain.errors import LaunchError
from kftrain.schedule import turn as turns
from kftrain.schedule.turn import Turn

ROOT = "memory://turns/root"


@pytest.fixture(autouse=True)
def _memory():
    yield
    fsspec.filesystem("memory").store.clear()


class Time:
    """A clock that only sleeping moves on."""

    def __init__(self):
        self.now = 0.0
        self.at = {}
        """Moments, and what happens then."""

    def sleep(self, seconds):
        self.now += seconds
        for moment in [moment for moment in self.at if moment <= self.now]:
            self.at.pop(moment)()


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def one(time):
    """Makes turns of several processes."""
    lines = []

    def made():
        turn = Turn.of(ROOT, "nightly", lines.append)
        turn.clock, turn.sleep = lambda: time.now, time.sleep
        return turn

    made.lines = lines
    return made


def names():
    return storage.list_names(f"{ROOT}/schedules/nightly/turns")


def test_a_second_one_waits_until_the_first_gives_it_back(one, time):
    first, second = one(), one()
    first.take()
    time.at[30.0] = first.give_back
    second.take()
    assert time.now == 30.0 and len(one.lines) == 1 and "waiting" in one.lines[0]
    second.give_back()
    assert names() == ["3.json", "4.json"]


def test_what_a_killed_process_held_is_over_when_nothing_was_heard_of_it_for_long(one, time):
    one().take()
    one().take()
    assert turns.SILENT_SECONDS <= time.now < turns.SILENT_SECONDS + 2 * turns.POLL_SECONDS


def test_whoever_keeps_its_turn_is_waited_for_and_not_for_ever(one, time):
    first, second = one(), one()
    first.take()

    def keep():
        first.keep()
        time.at[time.now + turns.KEPT_SECONDS + 1] = keep

    keep()
    with pytest.raises(LaunchError, match="at the same time"):
        second.take()
    assert time.now >= turns.MAX_WAIT_SECONDS
    assert len(names()) > turns.MAX_WAIT_SECONDS / turns.KEPT_SECONDS / 2


def test_a_process_that_was_suspended_learns_that_its_turn_is_over(one, time):
    first, second = one(), one()
    first.take()
    second.take()
    with pytest.raises(LaunchError, match="at the same time"):
        first.keep()
    first.keep()
    first.give_back()
    second.keep()
    assert names() == ["1.json", "2.json"]


def test_a_listing_of_long_ago_takes_no_turn(one, time, monkeypatch):
    """Others had turns between a listing and the creation, and removed the documents of before."""
    late = one()
    real = storage.create_json

    def create_late(uri, document):
        monkeypatch.setattr(storage, "create_json", real)
        for _ in range(2):
            with one().hold():
                pass
        holder = one()
        holder.take()
        time.at[time.now + 7] = holder.give_back
        real(uri, document)

    monkeypatch.setattr(storage, "create_json", create_late)
    late.take()
    assert time.now >= 7


def test_taking_says_whether_others_were_there(one, time):
    first, second = one(), one()
    first.take()
    first.give_back()
    assert first.take()
    first.give_back()
    with second.hold():
        pass
    assert not first.take()
