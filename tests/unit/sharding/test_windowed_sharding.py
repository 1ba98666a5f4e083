"""A source in a window of time: what is in the dataset, and that a window that moves on encodes only what is new."""

import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.models.toy_task import ToyTask
from helpers.splits import open_split
from helpers.toy_data import shard_toy, toy_config
from PIL import Image

from kftrain.data.settings import DataConfig
from kftrain.errors import ConfigError, DataError, EmptyWindowError
from kftrain.sharding import mixing
from kftrain.sharding.parts.store import PartStore
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.sharding.sources.resolve_source import resolve
from kftrain.sharding.sources.windowed import RecordsInWindow
from kftrain.tasks import build_task

DAY_0 = datetime(2026, 11, 1, tzinfo=timezone.utc)


def at(days: float) -> str:
    return (DAY_0 + timedelta(days=days)).isoformat()


def window(start: float, end: float, by: str = "path", **more: str) -> dict[str, str]:
    return {"by": by, "start": at(start), "end": at(end), **more}


def write_day(folder: Path, day: int, num_files: int = 12) -> None:
    for number in range(num_files):
        path = folder / f"date={(DAY_0 + timedelta(days=day)).date()}" / f"doc-{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"day {day} document {number} " * (1 + number % 3))


def keys_of(result: Any) -> set[str]:
    return {key for split in ("train", "validation") for key in open_split(result.manifest_uri, split).group_keys()}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the files, or the keys of the records, of each part that is encoded."""
    found: list[list[str]] = []
    encode = PartStore.encode

    def counted(self: PartStore, source: Any, part: Any, progress: Any) -> Any:
        found.append([record.key for record in source.read(part)])
        return encode(self, source, part, progress)

    monkeypatch.setattr(PartStore, "encode", counted)
    return found


def test_a_window_that_moves_on_encodes_the_new_day_only(tmp_path, encoded):
    for day in range(9):
        write_day(tmp_path / "raw", day)
    for first in range(4):
        encoded.clear()
        result = shard_toy(
            tmp_path / "raw", tmp_path / "root", window=window(first, first + 5), part_size_bytes=1 << 16
        )
        days = {(DAY_0 + timedelta(days=day)).date().isoformat() for day in range(first, first + 5)}
        assert {key.split("/")[0].removeprefix("date=") for key in keys_of(result)} == days
        new = days if first == 0 else {max(days)}
        assert {key.split("/")[0].removeprefix("date=") for part in encoded for key in part} == new
        assert sum(map(len, encoded)) == 12 * len(new)


def test_unchanged_contents_are_used_again_whatever_the_window_is_called(tmp_path, encoded):
    for day in range(4):
        write_day(tmp_path / "raw", day)
    first = shard_toy(tmp_path / "raw", tmp_path / "root", window=window(0, 4))
    encoded.clear()
    later = shard_toy(tmp_path / "raw", tmp_path / "root", window=window(-3, 9))
    assert later.reused and later.dataset_digest == first.dataset_digest and not encoded
    assert later.manifest.source_listing_digest == first.manifest.source_listing_digest
    write_day(tmp_path / "raw", 6)
    assert not shard_toy(tmp_path / "raw", tmp_path / "root", window=window(-3, 9)).reused
    assert {key.split("/")[0] for part in encoded for key in part} == {"date=2026-11-07"}
    assert shard_toy(tmp_path / "raw", tmp_path / "root", window=window(0, 4)).reused


def test_a_dataset_does_not_depend_on_the_windows_before_it(tmp_path):
    for day in range(6):
        write_day(tmp_path / "raw", day)
    for first in (0, 1, 2):
        moved = shard_toy(tmp_path / "raw", tmp_path / "moving", window=window(first, first + 3))
    alone = shard_toy(tmp_path / "raw", tmp_path / "alone", window=window(2, 5))
    everything = shard_toy(tmp_path / "raw", tmp_path / "alone")
    assert moved.dataset_digest == alone.dataset_digest != everything.dataset_digest
    assert (
        shard_toy(tmp_path / "raw", tmp_path / "alone", window=window(0, 6)).dataset_digest != everything.dataset_digest
    )


def test_a_day_that_has_not_ended_belongs_to_the_next_window(tmp_path):
    for day in range(3):
        write_day(tmp_path / "raw", day)
    result = shard_toy(tmp_path / "raw", tmp_path / "root", window=window(0.125, 2.125))
    assert {key.split("/")[0] for key in keys_of(result)} == {"date=2026-11-01", "date=2026-11-02"}


def test_hours_are_partitions_of_their_own(tmp_path, encoded):
    for hour in range(24):
        path = tmp_path / "raw" / "date=2026-11-01" / f"hour={hour:02d}" / "a.txt"
        path.parent.mkdir(parents=True)
        path.write_text(f"hour {hour} " * 9)
    shard_toy(tmp_path / "raw", tmp_path / "root", window=window(0, 0.5), validation_fraction=0.4)
    encoded.clear()
    result = shard_toy(tmp_path / "raw", tmp_path / "root", window=window(1 / 24, 13 / 24), validation_fraction=0.4)
    assert encoded == [["date=2026-11-01/hour=12/a.txt"]]
    assert keys_of(result) == {f"date=2026-11-01/hour={hour:02d}/a.txt" for hour in range(1, 13)}


def test_an_empty_window_is_an_error_of_its_own(tmp_path):
    write_day(tmp_path / "raw", 0)
    (tmp_path / "empty").mkdir()
    for by in ("path", "modified"):
        with pytest.raises(EmptyWindowError, match="2026-11-11T00:00:00Z to 2026-11-12T00:00:00Z") as caught:
            shard_toy(tmp_path / "raw", tmp_path / "root", window=window(10, 11, by))
        assert caught.value.exit_code == 11
    with pytest.raises(DataError) as missing:
        shard_toy(tmp_path / "empty", tmp_path / "root", window=window(10, 11))
    assert not isinstance(missing.value, EmptyWindowError)


def test_a_path_without_a_date_is_refused_by_name(tmp_path):
    write_day(tmp_path / "raw", 0)
    (tmp_path / "raw" / "extra.txt").write_text("x")
    with pytest.raises(DataError, match=r"extra.txt: when it is of is not known"):
        shard_toy(tmp_path / "raw", tmp_path / "root", window=window(0, 1))


def test_files_are_chosen_by_when_they_were_written(tmp_path, encoded):
    """They are in order of time: what a moving window leaves behind is at one end, what is new at the other."""
    for number in range(60):
        path = tmp_path / "raw" / f"{hash_of(number)}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"document {number} " * 500)
        seconds = (DAY_0 + timedelta(days=number / 6)).timestamp()
        os.utime(path, (seconds, seconds))
    first = shard_toy(tmp_path / "raw", tmp_path / "root", window=window(0, 8, "modified"), part_size_bytes=1 << 16)
    assert keys_of(first) == {f"{hash_of(number)}.txt" for number in range(48)}
    num_before = sum(map(len, encoded))
    encoded.clear()
    second = shard_toy(tmp_path / "raw", tmp_path / "root", window=window(1, 9, "modified"), part_size_bytes=1 << 16)
    assert keys_of(second) == {f"{hash_of(number)}.txt" for number in range(6, 54)}
    assert num_before == 48 and 6 <= sum(map(len, encoded)) < 30


def hash_of(number: int) -> str:
    return f"{(number * 7919) % 997:03d}"


def test_objects_of_a_store_have_times_too():
    files = fsspec.filesystem("memory")
    for number in range(20):
        files.pipe(f"/windowed/raw/{number}.txt", b"text %d" % number)
    now = datetime.now(timezone.utc)
    near = {
        "by": "modified",
        "start": (now - timedelta(hours=1)).isoformat(),
        "end": (now + timedelta(hours=1)).isoformat(),
    }
    data = DataConfig.model_validate({"source": "memory://windowed/raw", "window": near})
    assert len(list(resolve(data).records())) == 20
    past = DataConfig.model_validate({"source": "memory://windowed/raw", "window": window(0, 1, "modified")})
    with pytest.raises(EmptyWindowError):
        resolve(past).listing()
    files.rm("/windowed", recursive=True)


def write_lines(folder: Path, name: str, days: list[float]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"{name} {number} " * 200, "at": at(day)}) for number, day in enumerate(days)]
    (folder / name).write_text("\n".join(lines) + "\n")


def test_records_are_chosen_by_a_column_and_encoded_once(tmp_path, encoded):
    """One file a day with 20 records over it; the window moves by half a day, so that it cuts files at both ends."""
    for day in range(6):
        write_lines(tmp_path / "raw", f"{day}.jsonl", [day + number / 20 for number in range(20)])
    sizes = {"part_size_bytes": 1 << 16, "validation_fraction": 0.3, "key": "at"}

    def sharded(start: float, end: float) -> set[str]:
        encoded.clear()
        result = shard_toy(
            tmp_path / "raw", tmp_path / "root", window=window(start, end, "column", column="at"), **sizes
        )
        return keys_of(result)

    def between(start: float, end: float) -> set[str]:
        return {at(day + number / 20) for day in range(6) for number in range(20) if start <= day + number / 20 < end}

    assert sharded(0, 3) == between(0, 3) and sum(map(len, encoded)) == 60
    assert sharded(0.5, 3.5) == between(0.5, 3.5) and sum(map(len, encoded)) == 20, "both ends, each half a day"
    assert sharded(1, 4) == between(1, 4) and sum(map(len, encoded)) == 20, "the day that was cut before"
    assert sharded(2, 4) == between(2, 4) and not encoded
    with pytest.raises(EmptyWindowError):
        sharded(9, 10)
    with pytest.raises(EmptyWindowError):
        sharded(2.96, 2.99)
    shard_toy(tmp_path / "raw", tmp_path / "root", **sizes)
    assert sum(map(len, encoded)) == 40, "what lay in a window as a whole is the same without one"


def test_the_times_of_a_part_are_read_once(tmp_path, monkeypatch):
    for day in range(4):
        write_lines(tmp_path / "raw", f"{day}.jsonl", [day + number / 20 for number in range(20)])
    looked: list[object] = []
    seen = RecordsInWindow._read_times_of
    monkeypatch.setattr(RecordsInWindow, "_read_times_of", lambda self, part: looked.append(part) or seen(self, part))
    settings = {"part_size_bytes": 1 << 16}
    shard_toy(tmp_path / "raw", tmp_path / "root", window=window(0, 2, "column", column="at"), **settings)
    num_parts = len(looked)
    shard_toy(tmp_path / "raw", tmp_path / "root", window=window(1, 3, "column", column="at"), **settings)
    assert len(looked) == num_parts > 1
    for path in (tmp_path / "root" / "shards" / "times").iterdir():
        path.write_text('{"times": ["yesterday"]}')
    shard_toy(tmp_path / "raw", tmp_path / "root", window=window(1, 4, "column", column="at"), **settings)
    assert len(looked) == 2 * num_parts


def users_records():
    """Twenty records, each a quarter of a day after the one before, as numbers of seconds."""
    for number in range(20):
        yield f"r{number}", {"text": b"x", "at": (DAY_0 + timedelta(days=number / 4)).timestamp()}


def test_records_of_a_users_source_have_columns(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    source = f"{__name__}:users_records"
    settings = window(2, 3, "column", column="at", number_unit="seconds")
    assert [record.key for record in resolve(data_of(source, settings)).records()] == ["r8", "r9", "r10", "r11"]


def test_rows_of_a_saved_dataset_have_columns(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"text": ["x"] * 20, "at": [at(number / 4) for number in range(20)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    found = resolve(data_of(tmp_path / "saved", window(2, 3, "column", column="at"))).records()
    assert [record.key for record in found] == ["8", "9", "10", "11"]


def test_rows_of_a_table_have_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    moments = [DAY_0 + timedelta(days=number / 4) for number in range(40)]
    for name, kind in (("aware", pyarrow.timestamp("ns", "UTC")), ("naive", pyarrow.timestamp("us"))):
        at_column = (
            pyarrow.array([each.replace(tzinfo=None) for each in moments]).cast(pyarrow.timestamp("us")).cast(kind)
        )
        parquet.write_table(pyarrow.table({"text": ["x"] * 40, "at": at_column}), tmp_path / f"{name}.parquet")

    def rows(name: str, **more: str) -> list[str]:
        settings = window(2, 3, "column", column="at", **more)
        return [record.key for record in resolve(data_of(tmp_path / f"{name}.parquet", settings)).records()]

    assert rows("aware") == [f"aware.parquet:{number}" for number in range(9, 13)]
    with pytest.raises(DataError, match=r"without a time zone: set data.window.time_zone"):
        rows("naive")
    assert rows("naive", time_zone="UTC") == [f"naive.parquet:{number}" for number in range(9, 13)]


def data_of(source: object, settings: dict[str, str]) -> DataConfig:
    return DataConfig.model_validate({"source": str(source), "window": settings})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"text": "x"}, "the record has no such column"),
        ({"text": "x", "at": None}, "NoneType instead of a time"),
        ({"text": "x", "at": "soon"}, "'soon' is no time as in ISO 8601"),
        ({"text": "x", "at": 5}, "of no known unit"),
        ({"text": "x", "at": "2026-11-01"}, "without a time zone"),
    ],
)
def test_a_record_of_no_known_time_is_refused_with_its_line(tmp_path, line, said):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "y", "at": at(0)}) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2") as caught:
        list(resolve(data_of(tmp_path / "a.jsonl", window(0, 1, "column", column="at"))).records())
    assert said in caught.value.line


def test_a_source_without_files_has_no_paths():
    for by in ("path", "modified"):
        with pytest.raises(ConfigError, match="its records are in no files"):
            resolve(data_of("digits", window(0, 1, by)))


def test_classes_keep_their_numbers_while_the_window_moves(tmp_path):
    for day, names in enumerate((["ant", "bee"], ["bee", "cat"], ["ant", "cat"])):
        for name in names:
            path = tmp_path / "raw" / f"date={(DAY_0 + timedelta(days=day)).date()}" / name / "1.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(np.zeros((4, 4), np.uint8)).save(path)
    found = {}
    for day in range(3):
        for record in resolve(data_of(tmp_path / "raw", window(day, day + 1))).records():
            found[record.key.split("/", 1)[1], day] = record.fields["label"]
    assert found == {
        **{("ant/1.png", 0): 0, ("bee/1.png", 0): 1},
        **{("bee/1.png", 1): 1, ("cat/1.png", 1): 2},
        **{("ant/1.png", 2): 0, ("cat/1.png", 2): 2},
    }


def test_a_window_holds_for_the_components_that_want_it(tmp_path):
    for day in range(4):
        write_day(tmp_path / "raw", day)
        write_day(tmp_path / "base", day)
    parts = [
        {"name": "new", "source": str(tmp_path / "raw")},
        {"name": "base", "source": str(tmp_path / "base"), "windowed": False},
    ]
    config = toy_config("stdlib", tmp_path / "root", mixture=parts, window=window(2, 4))
    result = mixing.shard_mixture(config, ToyTask(), lambda line: None)
    days = {}
    for key in keys_of(result):
        days.setdefault(key.split("/")[0], set()).add(key.split("/")[1])
    assert sorted(days["new"]) == ["date=2026-11-03", "date=2026-11-04"] and len(days["base"]) == 4


def test_parts_are_encoded_by_several_processes_in_a_window_too(tmp_path):
    for day in range(3):
        write_lines(tmp_path / "raw", f"{day}.jsonl", [day + number / 20 for number in range(20)])
    moving = window(0.5, 2.5, "column", column="at")

    def digest(processes: int) -> str:
        settings = {"window": moving, "processes": processes, "part_size_bytes": 1 << 16, "validation_fraction": 0.3}
        config = toy_config(tmp_path / "raw", tmp_path / f"root-{processes}", **settings)
        return shard_dataset(config, build_task(config.task), lambda line: None).dataset_digest

    assert digest(1) == digest(2)
