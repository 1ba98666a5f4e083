"""Which window a run of a schedule reads, and what it leaves to the next one."""

import itertools
import json
from datetime import datetime, timedelta, timezone

import fsspec
import pytest

from kftrain import config as configuration
from kftrain.core import storage
from kftrain.core.records import parse_number
from kftrain.errors import DataError
from kftrain.run.paths import RunPaths
from kftrain.run.watermark import find_watermark, move_watermark, read_names, read_watermark
from kftrain.schedule import cron
from kftrain.schedule.settings import Policy
from kftrain.sharding.sources import resolve_source
from kftrain.stages import firing, windows

UTC = timezone.utc
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
BERLIN = cron.load_zone("Europe/Berlin")
FOLDER = "memory://watermarks/root/schedules/nightly/watermarks"


@pytest.fixture(autouse=True)
def no_documents():
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"])
@pytest.mark.parametrize("time", ["0 0 2", "0 30 2", "0 30 1", "0 0 3", "0 0 0", "0 15 2,14"])
def test_days_of_a_daily_schedule_follow_each_other_over_changes_of_the_clock(zone, time):
    text, place = f"{time} * * *", cron.load_zone(zone)
    due = cron.list_instants(cron.parse_cron(text), place, FIRST, FIRST + 400 * DAY)
    num_a_day = len(cron.parse_cron(text).hours)
    for days in (1, 7):
        schedule = Policy(cron=text, time_zone=zone, window_hours=24 * days, settle_hours=5)
        found = [windows.scheduled_window(schedule, instant, ()) for instant in due]
        ends = [window.end for window in found]
        assert [window.start for window in found[days * num_a_day :]] == ends[: -days * num_a_day]
        assert ends == [instant - 5 * HOUR for instant in due]


def test_hours_beyond_whole_days_are_hours_of_any_clock():
    due = datetime(2026, 3, 29, 22, tzinfo=UTC)  # midnight in Berlin, after a day of 23 hours
    schedule = Policy(cron="0 0 0 * * *", time_zone="Europe/Berlin", window_hours=30)
    assert windows.scheduled_window(schedule, due, ()).start == due - 23 * HOUR - 6 * HOUR
    hours = Policy(cron="0 0 0 * * *", time_zone="Europe/Berlin", window_hours=23)
    assert windows.scheduled_window(hours, due, ()).start == due - 23 * HOUR


def test_a_window_since_the_last_training_is_bounded_and_never_goes_back():
    schedule = Policy(cron="0 0 0 * * *", settle_hours=2, max_window_hours=30, window_start="2026-01-01T00:00:00Z")
    ends, found = [], []
    for _ in range(4):
        window = windows.scheduled_window(schedule, FIRST + 3 * DAY, ends)
        found.append(window and (window.start - FIRST, window.end - FIRST))
        ends = [window.end] if window else ends
    assert found == [(0 * HOUR, 30 * HOUR), (30 * HOUR, 60 * HOUR), (60 * HOUR, 70 * HOUR), None]
    assert windows.scheduled_window(schedule, FIRST + DAY, ends) is None
    last = Policy(cron="0 0 0 * * *", max_window_hours=100_000, window_start="8999-12-31T00:00:00Z")
    assert windows.scheduled_window(last, FIRST, ()) is None
    everything = windows.scheduled_window(Policy(cron="0 0 0 * * *", max_window_hours=30), FIRST, ())
    assert everything.start.year == 1 and everything.end == FIRST


def test_of_runs_that_begin_at_one_watermark_one_moves_it_and_its_second_try_changes_nothing():
    uri = find_watermark(FOLDER, "run-1")
    assert parse_number(uri) == 0 and not read_names(uri, "a")
    assert move_watermark(uri, {"a": "2026-01-02T00:00:00Z"}, {"a": ["x"]}, "run-1")
    before = storage.read_bytes(f"{FOLDER}/1.json")
    assert move_watermark(uri, {"a": "2026-01-02T00:00:00Z"}, {"a": ["x"]}, "run-1")
    assert not move_watermark(uri, {"a": "2026-01-09T00:00:00Z"}, {"a": ["y"]}, "run-2")
    assert storage.read_bytes(f"{FOLDER}/1.json") == before and storage.list_names(FOLDER) == ["1.json"]
    assert parse_number(find_watermark(FOLDER, "run-1")) == 0, "a pod that runs again reads the window that it has read"
    assert parse_number(find_watermark(FOLDER, "run-2")) == 1


def test_all_files_are_found_in_as_many_entries_as_the_number_has_bits(monkeypatch):
    for number in range(100):
        uri = f"{FOLDER}/{number}.json"
        assert move_watermark(uri, {"a": str(number), f"b{number % 3}": ""}, {f"s{number % 2}": [str(number)]}, "r")
        if number == 50:
            written = sum(
                len(each) for n in range(1, 51) for each in read_watermark(f"{FOLDER}/{n}.json").files.values()
            )
            assert written < 50 * 4
    last = find_watermark(FOLDER, "")
    assert set(read_watermark(last).ends) == {"a", "b0", "b1", "b2"}
    reads = []
    read = storage.read_bytes
    monkeypatch.setattr(storage, "read_bytes", lambda uri: reads.append(uri) or read(uri))
    assert read_names(last, "s0") == {str(number) for number in range(0, 100, 2)}
    assert len(reads) == (100).bit_count()


CONFIG = """
run: {{name: tiny, storage_root: "memory://watermarks/root"}}
data: {{source: "{source}", window: {{by: {by}}}}}
schedule: {{name: nightly, cron: "0 0 2 * * *"{more}}}
"""


def begun(job, created, more="", **changes):
    own = configuration.parse(CONFIG.format(source="/raw", by="path", more=more))
    own = own.model_copy(update={"schedule": own.schedule.model_copy(update=changes)})
    return firing.begin(own, RunPaths.of(own.run.storage_root, f"tiny-{job}"), job, created, False, lambda line: None)


def end(job, config, error=None):
    firing.end_firing(config, RunPaths.of(config.run.storage_root, f"tiny-{job}"), job, error, lambda line: None)


def test_what_people_run_for_an_instant_of_theirs_moves_nothing():
    for trigger in ("manual", "backfill"):
        own = begun(trigger, "2026-05-01T12:00:00Z", trigger=trigger, instant="2026-03-01T02:00:00Z").config
        window = own.data.window
        assert (window.start, window.end) == ("2026-02-28T02:00:00Z", "2026-03-01T02:00:00Z")
        end(trigger, own)
        assert window.watermark == "" and not storage.list_names(FOLDER)
    first = begun("a", "2026-05-01T12:00:00Z", trigger="manual").config
    assert first.data.window.watermark == f"{FOLDER}/0.json"
    end("a", first)
    paths = RunPaths.of(first.run.storage_root, "tiny-c")
    copied = firing.begin(first, paths, "c", "2026-05-01T12:00:00Z", False, print).config
    assert copied.data.window == first.data.window.model_copy(update={"watermark": "", "late_from": ""})
    end("c", copied)
    assert begun("b", "2026-05-01T13:00:00Z").skipped.why == "empty"
    assert storage.list_names(FOLDER) == ["1.json"]


def test_an_old_run_that_somebody_goes_on_with_moves_nothing_and_the_current_one_does():
    old = begun("a", "2026-05-01T02:00:10Z").config
    end("a", old, error_of())
    new = begun("b", "2026-05-02T02:00:10Z").config
    assert new.data.window.watermark == old.data.window.watermark == f"{FOLDER}/0.json"
    end("b", new)
    ends = read_watermark(f"{FOLDER}/1.json").ends
    resumed = firing.begin(
        old, RunPaths("memory://watermarks/root/runs/tiny-a"), "c", "2026-05-03T00:00:00Z", True, print
    )
    assert resumed.config.data == old.data
    end("c", resumed.config)
    assert storage.list_names(FOLDER) == ["1.json"] and read_watermark(f"{FOLDER}/1.json").ends == ends
    assert begun("d", "2026-05-03T02:00:10Z").config.data.window.start == "2026-05-02T02:00:00Z"


def test_the_window_of_a_run_that_was_skipped_beside_another_is_in_the_next_one():
    first = begun("a", "2026-05-01T02:00:10Z").config
    alive = RunPaths.of(first.run.storage_root, "tiny-a").launcher
    storage.publish_json(alive, {"sequence": 1, "time": datetime(2026, 5, 2, 2, tzinfo=UTC).timestamp()})
    second = begun("b", "2026-05-02T02:00:10Z")
    assert second.skipped.why == "overlap"
    firing.leave_skipped(RunPaths.of(first.run.storage_root, "tiny-b"), second, second.skipped, "b", print)
    end("a", first)
    window = begun("c", "2026-05-03T02:00:10Z").config.data.window
    assert (window.start, window.end) == ("2026-05-01T02:00:00Z", "2026-05-03T02:00:00Z")


def error_of():
    from kftrain.run.error import summarize_failure

    return summarize_failure("train", DataError("no"))


@pytest.mark.parametrize("broken", ["create_json", "list_names"])
def test_a_training_whose_end_could_not_be_written_is_trained_once(monkeypatch, broken):
    first = begun("a", "2026-05-01T02:00:10Z").config
    paths = RunPaths.of(first.run.storage_root, "tiny-a")
    storage.publish_json(paths.registration, {})
    storage.publish(paths.config, first.to_yaml())
    storage.publish_json(
        f"{paths.uri}/firing.json",
        {"schema_version": 1, "schedule": "nightly", "key": "k", "job_id": "a", "identity": "i"},
    )
    with monkeypatch.context() as patched:
        patched.setattr(storage, broken, lambda *arguments: (_ for _ in ()).throw(OSError("away")))
        end("a", first)
    assert begun("b", "2026-05-02T02:00:10Z").config.data.window.start == "2026-05-01T02:00:00Z"
    assert parse_number(find_watermark(FOLDER, "")) == 1


def test_an_empty_window_that_is_bounded_is_left_behind_and_another_one_is_not():
    for more, start in (("", "2026-01-01T00:00:00Z"), (", max_window_hours: 24", "2026-01-02T00:00:00Z")):
        fsspec.filesystem("memory").store.clear()
        more += ", window_start: '2026-01-01T00:00:00Z'"
        own = begun("a", "2026-05-01T02:00:10Z", more).config
        paths = RunPaths.of(own.run.storage_root, "tiny-a")
        firing.leave_skipped(
            paths, firing.Begun(own, "20260501T020000Z"), firing.Skipped(why="empty", line=""), "a", print
        )
        end("a", own)
        assert begun("b", "2026-05-02T02:00:10Z", more).config.data.window.start == start


def write_lines(path, *hours):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": f"{path.stem} {hour}", "at": (FIRST + hour * HOUR).isoformat()}) for hour in hours]
    path.write_text("".join(f"{line}\n" for line in lines))


def test_records_by_column_are_read_once_and_late_ones_in_new_files_with_the_next_window(tmp_path):
    """What is appended to a file that was read before is read where it lies in the window, and not where it is late."""
    raw, uri, seen, start = tmp_path / "raw", f"{tmp_path}/root/watermarks/0.json", [], None
    text = CONFIG.format(source=raw, by="column, column: at", more="")
    own = configuration.parse(text).data
    write_lines(raw / "a.jsonl", 1, 5, 11, 20)
    write_lines(raw / "b.jsonl", 2, 3)
    steps = [
        lambda: None,
        lambda: (write_lines(raw / "late.jsonl", 4, 9, 12, 25), write_lines(raw / "c.jsonl", 13)),
        lambda: write_lines(raw / "a.jsonl", 1, 5, 11, 20, 21, 3),
    ]
    for number, step in enumerate(steps):
        step()
        end_of_window = windows.utc_text(FIRST + (number + 1) * 10 * HOUR)
        changes = {"start": start or "0001-01-02T00:00:00Z", "end": end_of_window, "watermark": uri}
        placed = own.window.model_copy(update={**changes, "late_from": "0001-01-02T00:00:00Z"})
        data = own.model_copy(update={"window": placed})
        source = resolve_source.open_kind(resolve_source.source_kind(data), data, f"{tmp_path}/times")
        listing, lines = source.listing(), []
        files = windows.find_new_files(placed, {data.source: listing}, lines.append)
        seen.append(sorted(record.fields["text"].decode() for record in source.records()))
        assert move_watermark(uri, {data.source: end_of_window}, files.files, f"run-{number}")
        uri, start = f"{tmp_path}/root/watermarks/{number + 1}.json", end_of_window
        assert bool(lines) == (number == 1)
    assert "2 files are read for the first time" in lines[0] if lines else True
    assert seen == [
        ["a 1", "a 5", "b 2", "b 3"],
        ["a 11", "c 13", "late 12", "late 4", "late 9"],
        ["a 20", "a 21", "late 25"],
    ]
    assert not set.intersection(*map(set, itertools.islice(seen, 2)))
