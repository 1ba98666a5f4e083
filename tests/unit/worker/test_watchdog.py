"""Which process hangs, from what each says of itself."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C import _distributed_c10d

from kftrain.errors import HangError
from kftrain.process import liveness
from kftrain.process.liveness import Beat, compute_beat
from kftrain.worker import watchdog
from kftrain.worker.watchdog import Watchdog, find_hang

NOW = 1000.0


def process(still=0.0, count=7, silent=0.0, **changes):
    """A process that is watched, and has begun its last collective operation `still` seconds ago."""
    settings = {"alive_at": NOW - silent, "progress_at": NOW - still, "watched_at": 1.0, "num_collectives": count}
    return Beat(**{**settings, "counted": True, "watched": True, **changes})


def look(*beats):
    return find_hang(dict(enumerate(beats)), NOW, 20.0)


def test_who_others_wait_for_is_named():
    hang = look(process(25, 8), process(21, 7), process(25, 8))
    assert isinstance(hang.error, HangError) and hang.rank == 1
    assert hang.error.line.startswith(
        "rank 1: no progress for 21 s, while others wait; the log of that rank says where"
    )
    assert "ranks 1, 2: no progress" in look(process(21, 8), process(22, 7), process(22, 7)).error.line


def test_who_gives_no_sign_of_life_is_named_whatever_the_counts_say():
    """Stopped, or holding the GIL in a call that does not return: it was the first to begin the operation."""
    hang = look(process(3, 7), process(21, 8, silent=21))
    assert hang.rank == 1 and "rank 1: stopped or blocked, no sign of life for 20 s" in hang.error.line


def test_who_is_behind_and_silent_is_said_to_be():
    hang = look(process(21, 8), process(21, 7, silent=19))
    assert "rank 1: stopped or blocked, no sign of life while others wait for 21 s" in hang.error.line


def test_processes_at_the_same_place_may_take_twice_as_long():
    """They compute, or wait for another node."""
    assert look(process(39)) is None
    assert look(process(40)).error.line.startswith("rank 0: no progress for 40 s; the log")
    assert look(process(39), process(99)) is None
    assert "ranks 0, 1: no progress for 40 s;" in look(process(40), process(41)).error.line


def test_fault_21_who_calls_another_collective_operation_than_the_others_is_named():
    """Both have begun as many: the counts alone name nobody, and only after twice the time."""
    most, other = process(21, operation="all_gather"), process(22, operation="all_reduce")
    hang = look(most, other, most)
    assert isinstance(hang.error, HangError) and hang.rank == 1
    assert "different collective operations" in hang.error.line
    assert "rank 1 in all_reduce, ranks 0, 2 in all_gather" in hang.error.line
    assert look(most, most, most) is None
    assert look(process(19, operation="all_gather"), other) is None
    behind = look(process(21, 8, operation="all_gather"), process(22, 7, operation="all_reduce"))
    assert behind.rank == 1 and behind.error.line.startswith("rank 1: no progress"), "who has skipped one is behind"


def test_a_process_that_stands_still_says_in_which_operation(tmp_path, monkeypatch):
    monkeypatch.setenv(liveness.LIVENESS_ENV, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    statuses = {"0": (5, 4), "1": (0, 0)}
    recorded = [
        {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce"},
        {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_gather"},
        {"process_group": ["1", "background"], "profiling_name": "gloo:barrier"},
    ]
    dump = json.dumps({"entries": recorded}, separators=(",", ":")).encode()
    monkeypatch.setattr(liveness, "_read_statuses", statuses.copy)
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda collectives: dump)
    monkeypatch.setattr(liveness, "BEAT_SECONDS", 0.01)
    one = liveness.Liveness(lambda: statuses.update({"1": (3, 3)}), 0.4)
    with one.mark_watched():
        assert liveness.read_beat(tmp_path / "0").operation == ""
        deadline = time.monotonic() + 30
        while not liveness.read_beat(tmp_path / "0").operation and time.monotonic() < deadline:
            time.sleep(0.01)
        assert liveness.read_beat(tmp_path / "0").operation == "all_gather"
        statuses["0"] = (6, 5)
        one._write()
        assert liveness.read_beat(tmp_path / "0").operation == "", "it goes on"
    one.close()


def test_who_is_at_rest_while_all_others_wait_is_named():
    """Resting is not over at the same time everywhere: the first process works on metrics, or writes."""
    hang = look(process(watched=False), process(21), process(22))
    assert hang.error.line.startswith("rank 0: in validation, a checkpoint or its end, while others wait for 21 s")


@pytest.mark.parametrize(
    "beats",
    [
        [],
        [Beat()],
        [process(19, 8), process(19, 7)],
        [process(99, 8, watched=False), process(99, 7, watched=False)],
        [process(99, 0, counted=False)],
        [process(0, 8), process(0, 7)],
        [process(99, 8), process(5, 7)],
    ],
)
def test_what_is_no_hang(beats):
    """Not begun, not long enough, at rest, not counted by this torch, at work, slow but moving."""
    assert look(*beats) is None


def test_a_short_timeout_is_no_reason_to_call_a_busy_machine_silent():
    assert find_hang({0: process(silent=9)}, NOW, 0.5) is None
    assert find_hang({0: process(silent=10)}, NOW, 0.5).rank == 0


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 3), st.booleans(), st.floats(0, 50)), max_size=6))
def test_who_is_named_is_still_silent_or_at_rest(states):
    beats = [process(still, count, silent, watched=watched) for still, count, watched, silent in states]
    hang = look(*beats)
    if hang is not None:
        named = beats[hang.rank]
        assert NOW - named.progress_at >= 20 or NOW - named.alive_at >= 20 or not named.watched
    assert hang or all(NOW - one.alive_at < 20 for one in beats if one.watched)


def test_a_beat_counts_what_the_training_thread_has_begun():
    first = compute_beat(Beat(), {"0": (5, 5), "1": (3, 2), "2": (9, 8)}, {"2"}, True, 1.0)
    assert (first.num_collectives, first.num_ended, first.counted, first.watched) == (8, 7, True, True)
    second = compute_beat(first, {"0": (5, 5), "1": (3, 2), "2": (10, 10)}, {"2"}, True, 1.0)
    assert second.progress_at == first.progress_at < second.alive_at
    third = compute_beat(second, {"0": (5, 5), "1": (3, 3)}, {"2"}, True, 1.0)
    assert third.progress_at == third.alive_at, "one has ended"
    fourth = compute_beat(third, {"0": (6, 5), "1": (3, 3)}, {"2"}, True, 1.0)
    assert fourth.progress_at == fourth.alive_at, "one has begun"


def test_after_a_rest_the_time_begins_anew():
    first = compute_beat(Beat(), {"0": (5, 5)}, (), True, 1.0)
    assert compute_beat(first, {"0": (5, 5)}, (), True, 2.0).progress_at > first.progress_at


def test_a_process_may_say_itself_that_it_goes_on():
    first = compute_beat(Beat(), {"0": (5, 5)}, (), True, 1.0)
    assert compute_beat(first, {"0": (5, 5)}, (), True, 1.0).progress_at == first.progress_at
    assert compute_beat(first, {"0": (5, 5)}, (), True, 1.5).progress_at > first.progress_at


def test_a_group_that_has_begun_nothing_and_a_torch_that_counts_nothing():
    assert compute_beat(Beat(), {"0": (-1, -1)}, (), True, 1.0).num_collectives == 0
    assert not compute_beat(Beat(), {}, (), True, 1.0).counted


@pytest.mark.parametrize(
    "answer", ["[]", '{"pg_status": {"0": {}}}', '{"pg_status": {"0": {"last_enqueued_collective": "x"}}}']
)
def test_a_torch_that_counts_in_other_words_is_not_counted(monkeypatch, answer):
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda collectives: answer.encode())
    monkeypatch.delattr(_distributed_c10d, "_dump_nccl_trace_json", raising=False)
    assert liveness._read_statuses() == {}


def test_what_a_process_writes_is_what_its_supervisor_reads(tmp_path, monkeypatch):
    monkeypatch.setenv(liveness.LIVENESS_ENV, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    statuses = {"0": (5, 4), "1": (0, 0)}
    monkeypatch.setattr(liveness, "_read_statuses", statuses.copy)
    monkeypatch.setattr(liveness, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "ALONE", 1.0)
    one = liveness.Liveness(lambda: statuses.update({"1": (3, 3)}), 60.0)
    assert not liveness.read_beat(tmp_path / "1").watched and liveness.read_beat(tmp_path / "0") == Beat()
    with one.mark_watched():
        begun = liveness.read_beat(tmp_path / "1")
        assert begun.watched and (begun.num_collectives, begun.num_ended) == (5, 4), "without the background's"
        deadline = time.monotonic() + 30.0
        while liveness.read_beat(tmp_path / "1").alive_at <= begun.alive_at:
            assert time.monotonic() < deadline, "it never beat again"
            time.sleep(0.01)
        time.sleep(0.1)  # longer than the watchdog waits for progress
        assert Watchdog(tmp_path, range(2, 4), 0.05).look().rank == 3
        with one.mark_resting():
            assert not liveness.read_beat(tmp_path / "1").watched
            assert Watchdog(tmp_path, range(2, 4), 0.05).look() is None
    assert not liveness.read_beat(tmp_path / "1").watched
    one.close()


def test_without_a_supervisor_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(liveness.LIVENESS_ENV, raising=False)
    with liveness.Liveness(lambda: None, 60.0).mark_watched():
        assert list(tmp_path.iterdir()) == []


def test_an_operation_that_is_noted_as_ended_late_does_not_make_its_group_the_background(monkeypatch):
    seen = iter([{"control": (3, 2), "background": (0, 0)}, {"control": (3, 3), "background": (1, 1)}])
    monkeypatch.setattr(liveness, "_read_statuses", lambda: next(seen))
    monkeypatch.delenv(liveness.LIVENESS_ENV, raising=False)
    assert liveness.Liveness(lambda: None, 8.0)._background == {"background"}
