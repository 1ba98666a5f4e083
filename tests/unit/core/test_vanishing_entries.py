"""Whatever lists a folder that others change expects that an entry goes, at each point where it can."""

import os
import time

import pytest
from helpers.fakes.vanishing import vanish
from helpers.toy_data import shard_folder, shard_toy, text_folder

from kftrain.core import storage
from kftrain.data.shards import staging, verified, verify
from kftrain.data.shards.manifest import read_manifest
from kftrain.data.shards.verified import FORGOTTEN_AFTER_SECONDS, File, Memory
from kftrain.launch import local
from kftrain.run.paths import RunPaths
from kftrain.schedule.turn import Turn
from kftrain.sharding.sources.listing import list_with_times

OWNER = ".tmp-sharding-owner"


@pytest.mark.parametrize(
    ("listed", "gone", "before"),
    [
        ("", OWNER, False),
        (OWNER, OWNER, True),
        (OWNER, f"{OWNER}/content", False),
        (f"{OWNER}/content", f"{OWNER}/content", True),
        (f"{OWNER}/content", f"{OWNER}/content/train-000000.tar", False),
        (f"{OWNER}/content/deep", OWNER, False),
    ],
)
def test_a_staged_folder_is_looked_at_while_its_owner_renames_it(tmp_path, monkeypatch, listed, gone, before):
    content = tmp_path / OWNER / "content"
    (content / "deep").mkdir(parents=True)
    for path in (content / "train-000000.tar", content / "deep" / "a"):
        path.write_bytes(b"x")
    removed = vanish(monkeypatch, tmp_path / listed, tmp_path / gone, before)
    with staging.staging_folder(str(tmp_path)) as own:
        assert own.is_dir() and removed


def test_a_folder_goes_when_its_names_are_asked_for(tmp_path, monkeypatch):
    (tmp_path / "attempts").mkdir()
    removed = vanish(monkeypatch, tmp_path / "attempts", tmp_path / "attempts", before=True)
    assert storage.list_names(str(tmp_path / "attempts")) == [] and removed


def test_no_shard_is_missing_because_another_file_of_its_folder_goes(tmp_path, monkeypatch):
    result = shard_toy(text_folder(tmp_path / "texts"), tmp_path / "root")
    folder = shard_folder(result.manifest_uri)
    (folder / ".tmp-other").write_bytes(b"x")
    removed = vanish(monkeypatch, folder, folder / ".tmp-other")
    verify.check_listing(result.manifest_uri, read_manifest(result.manifest_uri))
    assert removed


def test_a_node_remembers_what_is_whole_while_others_forget_a_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(verified, "make_node_folder", lambda cache_dir, name: tmp_path)
    for name in ("old", "older"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, time.time() - FORGOTTEN_AFTER_SECONDS - 60))
    removed = vanish(monkeypatch, tmp_path, tmp_path / "old")
    memory, file = Memory.of_node("", "f" * 64), File("a.tar", 1, "1", "0" * 64)
    hashed = []
    for _ in range(2):
        assert memory.once(file, lambda: hashed.append(file))
    assert removed and hashed == [file] and not (tmp_path / "older").exists()


def test_a_source_is_what_is_there_when_a_file_of_it_goes(tmp_path, monkeypatch):
    source = text_folder(tmp_path / "texts", 3)
    removed = vanish(monkeypatch, source, source / "doc-000.txt")
    assert [each.file.name for each in list_with_times(str(source), lambda name: True)] == [
        "part/doc-001.txt",
        "part/doc-002.txt",
    ]
    assert removed


def test_a_folder_of_a_source_goes_before_it_is_listed(tmp_path, monkeypatch):
    source = text_folder(tmp_path / "texts", 3)
    vanish(monkeypatch, source / "part", source / "part", before=True)
    assert [each.file.name for each in list_with_times(str(source), lambda name: True)] == ["doc-000.txt"]


def test_what_is_left_in_a_run_is_looked_for_while_it_goes(tmp_path, monkeypatch):
    (tmp_path / "runs" / "r" / ".tmp-a").mkdir(parents=True)
    (tmp_path / "runs" / "r" / ".tmp-b").write_bytes(b"x")
    os.utime(tmp_path / "runs" / "r" / ".tmp-b", (0, 0))
    removed = vanish(monkeypatch, tmp_path / "runs" / "r", tmp_path / "runs" / "r" / ".tmp-a")
    found = local.remove_temporary_files(RunPaths(str(tmp_path / "runs" / "r")))
    assert removed and [name.rsplit("/", 1)[-1] for name in found] == [".tmp-b"]


def test_a_turn_goes_on_where_a_document_that_was_listed_is_removed(tmp_path, monkeypatch):
    first, second = (Turn.of(str(tmp_path), "nightly", lambda line: None) for _ in range(2))
    with first.hold():
        pass

    def others_go_on(uri):
        monkeypatch.undo()
        with first.hold():
            pass
        return storage.read_bytes(uri)

    monkeypatch.setattr(storage, "read_bytes", others_go_on)
    with second.hold():
        assert storage.list_names(second.uri) == ["3.json", "4.json", "5.json"]


def test_what_another_step_has_just_published_is_never_moved_away(tmp_path, monkeypatch):
    target, sync = tmp_path / "part", storage.sync_folder

    def overtaken(path):
        if not target.exists():
            target.mkdir()
            (target / "part.json").write_bytes(b"theirs")
        sync(path)

    monkeypatch.setattr(storage, "sync_folder", overtaken)
    with staging.staging_folder(str(tmp_path)) as content:
        (content / "part.json").write_bytes(b"ours")
        staging.publish_folder(content, str(target), "part.json", lambda uri: (target / "part.json").exists())
    assert (target / "part.json").read_bytes() == b"theirs"
