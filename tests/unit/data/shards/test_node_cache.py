"""Copies of remote shards on a node: whole or none, within their budget, shared, and bit for bit what the store has."""

import errno
import hashlib
import os
import shutil
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers.toy_data import shard_toy, text_folder

from kftrain.core import storage
from kftrain.data.dataset import ShardedDataset
from kftrain.data.settings import DataConfig
from kftrain.data.shards import cache as caches
from kftrain.data.shards.cache import NodeCache, make_first_use, opened_of
from kftrain.data.shards.manifest import read_manifest, shard_uri
from kftrain.data.shards.verified import File, FirstUse, Memory
from kftrain.errors import DataError

NUM_BYTES = 3_000_000
"""More than one chunk."""


@pytest.fixture
def store():
    found = fsspec.filesystem("memory")
    yield found
    found.rm("/cached", recursive=True)


@pytest.fixture
def fetched(monkeypatch):
    """The URIs that are fetched whole, one entry each time."""
    uris, download = [], caches._download

    def counting(file, part):
        uris.append(file.uri)
        return download(file, part)

    monkeypatch.setattr(caches, "_download", counting)
    return uris


def put(store, name, num_bytes=NUM_BYTES) -> File:
    content = hashlib.sha256(name.encode()).digest() * (num_bytes // 32)
    store.pipe_file(f"/cached/{name}", content)
    uri = f"memory://cached/{name}"
    return File(uri, *storage.size_and_version(uri), hashlib.sha256(content).hexdigest())


def cache_of(tmp_path, max_bytes=10 * NUM_BYTES):
    memory = Memory.of_node(str(tmp_path / "cache"), "d" * 64)
    return NodeCache.of_node(str(tmp_path / "cache"), max_bytes, memory)


def folder(tmp_path) -> Path:
    return tmp_path / "cache" / f"kftrain-{os.getuid()}" / "shards"


def copies(tmp_path) -> set[str]:
    return {path.name for path in folder(tmp_path).iterdir() if path.stat().st_size}


def content_of(cache, file):
    stream = cache.open_copy(file)
    if stream is None:
        return None
    with stream:
        return stream.read()


def test_a_copy_is_what_the_store_has_and_a_second_process_finds_it(tmp_path, store, fetched):
    file = put(store, "a.tar")
    assert content_of(cache_of(tmp_path), file) is None
    assert cache_of(tmp_path).fetch(file) is True
    assert cache_of(tmp_path).fetch(file) is True
    assert content_of(cache_of(tmp_path), file) == store.cat_file("/cached/a.tar")
    assert fetched == [file.uri] and copies(tmp_path) == {file.sha256}


@pytest.mark.parametrize("num_bad", [1, 2])
def test_what_comes_damaged_is_fetched_once_more(tmp_path, store, monkeypatch, num_bad):
    file, download, tries = put(store, "a.tar"), caches._download, []

    def damaging(file, part):
        tries.append(file.uri)
        digest = download(file, part)
        return "0" * 64 if len(tries) <= num_bad else digest

    monkeypatch.setattr(caches, "_download", damaging)
    if num_bad == 1:
        assert cache_of(tmp_path).fetch(file) is True
        assert content_of(cache_of(tmp_path), file) == store.cat_file("/cached/a.tar")
    else:
        assert cache_of(tmp_path).fetch(file) is False, "what the store has is right"
        assert copies(tmp_path) == set() and content_of(cache_of(tmp_path), file) is None
    assert len(tries) == 2


def test_a_copy_that_was_damaged_on_the_node_is_not_read_and_fetched_again(tmp_path, store, fetched):
    file = put(store, "a.tar")
    cache_of(tmp_path).fetch(file)
    path = folder(tmp_path) / file.sha256
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert content_of(cache_of(tmp_path), file) is None
    assert cache_of(tmp_path).fetch(file) is True
    assert content_of(cache_of(tmp_path), file) == store.cat_file("/cached/a.tar") and len(fetched) == 2


def test_a_copy_that_nobody_remembers_is_hashed_and_not_fetched(tmp_path, store, fetched):
    file = put(store, "a.tar")
    cache_of(tmp_path).fetch(file)
    other = NodeCache(folder(tmp_path), 10 * NUM_BYTES, Memory.of_node(str(tmp_path / "cache"), "e" * 64))
    assert content_of(other, file) is None
    assert other.fetch(file) is True and len(fetched) == 1
    assert content_of(other, file) == store.cat_file("/cached/a.tar")


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(tmp_path, store, monkeypatch):
    file, other = put(store, "a.tar"), put(store, "b.tar")
    cache, pwrite = cache_of(tmp_path, 1.5 * NUM_BYTES), os.pwrite
    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "pwrite", lambda *arguments: (pwrite(*arguments), os.kill(os.getpid(), 9)))
        cache.fetch(file)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert copies(tmp_path) == {file.sha256 + ".part"}
    assert content_of(cache, file) is None
    assert cache.fetch(other) is True, "what is left makes room"
    assert copies(tmp_path) == {other.sha256}
    assert cache.fetch(file) is True and copies(tmp_path) == {file.sha256}


def in_the_way(path):
    path.mkdir()
    (path / "file").write_text("")


DAMAGES = {
    "a folder in place of the copy": lambda folder, file: in_the_way(folder / file.sha256),
    "a folder in place of what is fetched": lambda folder, file: in_the_way(folder / f"{file.sha256}.part"),
    "a folder in place of the lock": lambda folder, file: in_the_way(folder / ".lock"),
    "the folder is gone": lambda folder, file: shutil.rmtree(folder),
    "the folder is a file": lambda folder, file: (shutil.rmtree(folder), folder.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_keeps_nothing_and_fails_nothing(damage, tmp_path, store, capsys):
    """Cleaners of /tmp come by while a training runs."""
    file, cache = put(store, "a.tar"), cache_of(tmp_path)
    damage(folder(tmp_path), file)
    assert cache.fetch(file) is False and content_of(cache, file) is None
    assert cache.fetch(file) is False
    assert capsys.readouterr().out.count("keeps no more copies of shards") == 1


def test_a_disk_that_is_full_while_a_copy_is_written_keeps_nothing_and_fails_nothing(tmp_path, store, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    file, cache = put(store, "a.tar"), cache_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert cache.fetch(file) is False
    assert copies(tmp_path) == set()
    assert cache.fetch(file) is True and content_of(cache, file) == store.cat_file("/cached/a.tar")


def test_an_object_that_is_larger_than_it_was_takes_no_more_room(tmp_path, store, monkeypatch):
    written, write = [], os.pwrite
    file = put(store, "a.tar")
    store.pipe_file("/cached/a.tar", b"x" * (3 * NUM_BYTES))
    monkeypatch.setattr(os, "pwrite", lambda where, data, at: written.append(at + len(data)) or write(where, data, at))
    with pytest.raises(DataError, match="content has changed"):
        cache_of(tmp_path).fetch(file)
    assert max(written) == NUM_BYTES and copies(tmp_path) == set()


def test_of_two_processes_one_fetches(tmp_path, store, monkeypatch):
    file, download = put(store, "a.tar"), caches._download
    begun, goes_on, fetched = threading.Event(), threading.Event(), []

    def slow(file, part):
        fetched.append(file.uri)
        begun.set()
        assert goes_on.wait(240)
        return download(file, part)

    monkeypatch.setattr(caches, "_download", slow)
    first = threading.Thread(target=lambda: cache_of(tmp_path).fetch(file))
    first.start()
    assert begun.wait(240)
    assert cache_of(tmp_path).fetch(file) is None
    goes_on.set()
    first.join(240)
    assert cache_of(tmp_path).fetch(file) is True and len(fetched) == 1


def test_what_was_not_read_for_the_longest_time_makes_room_unless_it_is_in_use(tmp_path, store):
    files = [put(store, f"{number}.tar") for number in range(4)]
    cache = cache_of(tmp_path, 2.5 * NUM_BYTES)
    cache.fetch(files[0])
    cache.fetch(files[1])
    assert content_of(cache, files[0]) is not None
    assert cache.fetch(files[2]) is True
    assert copies(tmp_path) == {files[0].sha256, files[2].sha256}, "the second was not read after the first"
    in_use = [cache.open_copy(files[0]), cache.open_copy(files[2])]
    assert cache.fetch(files[3]) is False, "both are being read"
    assert copies(tmp_path) == {files[0].sha256, files[2].sha256}
    in_use[0].close()
    assert cache.fetch(files[3]) is True
    assert copies(tmp_path) == {files[2].sha256, files[3].sha256}
    in_use[1].close()


def test_what_does_not_fit_in_the_end_removes_no_copy(tmp_path, store):
    """A file that is larger than the budget, and one for which what is in use leaves no room."""
    cache = cache_of(tmp_path, 3 * NUM_BYTES)
    files = [put(store, name) for name in ("a", "b")]
    assert [cache.fetch(file) for file in files] == [True, True]
    assert cache.fetch(put(store, "huge", 4 * NUM_BYTES)) is False
    with cache.open_copy(files[0]):
        assert cache.fetch(put(store, "large", 5 * NUM_BYTES // 2)) is False
    for file in files:
        cache.open_copy(file).close()


def test_a_file_larger_than_the_budget_is_not_fetched_but_verified(tmp_path, store, fetched):
    file = put(store, "a.tar")
    cache = cache_of(tmp_path, NUM_BYTES // 2)
    assert cache.fetch(file) is False and fetched == [] and copies(tmp_path) == set()
    store.pipe_file("/cached/a.tar", b"x" * NUM_BYTES)
    first_use = FirstUse(Memory(None), copies=cache)
    first_use.begin(file)
    with pytest.raises(DataError, match=r"a\.tar: its content has changed"):
        first_use.require_verified()


@pytest.fixture
def remote_uri(tmp_path, store):
    manifest_uri = shard_toy(text_folder(tmp_path / "texts", 200), tmp_path / "root").manifest_uri
    root = Path(manifest_uri).parents[1]
    for path in root.rglob("*"):
        if path.is_file():
            store.pipe_file(f"/cached/{path.relative_to(root)}", path.read_bytes())
    return f"memory://cached/{Path(manifest_uri).parent.name}/manifest.json"


def test_samples_are_read_in_ranges_at_first_and_from_the_copy_then(tmp_path, store, remote_uri):
    manifest = read_manifest(remote_uri)
    data = DataConfig(cache_dir=str(tmp_path / "cache"), cache_bytes=1 << 30)
    expected, _ = ShardedDataset(remote_uri, manifest, "train").read_range(0, 100)
    first_use = make_first_use(data, manifest.dataset_digest)
    dataset = ShardedDataset(remote_uri, manifest, "train", first_use)
    worker = ShardedDataset(remote_uri, manifest, "train", opened_of(data, manifest.dataset_digest))
    for reader in (dataset, worker):
        assert all(np.array_equal(found, expected[name]) for name, found in reader.read_range(0, 100)[0].items())
    first_use.require_verified()
    shard = manifest.splits["train"].shards[0]
    store.pipe_file(shard_uri(remote_uri, shard).removeprefix("memory:/"), b"\0" * shard.bytes)
    for reader in (dataset, worker):
        assert all(np.array_equal(found, expected[name]) for name, found in reader.read_range(0, 100)[0].items())


def test_a_damaged_remote_shard_is_named_at_the_next_read(tmp_path, store, remote_uri):
    manifest = read_manifest(remote_uri)
    shard = manifest.splits["train"].shards[0]
    store.pipe_file(shard_uri(remote_uri, shard).removeprefix("memory:/"), b"\0" * shard.bytes)
    data = DataConfig(cache_dir=str(tmp_path / "cache"), cache_bytes=1 << 30)
    first_use = make_first_use(data, manifest.dataset_digest)
    dataset = ShardedDataset(remote_uri, manifest, "train", first_use)
    dataset.read_range(0, 10)
    with pytest.raises(DataError, match=f"{shard.name}: its content has changed"):
        first_use.require_verified()
    with pytest.raises(DataError, match=f"{shard.name}: its content has changed"):
        dataset.read_range(0, 10)
