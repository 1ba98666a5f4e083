"""What a save does when the disk is full, slow, gone or not what it was. Named after the faults of the catalogue."""

import errno
import hashlib
import os
import pathlib
import threading
import time

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import checkpoints
from helpers.fakes import full_disk
from helpers.fakes.clock import Clock
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from kftrain.checkpoint import save
from kftrain.core import storage
from kftrain.errors import FencedError, RetryableError
from kftrain.run import attempts, commit
from kftrain.run.paths import RunPaths


@pytest.fixture
def world():
    with checkpoints.alone() as world:
        yield world


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths.of(str(tmp_path), "r")
    attempts.claim_run(paths, 0, 1)
    return paths


@pytest.fixture
def writer(paths, world):
    return checkpoints.writer_of(paths, world)


def assert_whole(paths, step):
    """By the digests alone, computed here."""
    uri = storage.join(paths.checkpoints, f"step-{step:08d}-a1")
    manifest, _ = commit.read_checkpoint_manifest(uri)
    folder = storage.local_path(uri)
    assert {path.name for path in folder.iterdir()} == {*manifest.files, "manifest.json", "COMMITTED"}
    for name, entry in manifest.files.items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry.bytes, entry.sha256), name
    loaded = {"model": {"weight": torch.zeros(10_000)}, "optimizer": {"step": 0}}
    dcp.load(loaded, checkpoint_id=str(folder))
    assert torch.equal(loaded["model"]["weight"], torch.full((10_000,), float(step)))
    assert loaded["optimizer"]["step"] == 3


@pytest.mark.parametrize("num_bytes", [0, 100, 704, 5_000, 40_000])
def test_fault_48_a_full_disk_fails_the_save_in_its_own_words_and_nothing_is_left(
    paths, writer, monkeypatch, num_bytes
):
    checkpoints.save(writer, 1)
    with monkeypatch.context() as patch:
        full_disk.fill(patch, ".distcp", num_bytes)
        with pytest.raises(RetryableError) as caught:
            checkpoints.save(writer, 2)
    assert "could not be written: No space left on device" in caught.value.line
    assert "step-00000002-a1" in caught.value.line
    assert storage.list_names(paths.checkpoints) == ["step-00000001-a1"]
    assert writer.committed_step == 1
    assert_whole(paths, 1)
    checkpoints.save(writer, 2)
    assert_whole(paths, 2)


@pytest.mark.parametrize("name", ["mkdir", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_fault_48_any_refusal_of_a_disk_is_retryable_and_told(paths, writer, monkeypatch, name, code):
    with monkeypatch.context() as patch, storage.retry_for(0):
        patch.setattr(os, name, refusing(code))
        with pytest.raises(RetryableError) as caught:
            checkpoints.save(writer, 2)
    assert os.strerror(code) in caught.value.line
    assert commit.list_committed(paths) == []
    checkpoints.save(writer, 2)
    assert_whole(paths, 2)


def refusing(code):
    def refuse(*arguments, **options):
        raise OSError(code, os.strerror(code))

    return refuse


def test_what_fails_after_the_commit_does_not_take_it_back(paths, writer, monkeypatch, capfd):
    """The curve cannot be written, and old checkpoints cannot be deleted."""
    publish = storage.publish_json
    with monkeypatch.context() as patch:
        patch.setattr(
            storage, "publish_json", lambda uri, data: refusing(28)() if uri == paths.history else publish(uri, data)
        )
        checkpoints.save(writer, 1)
    assert writer.committed_step == 1
    assert_whole(paths, 1)
    assert "after the commit of step 1: No space left on device" in capfd.readouterr().out


def test_files_are_hashed_while_they_are_written_and_not_read_again(paths, writer, monkeypatch):
    opened = []
    before = pathlib.Path.open

    def recorded(path, mode="r", *arguments, **options):
        opened.append((path.name, mode))
        return before(path, mode, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "open", recorded)
        checkpoints.save(writer, 3)
    assert ("__0_0.distcp", "wb") in opened
    assert [name for name, mode in opened if "r" in mode] == []
    assert_whole(paths, 3)


@pytest.fixture
def bucket():
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/bucket", recursive=True)


def test_an_object_store_gets_each_file_once_and_is_not_asked_for_them_again(world, bucket, monkeypatch):
    paths = RunPaths.of("memory://bucket/store", "r")
    attempts.claim_run(paths, 0, 1)
    writer = checkpoints.writer_of(paths, world)
    opened = []
    before = type(bucket)._open

    def recorded(self, path, mode="rb", **options):
        opened.append((path.rsplit("/", 1)[-1], mode))
        return before(self, path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "_open", recorded)
        checkpoints.save(writer, 3)
    assert opened.count(("__0_0.distcp", "wb")) == 1
    assert [name for name, mode in opened if mode == "rb" and name.endswith((".distcp", ".metadata"))] == []
    uri = f"{paths.checkpoints}/step-00000003-a1"
    files = commit.read_checkpoint_manifest(uri)[0].files
    assert files.keys() == {"__0_0.distcp", ".metadata", "history.json"}
    for name, entry in files.items():
        assert hashlib.sha256(bucket.cat_file(f"{uri}/{name}")).hexdigest() == entry.sha256, name
    loaded = {"model": {"weight": torch.zeros(10_000)}}
    dcp.load(loaded, storage_reader=FsspecReader(uri))
    assert torch.equal(loaded["model"]["weight"], torch.full((10_000,), 3.0))


def test_an_object_store_that_refuses_in_the_middle_keeps_nothing_of_the_save(world, bucket, monkeypatch):
    paths = RunPaths.of("memory://bucket/store", "r")
    attempts.claim_run(paths, 0, 1)
    writer = checkpoints.writer_of(paths, world)
    checkpoints.save(writer, 1)
    with monkeypatch.context() as patch, storage.retry_for(0):
        patch.setattr(commit, "commit", refusing(errno.EIO))
        with pytest.raises(RetryableError, match="could not be committed"):
            checkpoints.save(writer, 2)
    assert [path for path in bucket.find("/bucket") if "step-00000002" in path] == []
    assert [name.step for name in commit.list_committed(paths)] == [1]


def test_fault_43_a_checkpoint_is_never_written_over(paths, world, writer):
    """Neither by the same attempt nor by the next one, which comes to the same step with other weights."""
    checkpoints.save(writer, 5)
    with pytest.raises(BaseException, match="already"):
        checkpoints.save(writer, 5, fill=7)
    assert_whole(paths, 5)
    attempts.claim_run(paths, 5, 1)
    checkpoints.save(checkpoints.writer_of(paths, world, attempt=2), 5, fill=7)
    assert_whole(paths, 5)
    assert storage.list_names(paths.checkpoints) == ["step-00000005-a1", "step-00000005-a2"]


def test_fault_44_what_is_in_flight_at_the_end_is_committed_first(paths, writer):
    writer.save(checkpoints.state(6), [], 6, 24)
    writer.close()
    assert_whole(paths, 6)


def test_fault_44_nothing_is_committed_before_all_is_written(paths, writer, monkeypatch):
    goes_on = held_back(monkeypatch)
    writer.save(checkpoints.state(6), [], 6, 24)
    closing = threading.Thread(target=writer.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive() and commit.list_committed(paths) == []
    assert not [
        path for path in pathlib.Path(paths.checkpoints).rglob("*") if path.name in ("COMMITTED", "manifest.json")
    ]
    goes_on.set()
    closing.join(240)
    assert not closing.is_alive()
    assert_whole(paths, 6)


def test_what_is_written_is_the_state_as_it_was_when_the_save_began(paths, writer, monkeypatch):
    goes_on = held_back(monkeypatch)
    for step in (1, 2, 3):
        goes_on.clear()
        state = checkpoints.state(step)
        writer.save(state, [], step, 4 * step)
        state["model"]["weight"].fill_(99.0)
        assert writer.busy
        goes_on.set()
        writer.wait()
        assert_whole(paths, step)


def held_back(monkeypatch):
    """Writing of tensors waits for the event."""
    event = threading.Event()
    before = pathlib.Path.open

    def waiting(path, mode="r", *arguments, **options):
        if "w" in mode and path.suffix == ".distcp":
            event.wait(600)
        return before(path, mode, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "open", waiting)
    return event


def test_a_storage_that_hangs_ends_the_wait_and_nobody_waits_for_it_at_the_end(paths, world, monkeypatch):
    goes_on, clock = held_back(monkeypatch), Clock()
    monkeypatch.setattr(save, "time", clock)
    writer = checkpoints.writer_of(paths, world, timeout_seconds=0.3)
    start = time.monotonic()
    writer.save(checkpoints.state(1), [], 1, 4)
    assert not writer.overdue
    with pytest.raises(RetryableError, match=r"step 1 was not written within 0\.3 s"):
        writer.wait()
    clock.sleep(0.3)
    assert writer.overdue and writer.step == 1
    writer.close()
    assert time.monotonic() - start < 300
    goes_on.set()
    writer.close()


def test_fault_24_a_paused_node_that_comes_back_commits_nothing(paths, world, writer):
    """It was writing when the next attempt took the run."""
    checkpoints.save(writer, 1)
    attempts.claim_run(paths, 1, 1)
    with pytest.raises(FencedError) as caught:
        checkpoints.save(writer, 2)
    assert caught.value.exit_code == 17
    assert [name.step for name in commit.list_committed(paths)] == [1]
    newer = checkpoints.writer_of(paths, world, attempt=2)
    checkpoints.save(newer, 2)
    assert storage.list_names(paths.checkpoints) == ["step-00000001-a1", "step-00000002-a2"]


def test_fault_25_of_two_groups_that_start_at_once_one_commits(tmp_path, world):
    paths = RunPaths.of(str(tmp_path), "r")
    numbers = []
    threads = [threading.Thread(target=lambda: numbers.append(attempts.claim_run(paths, 0, 1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))
    for number in range(1, 8):
        with pytest.raises(FencedError):
            checkpoints.save(checkpoints.writer_of(paths, world, attempt=number), 1)
    checkpoints.save(checkpoints.writer_of(paths, world, attempt=8), 1)
    assert [str(name) for name in commit.list_committed(paths)] == ["step-00000001-a8"]
