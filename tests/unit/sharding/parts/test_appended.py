"""Data that is added, changed or removed: its part is written, and nothing else."""

import os
from pathlib import Path

import pytest
from helpers.models.toy_task import ToyTask
from helpers.splits import open_split
from helpers.toy_data import shard_toy, text_folder, toy_config

from kftrain.core import storage
from kftrain.data.shards.verify import verify_shards
from kftrain.errors import DataError
from kftrain.sharding.shard_dataset import shard_dataset

DATA = {"part_size_bytes": 1 << 16, "processes": 1}


def tars(root: Path) -> dict[Path, tuple[int, int]]:
    """Each shard with what would tell that it was written again."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in root.rglob("*.tar")}


def parts(result) -> set[str]:
    return {shard.folder for split in result.manifest.splits.values() for shard in split.shards}


def test_added_input_adds_parts_and_leaves_the_shards_that_are_there(tmp_path):
    source = text_folder(tmp_path / "texts", 100)
    first = shard_toy(source, tmp_path / "root", **DATA)
    before = tars(tmp_path / "root")
    for number in range(30):
        (source / "part" / f"later-{number:03d}.txt").write_text(f"later {number}")
    second = shard_toy(source, tmp_path / "root", **DATA)
    assert first.manifest.parent == "" and second.manifest.parent == first.dataset_digest
    after = tars(tmp_path / "root")
    assert before == {path: after[path] for path in before} and len(parts(first) - parts(second)) == 1
    verify_shards(first.manifest_uri, first.manifest)
    clean = shard_toy(source, tmp_path / "clean", **DATA)
    assert clean.dataset_digest == second.dataset_digest and clean.manifest.parent == ""
    assert shard_toy(source, tmp_path / "root", **DATA).manifest == second.manifest


class Counting(ToyTask):
    calls = 0

    def encode(self, records, split):
        Counting.calls += 1
        return super().encode(records, split)


def test_only_the_part_that_changed_is_encoded(tmp_path):
    source, lines = text_folder(tmp_path / "texts", 100), []
    config = toy_config(source, tmp_path / "root", **DATA)
    num_parts = len(parts(shard_dataset(config, ToyTask(), lambda line: None)))
    (source / "part" / "doc-050.txt").write_text("something else")
    Counting.calls = 0
    shard_dataset(config, Counting(), lines.append)
    assert Counting.calls == 2  # each split of one part
    assert sum(line.endswith("(was there)") for line in lines) == num_parts - 1 > 2


def test_a_file_that_changes_changes_its_part_only(tmp_path):
    source = text_folder(tmp_path / "texts", 100)
    first = shard_toy(source, tmp_path / "root", **DATA)
    (source / "part" / "doc-050.txt").write_text("something else")
    changed = shard_toy(source, tmp_path / "root", **DATA)
    assert len(parts(first) - parts(changed)) == 1 == len(parts(changed) - parts(first))
    (source / "part" / "doc-050.txt").unlink()
    removed = shard_toy(source, tmp_path / "root", **DATA)
    assert 1 <= len(parts(changed) - parts(removed)) <= 2
    keys = open_split(removed.manifest_uri, "train").group_keys()
    keys += open_split(removed.manifest_uri, "validation").group_keys()
    assert "part/doc-050.txt" not in keys and len(keys) == 99
    assert removed.manifest.parent == changed.dataset_digest


def test_a_part_of_equal_content_is_found_under_its_new_times(tmp_path):
    source = text_folder(tmp_path / "texts", 100)
    first = shard_toy(source, tmp_path / "root", **DATA)
    for path in source.rglob("*.txt"):
        os.utime(path, (1, 1))
    before = tars(tmp_path / "root")
    second = shard_toy(source, tmp_path / "root", **DATA)
    assert second.dataset_digest == first.dataset_digest and tars(tmp_path / "root") == before


def test_a_damaged_part_is_written_again_and_the_others_are_not(tmp_path):
    source = text_folder(tmp_path / "texts", 100)
    first = shard_toy(source, tmp_path / "root", **DATA)
    before = tars(tmp_path / "root")
    path = sorted(before)[3]
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:-1] + b"x")
    shard_toy(source, tmp_path / "root", **DATA)
    after = tars(tmp_path / "root")
    assert path.read_bytes() == content
    assert {each for each in before if before[each] != after[each]} <= set(path.parent.glob("*.tar"))
    verify_shards(first.manifest_uri, first.manifest)


def test_another_way_of_encoding_shares_nothing(tmp_path):
    source = text_folder(tmp_path / "texts", 40)
    first = shard_toy(source, tmp_path / "root", **DATA)
    other = shard_dataset(toy_config(source, tmp_path / "root", **DATA), ToyTask(width=16), lambda line: None)
    assert not parts(first) & parts(other) and other.manifest.parent == ""
    assert len(storage.list_names(str(tmp_path / "root" / "shards" / "latest"))) == 2


def test_a_part_of_a_file_that_changed_while_it_is_read_is_not_kept(tmp_path):
    source = text_folder(tmp_path / "texts", 40)

    class Meddling(ToyTask):
        def encode(self, records, split):
            (source / "part" / "doc-001.txt").write_text("changed meanwhile")
            yield from super().encode(records, split)

    config = toy_config(source, tmp_path / "root", **DATA)
    with pytest.raises(DataError, match="changed while it was read"):
        shard_dataset(config, Meddling(), lambda line: None)
    assert not list((tmp_path / "root").rglob("by-input/*"))
