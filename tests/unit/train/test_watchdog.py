"""Which process hangs, from what each says of itself."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kftrain.errors import HangError, RetryableError
from kftrain.train import pulse
from kftrain.train.pulse import Beat, beat
from kftrain.train.verdict import outranks
from kftrain.train.watchdog import Watchdog, found

NOW = 1000.0


def process(still=0.0, count=7, waits=False, silent=0.0, **changes):
    """A process that is watched, and has begun its last collective operation `still` seconds ago."""
    settings = {"alive_at": NOW - silent, "progress_at": NOW - still, "num_collectives": count, "waits": waits}
    return Beat(**{**settings, "counted": True, "watched": True, **changes})


def look(*beats, nodes=1):
    return found(dict(enumerate(beats)), NOW, 10.0, nodes)


def test_who_others_wait_for_is_named():
    hang = look(process(11, 8, True), process(12, 7), process(11, 8, True))
    assert isinstance(hang.error, HangError) and hang.rank == 1
    assert hang.error.line.startswith(
        "rank 1: no progress for 10 s, while others wait; the log of that rank says where"
    )
    assert "ranks 1, 2: no progress" in look(process(11, 8, True), process(12, 7), process(12, 7)).error.line


def test_who_gives_no_sign_of_life_is_named_whatever_the_counts_say():
    """Stopped, or holding the GIL in a call that does not return: it was the first to begin the operation."""
    hang = look(process(3, 7, True), process(11, 8, True, silent=11))
    assert hang.rank == 1 and "rank 1: stopped or blocked: no sign of life" in hang.error.line


def test_one_process_alone_may_take_twice_as_long():
    assert look(process(19)) is None
    assert look(process(20)).rank == 0


def test_where_all_of_a_node_wait_another_node_is_the_cause():
    """The error of that node takes the place of this one, whichever comes first."""
    waiting = look(process(11, 8, True), process(11, 8, True), nodes=2)
    assert isinstance(waiting.error, RetryableError) and "for another node" in waiting.error.line
    hang = look(process(20), nodes=2)
    assert outranks(hang.error.to_dict(), waiting.error.to_dict())
    assert not outranks(waiting.error.to_dict(), hang.error.to_dict())
    assert "ranks 0, 1: wait for each other" in look(process(11, 8, True), process(11, 8, True)).error.line


@pytest.mark.parametrize(
    "beats",
    [
        [],
        [Beat()],
        [process(9, 8, True), process(9, 7)],
        [process(99, 8, True, watched=False), process(99, 7, watched=False)],
        [process(99, 0, counted=False)],
        [process(0, 8), process(0, 7)],
    ],
)
def test_what_is_no_hang(beats):
    """Not begun, not long enough, at rest, not counted by this torch, at work."""
    assert look(*beats) is None


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 3), st.booleans(), st.floats(0, 50)), max_size=6))
def test_who_is_named_is_still_or_silent(states):
    beats = [process(still, count, waits, silent) for still, count, waits, silent in states]
    hang = look(*beats)
    if hang is not None:
        named = beats[hang.rank]
        assert NOW - named.progress_at >= 10 or NOW - named.alive_at >= 10
    assert hang or all(NOW - one.alive_at < 10 for one in beats)


def status(enqueued, completed):
    return {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(completed)}


def test_a_beat_counts_what_the_training_thread_has_begun():
    first = beat(Beat(), {"0": status(5, 5), "1": status(3, 2), "2": status(9, 8)}, "2", True, 1.0)
    assert (first.num_collectives, first.waits, first.counted, first.watched) == (8, True, True, True)
    second = beat(first, {"0": status(5, 5), "1": status(3, 3), "2": status(9, 8)}, "2", True, 1.0)
    assert second.progress_at == first.progress_at < second.alive_at and not second.waits
    third = beat(second, {"0": status(6, 5), "1": status(3, 3)}, "2", True, 1.0)
    assert third.progress_at == third.alive_at


def test_after_a_rest_the_time_begins_anew():
    first = beat(Beat(), {"0": status(5, 5)}, "", True, 1.0)
    assert beat(first, {"0": status(5, 5)}, "", True, 2.0).progress_at > first.progress_at


def test_a_group_that_has_begun_nothing_and_a_torch_that_counts_nothing():
    assert beat(Beat(), {"0": status(-1, -1)}, "", True, 1.0).num_collectives == 0
    assert not beat(Beat(), {}, "", True, 1.0).counted


def test_what_a_process_writes_is_what_its_supervisor_reads(tmp_path, monkeypatch):
    monkeypatch.setenv(pulse.PULSE_ENV, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(pulse, "_statuses", lambda: {"0": status(5, 4)})
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.01)
    one = pulse.Pulse()
    assert not pulse.read(tmp_path / "1").watched and pulse.read(tmp_path / "0") == Beat()
    with one.watched():
        begun = pulse.read(tmp_path / "1")
        assert begun.watched and begun.waits and begun.num_collectives == 5
        time.sleep(0.1)
        assert pulse.read(tmp_path / "1").alive_at > begun.alive_at
        assert Watchdog(tmp_path, range(2, 4), 0.05, 1).look().rank == 3
        with one.resting():
            assert not pulse.read(tmp_path / "1").watched
            assert Watchdog(tmp_path, range(2, 4), 0.05, 1).look() is None
    assert not pulse.read(tmp_path / "1").watched
    one.close()


def test_without_a_supervisor_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(pulse.PULSE_ENV, raising=False)
    with pulse.Pulse().watched():
        assert list(tmp_path.iterdir()) == []
