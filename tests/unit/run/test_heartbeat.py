import threading
import time

import pytest
from botocore.exceptions import ClientError

from kftrain.core import outages, storage
from kftrain.run import heartbeat
from kftrain.run.heartbeat import Heartbeat, LauncherWatch, Silence
from kftrain.run.paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    return RunPaths.of(str(tmp_path), "r")


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def sequence(paths):
    found = storage.read_json_if_exists(paths.launcher)
    return found["sequence"] if found else 0


def test_a_launcher_beats_at_once_and_its_last_beat_stays(paths):
    with Heartbeat(paths, interval_seconds=3600):
        until(lambda: sequence(paths) == 1)
    found = storage.read_json(paths.launcher)
    assert found.keys() == {"sequence", "host", "time"} and found["host"]


def test_it_beats_at_every_interval_and_not_after_the_end(paths):
    with Heartbeat(paths, interval_seconds=0.01):
        until(lambda: sequence(paths) >= 3)
    last = storage.read_bytes(paths.launcher)
    time.sleep(0.1)
    assert storage.read_bytes(paths.launcher) == last


def test_a_beat_that_begins_when_the_block_ends_is_waited_for(paths, monkeypatch):
    begin = Heartbeat._replace_hanging
    monkeypatch.setattr(Heartbeat, "_replace_hanging", lambda self: self._ended.wait() and begin(self))
    with Heartbeat(paths):
        pass
    assert storage.exists(paths.launcher)


def test_a_write_that_fails_is_said_and_tried_again(paths, monkeypatch, capsys):
    failures = [OSError("no route to the store"), ClientError({"Error": {"Code": "InvalidArgument"}}, "PutObject")]
    publish = storage.publish_json

    def sometimes(uri, document):
        if failures:
            raise failures.pop(0)
        publish(uri, document)

    monkeypatch.setattr(storage, "publish_json", sometimes)
    with Heartbeat(paths, interval_seconds=0.01):
        until(lambda: sequence(paths) >= 3)
    assert "heartbeat could not be written: OSError: no route to the store" in capsys.readouterr().out


def test_a_call_that_hangs_does_not_stop_the_heart(paths, monkeypatch):
    """As a mount whose server is gone does, and storage that has no deadline."""
    back, publish, hanging = threading.Event(), storage.publish_json, []

    def held(uri, document):
        if document["sequence"] <= 2:
            hanging.append(document["sequence"])
            back.wait()
        publish(uri, document)

    monkeypatch.setattr(storage, "publish_json", held)
    with Heartbeat(paths, interval_seconds=0.01):
        until(lambda: sequence(paths) >= 5)
        assert hanging == [1, 2]
        back.set()


def test_a_dead_mount_does_not_gather_threads_for_ever(paths, monkeypatch):
    back, calls = threading.Event(), []
    monkeypatch.setattr(storage, "publish_json", lambda uri, document: (calls.append(uri), back.wait()))
    with Heartbeat(paths, interval_seconds=0.01):
        until(lambda: len(calls) == heartbeat.MAX_HANGING)
        time.sleep(0.2)
        back.set()
        assert len(calls) == heartbeat.MAX_HANGING


def test_a_beat_does_not_ride_an_outage_out(paths, monkeypatch, capsys):
    """The next one does, at its time: the content has to change."""
    seen = []
    monkeypatch.setattr(storage, "publish_json", lambda uri, document: seen.append(outages.is_hurried()))
    with Heartbeat(paths, interval_seconds=3600):
        until(lambda: seen)
    assert seen == [True]


def test_leaving_the_block_does_not_wait_for_the_interval_and_passes_errors(paths):
    start = time.monotonic()
    with pytest.raises(KeyError), Heartbeat(paths, interval_seconds=3600):
        raise KeyError
    assert time.monotonic() - start < 300


def seen(looks):
    """The silence after looks at whole seconds: contents in order, None where reading failed."""
    silence = Silence()
    for second, content in enumerate(looks):
        silence = silence.advance(content, float(second), float(second))
    return silence.seconds


@pytest.mark.parametrize(
    ("looks", "seconds"),
    [
        ([b"1"], 0),
        ([b"1", b"1", b"1"], 2),
        ([b"1", b"1", b"2"], 0),
        ([b"1", b"2", b"2", b"2"], 2),
        ([b"", b"", b""], 2),  # it never wrote
        ([b"1", b"1", b"", b""], 1),  # somebody deleted it: a change, then silence
        ([b"1", None, None, None, b"1"], 0),  # storage was down: nobody knows
        ([b"1", b"1", None, None, b"1", b"1"], 2),
        ([b"1", b"1", None, b"2", b"2"], 1),
        ([None, None, None], 0),
    ],
)
def test_silence_is_the_time_in_which_the_content_was_read_and_did_not_change(looks, seconds):
    assert seen(looks) == seconds


def test_the_time_that_a_look_takes_is_no_silence():
    """A mount that hung for an hour shows what the launcher wrote before."""
    before = Silence().advance(b"1", 0.0, 0.0)
    assert before.advance(b"1", 10.0, 3610.0).seconds == 10.0
    assert before.advance(b"1", 10.0, 3610.0).advance(b"1", 3620.0, 3620.0).seconds == 20.0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_watch_reports_a_launcher_that_is_silent_for_the_timeout(paths):
    clock = Clock()
    watch = LauncherWatch(paths, 100.0, clock)
    storage.publish_json(paths.launcher, {"sequence": 1})

    def after(seconds):
        """What the last of the looks says, one a second."""
        for _ in range(seconds):
            clock.now += 1.0
            silent = watch.poll()
        return silent

    assert not watch.poll()
    assert [after(60), after(39)] == [False, False]
    storage.publish_json(paths.launcher, {"sequence": 2})
    assert [after(1), after(60), after(39), after(1)] == [False, False, False, True]
    assert watch.interval_seconds == 100.0 / heartbeat.LOOKS_PER_TIMEOUT


def test_storage_that_is_down_never_ends_a_training(paths, monkeypatch, capsys):
    clock = Clock()
    watch = LauncherWatch(paths, 100.0, clock)

    def down(uri):
        raise ConnectionError("the store does not answer")

    storage.publish_json(paths.launcher, {"sequence": 1})
    assert not watch.poll()
    with monkeypatch.context() as patched:
        patched.setattr(storage, "read_bytes", down)
        for _ in range(5):
            clock.now += 1000.0
            assert not watch.poll()
    clock.now += 1000.0
    assert not watch.poll()
    assert (
        "could not be read: storage cannot be reached: ConnectionError: the store does not answer"
        in capsys.readouterr().out
    )
    for second in range(100):
        clock.now += 1.0
        assert watch.poll() is (second == 99)


def test_a_watch_that_was_held_up_counts_none_of_that(paths):
    """A machine that was paused for hours goes on: its launcher has not beaten either."""
    clock = Clock()
    watch = LauncherWatch(paths, 100.0, clock)
    storage.publish_json(paths.launcher, {"sequence": 1})
    assert not watch.poll()
    for _ in range(9):
        clock.now += 3600.0
        assert not watch.poll()
    clock.now += 3600.0
    assert watch.poll(), "each look counts as two intervals: one that is always late is not without end"
