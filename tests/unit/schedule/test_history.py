"""What a schedule decides by: all of its firings, at a cost that does not grow with their number."""

from collections import Counter
from datetime import datetime, timedelta, timezone

import fsspec
import pytest

from kftrain import config as configuration
from kftrain.core import storage
from kftrain.core.remote import RemotePath
from kftrain.run.paths import RunPaths
from kftrain.schedule.settings import format_instant
from kftrain.schedule.state import Firing, FiringEnd, History, build_key
from kftrain.stages import firing

ROOT = "memory://history/root"
HOUR = timedelta(hours=1)
FIRST = datetime(2026, 1, 1, tzinfo=timezone.utc)
CONFIG = configuration.parse(f"""
run: {{name: tiny, storage_root: "{ROOT}"}}
schedule: {{name: hourly, cron: "0 0 * * * *"}}
""")
HISTORY = History.of(ROOT, "hourly")


@pytest.fixture(autouse=True)
def no_documents():
    yield
    fsspec.filesystem("memory").store.clear()


def paths(number):
    return RunPaths.of(ROOT, f"tiny-j{number}")


def begin(number, lines=None):
    """The first step of the run of an hour."""
    created = format_instant(FIRST + number * HOUR)
    return firing.begin(CONFIG, paths(number), f"j{number}", created, False, ([] if lines is None else lines).append)


def key(number):
    return build_key(FIRST + number * HOUR, FIRST, "cron", "")


def ended(number, result, identity=""):
    time, job = (FIRST + number * HOUR).timestamp(), f"j{number}"
    return FiringEnd(result=result, line="", job_id=job, run_uri=paths(number).uri, time=time, identity=identity)


def end(number, result, identity=""):
    return HISTORY.write_end(key(number), ended(number, result, identity))


def write_old(numbers, results):
    """Firings and outcomes as releases before left them: without an index. A result of None: it has not ended."""
    for number in numbers:
        instant = format_instant(FIRST + number * HOUR)
        own = Firing(instant=instant, trigger="cron", job_id=f"j{number}", run_uri=paths(number).uri, created=0.0)
        storage.publish_json(f"{HISTORY.uri}/firings/{key(number)}.json", own.to_dict())
        result = results.get(number, "skipped")
        if result:
            storage.publish_json(f"{HISTORY.uri}/outcomes/{key(number)}.json", ended(number, result).to_dict())


def beat(number, hour):
    """A sign of life of a run, in an hour."""
    storage.publish_json(paths(number).launcher, {"sequence": hour, "time": (FIRST + hour * HOUR).timestamp()})


def test_no_firing_trains_beside_a_run_that_lives_however_many_came_since():
    assert begin(0).skipped is None
    for number in range(1, 120):
        beat(0, number)
        assert begin(number).skipped.why == "overlap", number
        end(number, "skipped")
    end(0, "trained")
    assert begin(120).skipped is None


def test_what_was_trained_last_is_known_however_many_were_skipped_since():
    begin(0)
    end(0, "trained", "same")
    for number in range(1, 120):
        begin(number)
        assert HISTORY.read_last_trained().identity == "same", number
        end(number, "skipped")
    begin(120)
    end(120, "trained", "other")
    assert HISTORY.read_last_trained().identity == "other"


def test_failures_in_a_row_are_counted_over_any_number_of_skipped_runs():
    for number in range(150):
        begin(number)
        end(number, "failed" if number % 70 == 1 else "skipped")
    assert HISTORY.count_failures_in_a_row() == 3
    assert HISTORY.add_event("paused", "by hand")
    assert HISTORY.add_event("resumed", "by hand", (FIRST + 100 * HOUR).timestamp())
    assert HISTORY.count_failures_in_a_row() == 1
    begin(150)
    end(150, "trained")
    assert HISTORY.count_failures_in_a_row() == 0


def test_a_run_that_ends_after_many_others_is_found_by_its_job():
    begin(0)
    for number in range(1, 70):
        begin(number)
        end(number, "skipped")
    assert HISTORY.find_key("j0") == key(0)


def test_a_folder_of_a_release_before_gets_its_index_once():
    write_old(range(200), {0: None, 3: "failed", 5: "trained", 60: "failed", 190: "failed"})
    assert list(HISTORY.read_unended()) == [key(0)]
    assert HISTORY.read_last_trained().job_id == "j5" and HISTORY.count_failures_in_a_row() == 2
    beat(0, 200)
    assert begin(200).skipped.why == "overlap"
    assert len(storage.list_names(f"{HISTORY.uri}/results")) == 195, "what came since the last training"


def test_firings_of_a_release_before_are_seen_beside_an_index_whenever_they_come():
    begin(0)
    end(0, "trained")
    write_old(range(1, 5), {1: "trained", 2: "failed", 4: None})
    assert HISTORY.read_last_trained().job_id == "j1" and HISTORY.count_failures_in_a_row() == 1
    assert list(HISTORY.read_unended()) == [key(4)]
    write_old([7], {})
    assert HISTORY.count_failures_in_a_row() == 1
    write_old([6], {6: "failed"})
    assert HISTORY.count_failures_in_a_row() == 2, "of an instant before those that are known"
    write_old([4], {4: "trained"})
    assert HISTORY.read_last_trained().job_id == "j4" and HISTORY.count_failures_in_a_row() == 1


@pytest.mark.parametrize("result", ["trained", "failed", "skipped"])
def test_an_end_that_the_index_lacks_is_put_into_it_by_whoever_comes_next(monkeypatch, result):
    begin(0)
    end(0, "failed")
    begin(1)
    end(1, result)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "publish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            HISTORY.count_failures_in_a_row()
    begin(2)
    assert list(HISTORY.read_unended()) == [key(2)]
    assert (HISTORY.read_last_trained() is None) == (result != "trained")
    assert HISTORY.count_failures_in_a_row() == {"trained": 0, "failed": 2, "skipped": 1}[result]
    assert not end(1, "canceled") and begin(2).skipped is None


def test_a_decision_costs_the_same_after_ten_firings_and_after_a_thousand(monkeypatch):
    asked, costs, call = Counter(), [], RemotePath._call
    monkeypatch.setattr(RemotePath, "_call", lambda *args, **kw: asked.update([args[1]]) or call(*args, **kw))
    for count in (10, 1000):
        fsspec.filesystem("memory").store.clear()
        write_old(range(count), {0: "trained"})
        begin(count)
        end(count, "skipped")
        HISTORY.read_last_trained()
        asked.clear()
        assert begin(count + 1).skipped is None
        assert HISTORY.read_last_trained().job_id == "j0"
        end(count + 1, "failed")
        assert HISTORY.count_failures_in_a_row() == 1
        costs.append(Counter(asked))
    assert costs[0] == costs[1] and 10 < costs[0].total() < 60, costs
