"""Which files of a folder are data, what is said of the others, and what shows that a file has changed."""

import json
import os
from pathlib import Path

import fsspec
import pytest
from helpers.models.toy_task import ToyTask
from helpers.source_checks import records, resolve
from helpers.toy_data import shard_toy, toy_config
from PIL import Image

from kftrain.core import storage
from kftrain.errors import DataError, EmptyWindowError
from kftrain.sharding.parts.store import PartStore
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.sharding.sources.listing import list_files

DAY = {"by": "path", "start": "2026-11-01T00:00:00Z", "end": "2026-11-04T00:00:00Z"}


def write(folder: Path, *names: str, text: str = "") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"text": text or name}) + "\n"
        path.write_text(line if ".jsonl" in name else text or name)


SPARK = ("a.jsonl", "_SUCCESS", "_temporary/0/task_3/part-0.jsonl", "sub/_temporary/0/b.jsonl", "_b.jsonl", ".c.jsonl")


def test_what_spark_hides_is_no_data_here_and_in_a_store(tmp_path):
    write(tmp_path, *SPARK)
    assert [record.key for record in records(tmp_path)] == ["a.jsonl:1"]
    store = fsspec.filesystem("memory")
    try:
        for name in SPARK:
            store.pipe_file(f"/spark/{name}", (json.dumps({"text": "x"}) + "\n").encode())
        assert [record.key for record in records("memory://spark")] == ["a.jsonl:1"]
        assert [record.key for record in records("memory://spark/_b.jsonl")] == ["_b.jsonl:1"], "named by itself"
    finally:
        store.rm("/spark", recursive=True)
    assert [record.key for record in records(tmp_path / "_b.jsonl")] == ["_b.jsonl:1"]


def test_images_and_shards_below_hidden_folders_are_no_data(tmp_path):
    for name in ("cat/1.png", "_temporary/2.png", "cat/_3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / name)
    assert [record.key for record in records(tmp_path)] == ["cat/1.png"]


def test_prose_and_source_code_may_begin_with_an_underscore(tmp_path):
    write(tmp_path, "__init__.py", "_layouts/page.md", "a.txt", "_temporary/0/b.txt")
    assert [record.key for record in records(tmp_path)] == ["__init__.py", "_layouts/page.md", "a.txt"]


def test_files_of_unknown_suffix_are_said_and_counted(tmp_path):
    write(tmp_path / "raw", *(f"{number}.jsonl" for number in range(60)), *(f"{n}.jsonl.gz" for n in range(60, 90)))
    lines = []
    shard_dataset(toy_config(tmp_path / "raw", tmp_path / "root"), ToyTask(), lines.append)
    assert "30 of 90 files are left out, which are no JSON lines: 60.jsonl.gz, 61.jsonl.gz, 62.jsonl.gz" in lines[0]


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_where_most_files_are_of_unknown_suffix_nothing_is_read(tmp_path, kind):
    write(tmp_path, *(f"{number}.{kind}" for number in range(30)), *(f"{n}.{kind}.gz" for n in range(30, 90)))
    with pytest.raises(DataError, match=rf"60 of 90 files .*30\.{kind}\.gz.*; unpack or convert them"):
        resolve(tmp_path)


def test_notes_beside_data_and_files_beside_text_are_no_reason_to_refuse(tmp_path):
    write(tmp_path / "rows", "a.jsonl", "README", ".x.crc", "_y.crc", "_z.crc")
    assert len(records(tmp_path / "rows")) == 1
    write(tmp_path / "code", "a.py", "b.json", "c.yaml", "d.bin", "Makefile")
    assert len(records(tmp_path / "code")) == 1


@pytest.mark.parametrize("bad", ["date=__HIVE_DEFAULT_PARTITION__", "date=2026-13-41", "date=2026-11-02/hour=99"])
def test_a_partition_of_no_known_time_stops_no_window_and_is_counted(tmp_path, bad, capsys):
    write(tmp_path / "raw", *(f"date=2026-11-0{day}/{n}.jsonl" for day in (1, 2, 3) for n in range(9)))
    write(tmp_path / "raw", f"{bad}/x.jsonl", f"{bad}/y.jsonl")
    result = shard_toy(tmp_path / "raw", tmp_path / "root", window=DAY)
    assert sum(split.num_blocks for split in result.manifest.splits.values()) == 27
    said = [line for line in capsys.readouterr().out.splitlines() if "no known time" in line]
    assert len(said) == 1 and "1 of 4 partitions are of no known time" in said[0] and bad in said[0]
    with pytest.raises(EmptyWindowError):
        shard_toy(
            tmp_path / "raw",
            tmp_path / "root",
            window={**DAY, "start": "2026-11-03T12:00:00Z", "end": "2026-11-03T18:00:00Z"},
        )


def test_where_no_partition_has_a_known_time_or_a_file_lies_in_none_a_window_is_refused(tmp_path):
    write(tmp_path / "bad", "date=today/a.jsonl", "date=tomorrow/b.jsonl")
    with pytest.raises(DataError, match=r"2 of 2 partitions are of no known time: date=today, date=tomorrow"):
        resolve(tmp_path / "bad", window=DAY).listing()
    write(tmp_path / "loose", "date=2026-11-01/a.jsonl", "b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl: when it is of is not known"):
        resolve(tmp_path / "loose", window=DAY).listing()


# -- what has changed ------------------------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch):
    """How many parts were encoded."""
    found = []
    encode = PartStore.encode
    monkeypatch.setattr(PartStore, "encode", lambda *arguments: found.append(1) or encode(*arguments))
    return found


def replace_unseen(path: Path, how: str) -> None:
    """Other content of the same length and time."""
    status, content = path.stat(), path.read_bytes().replace(b"old", b"new")
    if how == "in place":
        path.write_bytes(content)
    else:
        (path.parent / "other").write_bytes(content)
    os.utime(path.parent / "other" if how == "renamed" else path, ns=(status.st_atime_ns, status.st_mtime_ns))
    if how == "renamed":
        os.rename(path.parent / "other", path)


@pytest.mark.parametrize("how", ["in place", "renamed"])
@pytest.mark.parametrize("is_of_before", [False, True])
def test_other_content_of_the_same_size_and_time_is_read(tmp_path, encoded, how, is_of_before):
    write(tmp_path / "raw", *(f"{number}.txt" for number in range(40)), text="old text")
    options = {"part_size_bytes": 1 << 16, "processes": 1}
    first = shard_toy(tmp_path / "raw", tmp_path / "root", **options)
    num_parts = len(encoded)
    if is_of_before:  # whose pointers say nothing of the files' states
        for pointer in [*(tmp_path / "root").rglob("by-input/*.json"), *(tmp_path / "root").rglob("by-source/*.json")]:
            storage.publish_json(
                str(pointer), {k: v for k, v in json.loads(pointer.read_text()).items() if k != "state"}
            )
        assert shard_toy(tmp_path / "raw", tmp_path / "root", **options).reused and len(encoded) == num_parts
    replace_unseen(tmp_path / "raw" / "7.txt", how)
    second = shard_toy(tmp_path / "raw", tmp_path / "root", **options)
    assert second.dataset_digest != first.dataset_digest
    assert len(encoded) == num_parts + (num_parts if is_of_before else 1)
    assert shard_toy(tmp_path / "raw", tmp_path / "root", **options).reused
    clean = shard_toy(tmp_path / "raw", tmp_path / "clean", **options)
    assert clean.dataset_digest == second.dataset_digest


def test_a_file_that_was_only_touched_gives_the_same_dataset(tmp_path, encoded):
    write(tmp_path / "raw", *(f"{number}.txt" for number in range(40)))
    first = shard_toy(tmp_path / "raw", tmp_path / "root")
    os.chmod(tmp_path / "raw" / "7.txt", 0o600)
    again = shard_toy(tmp_path / "raw", tmp_path / "root")
    assert again.dataset_digest == first.dataset_digest and again.manifest.parent == first.manifest.parent


def test_a_store_that_has_versions_beside_entity_tags_is_asked_for_both(monkeypatch):
    info = {"size": 3, "ETag": "e", "VersionId": "1"}
    monkeypatch.setattr(storage, "find", lambda uri: {"s3://b/a.txt": ("a.txt", dict(info))})
    (before,) = list_files("s3://b", lambda name: True)
    info["VersionId"] = "2"
    (after,) = list_files("s3://b", lambda name: True)
    assert before.to_dict() != after.to_dict() and before.version == after.version == "e"
