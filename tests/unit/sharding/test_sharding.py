import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.fakes import full_disk
from helpers.models.toy_task import ToyTask
from helpers.splits import open_split
from helpers.toy_data import shard_path, shard_toy, text_folder, toy_config

from kftrain.core import storage
from kftrain.data.schema import Field, SampleSchema
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards import staging
from kftrain.data.shards.manifest import read_manifest
from kftrain.data.shards.verify import verify_shards
from kftrain.errors import DataError, RetryableError, UserCodeError
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.tasks.settings import TaskConfig


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "seen.json"]  # that holds times
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return text_folder(tmp_path / "texts")


def test_sharding_holds_every_record_once_in_its_split(source: Path, tmp_path: Path) -> None:
    result = shard_toy(source, tmp_path / "root")
    texts = {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*.txt")}
    seen = {}
    for split in ("train", "validation"):
        dataset = open_split(result.manifest_uri, split)
        arrays, groups = dataset.read_range(0, dataset.num_samples)
        for group, key in enumerate(dataset.group_keys()):
            rows = arrays["data"][groups == group].tobytes()
            seen[key] = rows[: int(arrays["length"][groups == group].sum())]
    assert seen == texts
    assert result.manifest.splits["validation"].num_blocks not in (0, len(texts))


def test_equal_input_gives_equal_bytes_in_other_places_at_other_times(source: Path, tmp_path: Path) -> None:
    first = shard_toy(source, tmp_path / "one")
    moved = shutil.copytree(source, tmp_path / "moved")
    for path in moved.rglob("*.txt"):
        os.utime(path, (1, 1))
    second = shard_toy(moved, tmp_path / "two")
    assert first.dataset_digest == second.dataset_digest
    folders = [contents(shard_path(result).parent) for result in (first, second)]
    assert folders[0] == folders[1] and "train-000000.tar" in folders[0]
    assert first.manifest.source_listing_digest != second.manifest.source_listing_digest


def test_the_digest_is_fixed_for_all_machines_and_versions(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for number in range(8):
        (tmp_path / "s" / f"{number}.txt").write_text(f"text {number}" * number)
    digest = shard_toy(tmp_path / "s", tmp_path / "root", validation_fraction=0.5).dataset_digest
    assert digest == "01e7f79b6afe51d28eee4e6bc61dc4c5c70d52939e7742db54cbd3887ec6cdf4"


def test_other_settings_give_another_dataset(source: Path, tmp_path: Path) -> None:
    digests = {
        shard_toy(source, tmp_path / "root").dataset_digest,
        shard_toy(source, tmp_path / "root", validation_fraction=0.4).dataset_digest,
        shard_dataset(toy_config(source, tmp_path / "root"), ToyTask(width=16), lambda line: None).dataset_digest,
    }
    assert len(digests) == 3


def test_the_manifest_tells_baselines_and_where_the_data_came_from(source: Path, tmp_path: Path) -> None:
    result = shard_toy(source, tmp_path / "root")
    described = manifests.describe(result.manifest)
    assert described["source"] == str(source) and described["fields"] == {"data": "uint8 [8]", "length": "int64 []"}
    held_out = open_split(result.manifest_uri, "validation").group_keys()
    mean = np.mean([len((source / key).read_bytes()) for key in held_out])
    assert result.manifest.baselines == {"length": {"mean": mean}}
    written = storage.read_json(result.manifest_uri)["sample_schema"]
    assert SampleSchema.from_dict(written) == ToyTask().schema()


def test_unchanged_data_is_not_sharded_again(source: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    first = shard_toy(source, tmp_path / "root")
    second = shard_dataset(toy_config(source, tmp_path / "root"), ToyTask(), lines.append)
    assert (first.reused, second.reused) == (False, True)
    assert second.manifest == first.manifest and second.manifest_uri == first.manifest_uri
    assert "unchanged" in lines[0]
    pointer = next((tmp_path / "root" / "shards" / "by-source").iterdir())
    written = storage.read_json(str(pointer))
    assert written.pop("state")
    assert written == {
        "dataset_digest": first.dataset_digest,
        "manifest_uri": f"shards/{first.dataset_digest}/manifest.json",
    }


def test_added_data_is_sharded_and_moves_no_record_to_the_other_split(source: Path, tmp_path: Path) -> None:
    before = shard_toy(source, tmp_path / "root")
    (source / "new.txt").write_text("new")
    after = shard_toy(source, tmp_path / "root")
    assert not after.reused and after.dataset_digest != before.dataset_digest
    for split in ("train", "validation"):
        keys = [set(open_split(r.manifest_uri, split).group_keys()) for r in (before, after)]
        assert keys[1] - keys[0] <= {"new.txt"} and keys[0] <= keys[1]


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest", "pointer"])
def test_damaged_shards_are_replaced_by_sharding_again(source: Path, tmp_path: Path, damage: str) -> None:
    lines: list[str] = []
    first = shard_toy(source, tmp_path / "root")
    folder, shard = tmp_path / "root" / "shards", shard_path(first)
    whole, content = contents(folder), shard.read_bytes()
    if damage == "flip":
        shard.write_bytes(content[:700] + bytes([content[700] ^ 1]) + content[701:])
    elif damage == "truncate":
        shard.write_bytes(content[:1000])
    elif damage == "delete":
        shard.unlink()
    elif damage == "manifest":
        Path(first.manifest_uri).write_text("{")
    else:
        next((tmp_path / "root" / "shards" / "by-source").iterdir()).write_text("[]")
    second = shard_dataset(toy_config(source, tmp_path / "root"), ToyTask(), lines.append)
    assert not second.reused and any("cannot be used again" in line for line in lines)
    assert contents(folder) == whole
    assert shard_toy(source, tmp_path / "root").reused


def test_an_empty_split_says_what_to_do(tmp_path: Path) -> None:
    text_folder(tmp_path / "s", 1)
    with pytest.raises(DataError, match=r"no samples for the validation split .*raise data\.validation_fraction"):
        shard_toy(tmp_path / "s", tmp_path / "root", validation_fraction=0.01)
    with pytest.raises(DataError, match=r"no samples for the train split .*lower data\.validation_fraction"):
        shard_toy(tmp_path / "s", tmp_path / "root", validation_fraction=0.999)
    assert storage.list_names(str(tmp_path / "root" / "shards")) == ["parts"]


def test_a_source_that_changes_while_it_is_read_is_refused(source: Path, tmp_path: Path) -> None:
    class Meddling(ToyTask):
        def baselines(self, records: Any) -> dict[str, dict[str, float]]:
            (source / "late.txt").write_text("late")
            return {}

    with pytest.raises(DataError, match="changed while it was read"):
        shard_dataset(toy_config(source, tmp_path / "root"), Meddling(), lambda line: None)
    assert not (tmp_path / "root" / "shards" / "by-source").exists()


def test_duplicate_block_keys_are_refused_by_key_and_shards(source: Path, tmp_path: Path) -> None:
    class Duplicating(ToyTask):
        def encode(self, records: Any, split: str) -> Any:
            for number, block in enumerate(super().encode(records, split)):
                yield type(block)("same.txt" if number in (1, 3) else block.key, block.arrays)

    with pytest.raises(
        DataError, match=r"train-000000\.tar: a key comes twice, first in train-000000\.tar \(got 'same\.txt'\)"
    ):
        shard_dataset(toy_config(source, tmp_path / "root"), Duplicating(), lambda line: None)


@pytest.mark.parametrize("method", ["schema", "settings", "encode", "baselines"])
def test_what_a_users_task_raises_is_user_code(source: Path, tmp_path: Path, method: str, capsys: Any) -> None:
    def boom(*arguments: Any) -> Any:
        raise KeyError("boom")

    task = ToyTask()
    setattr(task, method, boom)
    config = toy_config(source, tmp_path / "root").model_copy(update={"task": TaskConfig(kind="my.tasks:Mine")})
    with pytest.raises(UserCodeError, match="KeyError: 'boom'"):
        shard_dataset(config, task, lambda line: None)


def test_what_our_own_task_raises_stays_a_bug(source: Path, tmp_path: Path) -> None:
    task = ToyTask()
    task.settings = lambda: {}["boom"]  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        shard_dataset(toy_config(source, tmp_path / "root"), task, lambda line: None)


@pytest.mark.parametrize(
    "fields",
    [
        *([], [("Upper", "uint8", ())], [("a.b", "uint8", ())], [("a", "object", ())], [("a", "uint8", (0,))]),
        *([("a", "uint8", (1 << 31,))], [("a", "float64", (1 << 14, 1 << 14))], [("a", "uint8", (1 << 40, 1 << 40))]),
    ],
)
def test_a_schema_that_shards_cannot_hold_is_refused(source: Path, tmp_path: Path, fields: list[Any]) -> None:
    task = ToyTask()
    task.schema = lambda: SampleSchema(tuple(Field(*f) for f in fields))  # type: ignore
    with pytest.raises(DataError, match=r"task\.schema\(\)"):
        shard_dataset(toy_config(source, tmp_path / "root"), task, lambda line: None)


def test_the_largest_row_is_one_that_numpy_can_hold() -> None:
    largest = SampleSchema((Field("a", "uint8", ((1 << 31) - 1,)),))
    manifests.check_schema(largest, "x")
    assert np.dtype(f"V{(1 << 31) - 1}").itemsize == (1 << 31) - 1
    with pytest.raises(DataError, match=r"a row of field a is larger than 2 GiB"):
        manifests.check_schema(SampleSchema((Field("a", "int16", (1 << 30,)),)), "x")


def test_a_baseline_that_is_not_finite_is_refused(source: Path, tmp_path: Path) -> None:
    task = ToyTask()
    task.baselines = lambda records: {"m": {"b": float("nan")}}  # type: ignore[method-assign]
    with pytest.raises(DataError, match="a baseline is not finite"):
        shard_dataset(toy_config(source, tmp_path / "root"), task, lambda line: None)


def test_an_object_store_holds_the_same_dataset(source: Path, tmp_path: Path) -> None:
    here = shard_toy(source, tmp_path / "root")
    there = shard_toy(source, "memory://sharding-test")
    assert there.dataset_digest == here.dataset_digest
    verify_shards(there.manifest_uri, read_manifest(there.manifest_uri))
    assert shard_toy(source, "memory://sharding-test").reused
    fsspec.filesystem("memory").rm("/sharding-test", recursive=True)


def test_what_dead_processes_left_is_removed_and_what_lives_stays(source: Path, tmp_path: Path) -> None:
    shards = tmp_path / "root" / "shards"
    for name in ("dead", "alive"):
        (shards / f".tmp-sharding-{name}" / "content").mkdir(parents=True)
        (shards / f".tmp-sharding-{name}" / "content" / "train-000000.tar").write_bytes(b"x")
    long_ago = time.time() - staging.ABANDONED_SECONDS - 60
    for path in (shards / ".tmp-sharding-dead", *(shards / ".tmp-sharding-dead").rglob("*")):
        os.utime(path, (long_ago, long_ago))
    shard_toy(source, tmp_path / "root")
    assert [path.name for path in shards.glob(".tmp-*")] == [".tmp-sharding-alive"]


def test_a_faster_process_with_the_same_data_wins_quietly(source: Path, tmp_path: Path) -> None:
    class Overtaken(ToyTask):
        def baselines(self, records: Any) -> dict[str, dict[str, float]]:
            shard_toy(source, tmp_path / "root")
            return super().baselines(records)

    result = shard_dataset(toy_config(source, tmp_path / "root"), Overtaken(), lambda line: None)
    verify_shards(result.manifest_uri, read_manifest(result.manifest_uri))
    assert read_manifest(result.manifest_uri) == result.manifest


def test_sharding_and_reading_import_no_torch() -> None:
    code = (
        "import sys; import kftrain.sharding.shard_dataset, kftrain.data.loader; "
        "import kftrain.sharding.sources.resolve_source; "
        "assert not {'torch', 'sklearn', 'pandas', 'mlflow', 'kfp', 'webdataset'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("part", ["train-0", "validation-0"])
@pytest.mark.parametrize("num_bytes", [0, 1500])
def test_fault_48_sharding_onto_a_full_disk_says_so_and_leaves_nothing(tmp_path, monkeypatch, part, num_bytes):
    source = text_folder(tmp_path / "texts", 20)
    with monkeypatch.context() as patch:
        full_disk.fill(patch, part, num_bytes)
        with pytest.raises(RetryableError, match="no space is left on the device") as caught:
            shard_toy(source, tmp_path / "root")
    assert caught.value.exit_code == 138
    assert caught.value.where.startswith(str(tmp_path / "root"))
    assert [path for path in (tmp_path / "root").rglob("*") if path.is_file()] == []
    shard_toy(source, tmp_path / "root")
