"""Shards are hashed from their first use, once per node, and nobody publishes what came of damaged ones."""

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from kftrain.core import remote, storage
from kftrain.data.settings import DataConfig
from kftrain.data.shards import verified
from kftrain.data.shards.verified import File, FirstUse, Memory, make_first_use
from kftrain.errors import DataError, StorageError
from kftrain.process.machine import make_node_folder


@pytest.fixture
def hashed(monkeypatch):
    """The URIs that are hashed, one entry each time."""
    uris, original = [], storage.sha256_file

    def counting(uri):
        uris.append(uri)
        return original(uri)

    monkeypatch.setattr(storage, "sha256_file", counting)
    return uris


@pytest.fixture
def memory(tmp_path):
    return Memory.of_node(str(tmp_path / "cache"), "d" * 64)


def file_of(path: Path, content: bytes = b"content") -> File:
    """A file as it should be, where nothing is there yet; else as it is found."""
    if not path.exists():
        path.write_bytes(content)
    return File(str(path), *storage.size_and_version(str(path)), storage.sha256_bytes(content))


def verify(memory, *files):
    first_use = FirstUse(memory)
    for file in files:
        first_use.begin(file)
    first_use.require_verified()


def entries(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_second_attempt_hashes_nothing_and_a_file_is_hashed_once_however_often_it_is_opened(tmp_path, memory, hashed):
    files = [file_of(tmp_path / f"{number}.tar") for number in range(3)]
    verify(memory, *files, *files)
    assert sorted(hashed) == [file.uri for file in files]
    verify(Memory.of_node(str(tmp_path / "cache"), "d" * 64), *files)
    assert len(hashed) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.utime(path, ns=(0, 12345)),
        lambda path: (path.rename(path.with_suffix(".old")), path.write_bytes(b"content")),
    ],
    ids=["time", "inode"],
)
def test_a_file_that_may_have_changed_is_hashed_again(tmp_path, memory, hashed, change):
    path = tmp_path / "x.tar"
    verify(memory, file_of(path))
    change(path)
    verify(memory, file_of(path))
    assert len(hashed) == 2


@pytest.mark.parametrize("damage", [b"", b"x", b"[1, 2, 3, 4]", "half"], ids=["empty", "short", "other", "half"])
def test_a_damaged_memory_stands_for_nothing_and_is_mended(tmp_path, memory, hashed, damage):
    file = file_of(tmp_path / "x.tar")
    verify(memory, file)
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2] if damage == "half" else damage)
    for _ in range(2):
        verify(memory, file)
    assert len(hashed) == 2 and entry.read_bytes() == whole


def test_what_one_of_two_at_once_is_hashing_the_other_waits_for(tmp_path, memory, monkeypatch):
    file, other = file_of(tmp_path / "x.tar"), file_of(tmp_path / "y.tar")
    hashed, begun, goes_on = [], threading.Event(), threading.Event()
    original = storage.sha256_file

    def slow(uri):
        hashed.append(uri)
        if uri == file.uri:
            begun.set()
            assert goes_on.wait(240)
        return original(uri)

    monkeypatch.setattr(storage, "sha256_file", slow)
    first, second = FirstUse(memory), FirstUse(memory)
    first.begin(file)
    assert begun.wait(240)
    second.begin(file)
    second.begin(other)
    deadline = time.monotonic() + 240
    while other.uri not in hashed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert hashed == [file.uri, other.uri], "it does something else meanwhile"
    goes_on.set()
    first.require_verified()
    second.require_verified()
    assert hashed == [file.uri, other.uri]


def test_a_process_that_dies_in_the_middle_leaves_nothing_that_is_taken_for_hashed(tmp_path, memory, hashed):
    file = file_of(tmp_path / "x.tar")
    verify(memory, file)
    (entry,) = entries(tmp_path)
    child = os.fork()
    if not child:
        descriptor = os.open(entry, os.O_RDWR | os.O_TRUNC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    verify(memory, file)
    assert len(hashed) == 2


def test_a_folder_that_others_may_write_to_is_not_believed(tmp_path):
    above = tmp_path / "cache" / f"kftrain-{os.getuid()}"
    above.mkdir(parents=True)
    assert make_node_folder(str(tmp_path / "cache"), "verified") == above / "verified"
    above.chmod(0o777)
    assert make_node_folder(str(tmp_path / "cache"), "verified") is None


def test_without_a_memory_each_hashes_by_itself(tmp_path, hashed):
    (tmp_path / "file").write_text("not a folder")
    for _ in range(2):
        verify(Memory.of_node(str(tmp_path / "file"), "d" * 64), file_of(tmp_path / "x.tar"))
    assert len(hashed) == 2


def test_what_was_not_used_for_long_is_forgotten(tmp_path, memory):
    verify(memory, file_of(tmp_path / "x.tar"))
    (entry,) = entries(tmp_path)
    long_ago = time.time() - 2 * verified.FORGOTTEN_AFTER_SECONDS
    os.utime(entry.parent, (long_ago, long_ago))
    Memory.of_node(str(tmp_path / "cache"), "e" * 64)
    assert not entry.exists()


@pytest.mark.parametrize("what", ["other content", "gone"])
def test_what_is_not_as_it_should_be_is_raised_at_the_next_read_and_before_anything_is_published(
    tmp_path, memory, what
):
    path = tmp_path / "train-000003.tar"
    file = file_of(path)
    content = b"CONTENT"
    path.write_bytes(content) if what == "other content" else path.unlink()
    first_use = FirstUse(memory)
    for _ in range(2):
        first_use.begin(file)
        with pytest.raises(DataError, match=r"train-000003\.tar: (its content has changed|missing)"):
            first_use.require_verified()
        with pytest.raises(DataError, match=r"train-000003\.tar"):
            first_use.raise_found()
    with pytest.raises(DataError):
        verify(memory, file)


def test_a_file_that_was_replaced_after_it_was_opened_is_not_the_one_that_was_read(tmp_path, memory):
    path = tmp_path / "x.tar"
    file = file_of(path)
    path.unlink()
    (tmp_path / "y").write_bytes(b"content")
    (tmp_path / "y").rename(path)
    with pytest.raises(StorageError, match=r"x\.tar: it was replaced"):
        verify(memory, file)


def test_who_publishes_waits_for_what_was_read_before_and_for_no_more(tmp_path, memory, monkeypatch):
    first, later = file_of(tmp_path / "1.tar"), file_of(tmp_path / "2.tar")
    goes_on, original = {first.uri: threading.Event(), later.uri: threading.Event()}, storage.sha256_file

    def slow(uri):
        assert goes_on[uri].wait(240)
        return original(uri)

    monkeypatch.setattr(storage, "sha256_file", slow)
    first_use = FirstUse(memory)
    first_use.begin(first)
    require = first_use.make_barrier()
    first_use.begin(later)
    waiting = threading.Thread(target=require)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    goes_on[first.uri].set()
    waiting.join(240)
    assert not waiting.is_alive()
    goes_on[later.uri].set()
    first_use.require_verified()


def test_a_file_that_does_not_come_to_its_end_is_named(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(storage, "sha256_file", lambda uri: threading.Event().wait(600))
    monkeypatch.setattr(remote, "deadline", remote.Deadline(0.1, 0.1, 1e9))
    with pytest.raises(StorageError, match=r"train-000007\.tar: it was not read within") as caught:
        verify(memory, file_of(tmp_path / "train-000007.tar"))
    assert caught.value.exit_code == 138


def test_a_bug_is_raised_where_the_data_is_read(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(storage, "sha256_file", lambda uri: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        verify(memory, file_of(tmp_path / "x.tar"))


@pytest.mark.parametrize(("level", "num_hashed"), [("first_use", 1), ("everything", 0), ("size", 0)])
def test_other_levels_hash_nothing_at_first_use(tmp_path, hashed, level, num_hashed):
    first_use = make_first_use(DataConfig(verify=level, cache_dir=str(tmp_path / "cache")), "d" * 64)
    first_use.begin(file_of(tmp_path / "x.tar"))
    first_use.require_verified()
    assert len(hashed) == num_hashed


def test_the_level_of_earlier_releases_reads_as_what_it_did():
    assert DataConfig.model_validate({"verify": "sha256"}).verify == "everything"
