"""Blocks of remote shards on a node: verified or none, within their budget, shared, whoever is killed."""

import errno
import fcntl
import hashlib
import math
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers import remote_shards
from helpers.remote_shards import FOLDER, URI, assert_rows

from kftrain.data.dataset import ShardedDataset
from kftrain.data.shards import cache
from kftrain.data.shards.block_digests import DIGEST_BLOCK_BYTES
from kftrain.data.shards.cache import NodeCache, choose_cache_bytes
from kftrain.data.shards.manifest import read_manifest
from kftrain.data.shards.verified import Uses

NUM_BYTES = 20 * DIGEST_BLOCK_BYTES - 4096
NAME = "a" * 64


def cache_of(tmp_path, max_bytes=1 << 30):
    return NodeCache.of_node(str(tmp_path / "cache"), max_bytes)


def folder_of(tmp_path) -> Path:
    return tmp_path / "cache" / f"kftrain-{os.getuid()}" / "shards"


def path_of(tmp_path, name=NAME) -> Path:
    return folder_of(tmp_path) / f"{name}.{cache.read_boot_id()}"


def content_of(first, stop) -> bytes:
    blocks = [hashlib.sha256(b"%d" % number).digest() * (DIGEST_BLOCK_BYTES // 32) for number in range(first, stop)]
    return b"".join(blocks)[: NUM_BYTES - first * DIGEST_BLOCK_BYTES]


def put(node, file, first, stop) -> bool:
    with file.claim(first, stop) as is_claimed:
        if not (is_claimed and node.reserve(file, (stop - first) * DIGEST_BLOCK_BYTES)):
            return False
        file.write(first, memoryview(content_of(first, stop)))
    return True


def missing(file) -> list[int]:
    return file.list_missing(np.arange(20)).tolist()


def assert_sound(file) -> None:
    """What is there is what should be there."""
    for block in set(range(20)) - set(missing(file)):
        start = block * DIGEST_BLOCK_BYTES
        assert file.content[start : start + DIGEST_BLOCK_BYTES] == content_of(block, block + 1), block


def in_a_process(work) -> int:
    """The exit code of a process that does this."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_another_process_finds_the_blocks_that_are_there(tmp_path):
    file = cache_of(tmp_path).open(NAME, NUM_BYTES)
    assert not file.is_private and missing(file) == list(range(20))

    def fill():
        node = cache_of(tmp_path)
        assert put(node, node.open(NAME, NUM_BYTES), 17, 20)

    assert in_a_process(fill) == 0
    assert missing(file) == list(range(17))
    assert_sound(file)
    again = cache_of(tmp_path).open(NAME, NUM_BYTES)
    assert missing(again) == list(range(17)) and not again.is_whole
    assert put(cache_of(tmp_path), again, 0, 17) and missing(again) == [] and again.is_whole
    assert_sound(again)


@pytest.mark.parametrize("num_writes", [0, 1, 2])
def test_a_process_that_is_killed_leaves_no_block_that_is_taken_for_good_and_no_claim(
    tmp_path, monkeypatch, num_writes
):
    """Before the data, between data and map, and after both."""
    pwrite, counts = os.pwrite, iter(range(10**6))
    node = cache_of(tmp_path)
    file = node.open(NAME, NUM_BYTES)

    def deadly(*arguments):
        if next(counts) == num_writes:
            os.kill(os.getpid(), 9)
        return pwrite(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", deadly)
        assert in_a_process(lambda: put(node, file, 3, 5) and os.pwrite(0, b"", 0)) == -9
    assert missing(file) == [number for number in range(20) if number not in (3, 4) or num_writes < 2]
    assert_sound(file)
    assert put(node, file, 3, 5) and missing(file) == [*range(3), *range(5, 20)]
    assert_sound(file)


def test_blocks_of_another_boot_are_none(tmp_path, monkeypatch):
    node = cache_of(tmp_path)
    assert put(node, node.open(NAME, NUM_BYTES), 0, 20)
    monkeypatch.setattr(cache, "read_boot_id", lambda: "another")
    assert missing(cache_of(tmp_path).open(NAME, NUM_BYTES)) == list(range(20))
    monkeypatch.setattr(cache, "read_boot_id", lambda: "")
    assert cache_of(tmp_path / "other").open(NAME, NUM_BYTES).is_private, "who knows of no boot trusts none"


def test_nodes_that_share_a_folder_leave_each_other_their_files(tmp_path, monkeypatch):
    nodes = {}
    for boot in ("a", "b", "a", "b"):
        monkeypatch.setattr(cache, "read_boot_id", lambda boot=boot: boot)
        node = cache_of(tmp_path)
        file = node.open(NAME, NUM_BYTES)
        if boot not in nodes:
            assert missing(file) == list(range(20)) and put(node, file, 0, 20)
        assert not missing(file)
        nodes[boot] = file


@pytest.mark.parametrize("content", [b"cut off", b"of a release before" * 1_000_000])
def test_a_file_of_another_size_is_made_anew_and_an_empty_one_is_used(tmp_path, content):
    node = cache_of(tmp_path)
    for before in (content, b""):
        path_of(tmp_path).write_bytes(before)
        file = cache_of(tmp_path).open(NAME, NUM_BYTES)
        assert not file.is_private and missing(file) == list(range(20))
        assert put(node, file, 0, 20) and not missing(cache_of(tmp_path).open(NAME, NUM_BYTES))
        assert_sound(file)


def test_files_of_releases_before_are_neither_read_nor_in_the_way_and_go_first(tmp_path):
    """Whole copies named by their digest, blocks with a header at the same name, and a locked count."""
    node, folder = cache_of(tmp_path, 8_000_000), folder_of(tmp_path)
    before = [folder / NAME, folder / ("b" * 64), folder / f"{'b' * 64}.part"]
    for path in before:
        path.write_bytes(b"kftrain blocks 1" * 150_000)
        os.utime(path, (1000, 1000))
    with (folder / ".lock").open("w") as lock:
        lock.write(f"{8_000_000:032d}")
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = node.open(NAME, NUM_BYTES)
        assert missing(file) == list(range(20)) and put(node, file, 0, 20)
    assert_sound(file)
    assert not all(path.exists() for path in before) and used_bytes(tmp_path) < 8_000_000


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES])
def test_who_cannot_open_a_file_does_not_remove_it(tmp_path, monkeypatch, error):
    node = cache_of(tmp_path)
    assert put(node, node.open(NAME, NUM_BYTES), 0, 20)
    real = os.open

    def refuse(path, *arguments):
        if str(path).startswith(str(folder_of(tmp_path))):
            raise OSError(error, os.strerror(error))
        return real(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert cache_of(tmp_path).open(NAME, NUM_BYTES).is_private
    assert not missing(cache_of(tmp_path).open(NAME, NUM_BYTES)), "it is there when there are descriptors again"


def test_of_two_one_claims_a_block_be_they_threads_or_processes(tmp_path):
    node = cache_of(tmp_path)
    file, other = node.open(NAME, NUM_BYTES), cache_of(tmp_path).open(NAME, NUM_BYTES)
    with file.claim(4, 8) as is_claimed:
        assert is_claimed
        for rival in (file, other):
            for (first, stop), is_free in {(7, 9): False, (0, 5): False, (8, 9): True, (0, 4): True}.items():
                with rival.claim(first, stop) as is_rivals:
                    assert is_rivals is is_free

        def claim():
            with cache_of(tmp_path).open(NAME, NUM_BYTES).claim(7, 8) as is_childs:
                assert not is_childs

        assert in_a_process(claim) == 0
    with other.claim(4, 8) as is_claimed:
        assert is_claimed


@pytest.mark.parametrize("has_memfd", [True, False])
def test_threads_claim_blocks_in_memory(monkeypatch, has_memfd):
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create")
    file = NodeCache(None, 0).open(NAME, NUM_BYTES)
    with file.claim(4, 8) as is_claimed, file.claim(7, 9) as is_rivals, file.claim(8, 9) as is_others:
        assert (is_claimed, is_rivals, is_others) == (True, False, True)
    with file.claim(7, 9) as is_claimed:
        assert is_claimed and put(NodeCache(None, 0), file, 0, 5)
    assert_sound(file)


def in_the_way(path):
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "file").write_text("")


DAMAGES = {
    "a folder in place of a shard": lambda path, index: in_the_way(path),
    "a folder in place of an index": lambda path, index: in_the_way(index),
    "a shard is gone": lambda path, index: path.unlink(missing_ok=True),
    "the folder is gone": lambda path, index: shutil.rmtree(path.parent),
    "the folder is a file": lambda path, index: (shutil.rmtree(path.parent), path.parent.write_text("")),
    "the folder is read-only": lambda path, index: path.parent.chmod(0o500),
}


@pytest.fixture(scope="module")
def dataset_folder(tmp_path_factory):
    return remote_shards.write_dataset(tmp_path_factory.mktemp("remote") / "shards", 150)


@pytest.fixture
def manifest(dataset_folder):
    yield read_manifest(remote_shards.upload(dataset_folder))
    fsspec.filesystem("memory").rm(FOLDER, recursive=True)


def train_of(manifest, node):
    return ShardedDataset(URI, manifest, "train", Uses(node))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("when", ["before", "in between"])
def test_a_damaged_folder_fails_nothing(damage, when, tmp_path, manifest, capsys):
    """Cleaners of /tmp come by while a training runs."""
    node, shard = cache_of(tmp_path), manifest.splits["train"].shards[0]
    dataset = train_of(manifest, node)
    if when == "in between":
        assert_rows(dataset.read(np.arange(0, 150, 7)), range(0, 150, 7))
    damage(path_of(tmp_path, shard.blocks_sha256), folder_of(tmp_path) / f"{shard.index_sha256}.file")
    for _ in range(2):
        assert_rows(dataset.read(np.arange(150)), range(150))
    assert capsys.readouterr().out.count("keeps no more blocks") <= 1


@pytest.mark.parametrize("call", ["pwrite", "truncate"])
@pytest.mark.parametrize("num_left", range(15))
def test_a_full_disk_costs_memory_and_no_byte_and_is_told_once(tmp_path, manifest, monkeypatch, capsys, call, num_left):
    work, counts = getattr(os, call), iter(range(10**6))

    def full(descriptor, *arguments):
        if "memfd" not in os.readlink(f"/proc/self/fd/{descriptor}") and next(counts) >= num_left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return work(descriptor, *arguments)

    dataset = train_of(manifest, cache_of(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        for _ in range(2):
            assert_rows(dataset.read(np.arange(150)), range(150))
    assert capsys.readouterr().out.count("keeps no more blocks") == (next(counts) > num_left)
    dataset = train_of(manifest, cache_of(tmp_path))
    assert_rows(dataset.read(np.arange(150)), range(150))


def test_a_write_that_a_full_disk_cuts_off_is_no_block(tmp_path, monkeypatch):
    pwrite, node = os.pwrite, cache_of(tmp_path)
    file = node.open(NAME, NUM_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda to, content, place: pwrite(to, content[: len(content) // 2 + 1], place))
        with pytest.raises(OSError, match="No space left"):
            put(node, file, 3, 6)
    assert_sound(file)
    assert put(node, file, 3, 6) and missing(file) == [*range(3), *range(6, 20)]


def used_bytes(tmp_path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder_of(tmp_path).iterdir())


def test_what_was_not_used_for_longest_makes_room_unless_it_is_in_use(tmp_path):
    node = cache_of(tmp_path, 3 * NUM_BYTES)
    names = [letter * 64 for letter in "abcde"]
    paths = [path_of(tmp_path, name) for name in names]
    for age, name in enumerate(names[:2]):
        assert put(node, node.open(name, NUM_BYTES), 0, 20)
        os.utime(paths[age], (1000 + age, 1000 + age))
    held = cache_of(tmp_path).open(names[0], NUM_BYTES)
    os.utime(paths[0], (900, 900))
    for name in names[2:4]:
        assert put(node, node.open(name, NUM_BYTES), 0, 20)
        assert used_bytes(tmp_path) <= 3.1 * NUM_BYTES
    assert not paths[1].exists(), "the oldest that nobody has open but this process"
    assert missing(held) == [] and paths[0].exists()
    assert_sound(held)
    whole = node.open("f" * 64, 10 * NUM_BYTES)
    assert not node.reserve(whole, 200 * DIGEST_BLOCK_BYTES), "more than all of it"
    assert paths[0].exists() and paths[3].exists(), "and nothing goes for it"


def test_processes_that_each_take_room_in_advance_stay_near_their_budget(tmp_path):
    nodes, max_bytes = [cache_of(tmp_path, 100 * DIGEST_BLOCK_BYTES) for _ in range(8)], 100 * DIGEST_BLOCK_BYTES
    for number in range(400):
        node = nodes[number % 8]
        block = number // 40
        assert put(node, node.open(f"{number % 40:064d}", NUM_BYTES), block, block + 1)
        assert used_bytes(tmp_path) <= max_bytes * (1 + 8 / 256) + 4096 * 50


def test_a_folder_in_which_all_is_in_use_is_not_counted_for_each_request(tmp_path, monkeypatch):
    held = [cache_of(tmp_path, 1 << 30).open(letter * 64, NUM_BYTES) for letter in "ab"]
    for file in held:
        assert put(cache_of(tmp_path, 1 << 30), file, 0, 20)
    node, counts = cache_of(tmp_path, 2 * NUM_BYTES), []
    entries = cache.storage.entries
    monkeypatch.setattr(cache.storage, "entries", lambda folder: counts.append(1) or entries(folder))
    file = node.open(NAME, NUM_BYTES)
    monkeypatch.setattr(cache, "FULL_SECONDS", 600.0)
    assert not any(node.reserve(file, DIGEST_BLOCK_BYTES) for _ in range(50)) and len(counts) == 1
    node._full_until = 0.0
    held.clear()
    assert node.reserve(file, DIGEST_BLOCK_BYTES)


def test_blocks_in_memory_stay_within_their_budget_be_it_one_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MEMORY_BYTES", 10 * DIGEST_BLOCK_BYTES)
    node = NodeCache(None, 0)
    for number in range(100):
        block = number % 20
        file = node.open("ab"[number % 2] * 64 if number < 50 else NAME, NUM_BYTES)
        assert put(node, file, block, block + 1)
        assert_sound(file)
        used = sum(512 * os.fstat(kept.descriptor).st_blocks for kept in node._files.values())
        assert used <= 10 * DIGEST_BLOCK_BYTES + 2 * 4096


def test_a_budget_that_is_too_small_for_what_is_read_is_told_once(tmp_path, manifest, capsys):
    for max_bytes, is_small in ((20_000_000, False), (2_000_000, True)):
        dataset = train_of(manifest, cache_of(tmp_path / str(max_bytes), max_bytes))
        for _ in range(2):
            for start in range(7):
                assert_rows(dataset.read(np.arange(start, 150, 7)), range(start, 150, 7))
        assert capsys.readouterr().out.count("data.cache_bytes") == is_small


def test_a_stopped_process_that_fetches_a_small_file_holds_up_nobody_for_long(tmp_path, monkeypatch, manifest):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    index = folder_of(tmp_path) / f"{manifest.splits['train'].shards[0].index_sha256}.file"
    for _ in range(2):  # of the second one it is there
        node = cache_of(tmp_path)
        with index.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            start = time.monotonic()
            assert_rows(train_of(manifest, node).read(np.arange(100)), range(100))
            assert 0.2 < time.monotonic() - start < 60
    assert hashlib.sha256(index.read_bytes()).hexdigest() == index.stem


def test_a_small_file_is_fetched_once_by_all_and_again_where_it_is_damaged(tmp_path):
    content, fetched = os.urandom(1000), []
    digest = hashlib.sha256(content).hexdigest()

    def fetch():
        fetched.append(1)
        time.sleep(0.1)
        return content

    threads = [threading.Thread(target=lambda: cache_of(tmp_path).read_file(digest, fetch)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert len(fetched) == 1 and cache_of(tmp_path).read_file(digest, fetch) == content
    (folder_of(tmp_path) / f"{digest}.file").write_bytes(content[:-1])
    assert cache_of(tmp_path).read_file(digest, fetch) == content and len(fetched) == 2
    assert (folder_of(tmp_path) / f"{digest}.file").read_bytes() == content


def test_a_process_that_is_stopped_while_it_removes_a_file_holds_up_nobody(tmp_path):
    node = cache_of(tmp_path)
    put(node, node.open(NAME, NUM_BYTES), 0, 20)
    node._files.clear()
    with path_of(tmp_path).open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        file = node.open(NAME, NUM_BYTES)
        assert file.is_private and put(node, file, 0, 20)
        assert_sound(file)
    assert not missing(cache_of(tmp_path).open(NAME, NUM_BYTES))


def test_a_file_system_without_locks_costs_memory_and_no_time(tmp_path, manifest, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    start, num_open = time.monotonic(), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert_rows(train_of(manifest, cache_of(tmp_path)).read(np.arange(150)), range(150))
    assert time.monotonic() - start < cache.LOCK_SECONDS and len(os.listdir("/proc/self/fd")) <= num_open + 4


def test_auto_leaves_a_disk_most_of_its_space(tmp_path, monkeypatch):
    disk = os.statvfs(tmp_path)
    assert 0 < choose_cache_bytes(tmp_path, math.inf) <= min(32 << 30, disk.f_bavail * disk.f_frsize // 4 + (1 << 30))
    assert choose_cache_bytes(tmp_path / "nowhere", math.inf) == 0
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    volumes = {
        "3Gi": 1 << 30,
        "3e": 32 << 30,
        "": 32 << 30,
        "6000M": 2 * 10**9,
        "900Ki": 300 << 10,
    }
    for volume, num_bytes in volumes.items():
        monkeypatch.setenv("KFTRAIN_SCRATCH", volume)
        monkeypatch.setattr(cache, "DISK_SHARE", 10**6)
        assert NodeCache.of_node("", "auto").max_bytes == num_bytes
        assert NodeCache.of_node(str(tmp_path / "elsewhere"), "auto").max_bytes == 32 << 30


def test_processes_that_read_under_a_small_budget_and_are_killed_at_any_time_see_no_wrong_byte(tmp_path, manifest):
    """Some seconds of eight processes with room for about one shard, one of them killed or stopped all the time."""

    def read_for_ever(seed):
        dataset, rng = train_of(manifest, cache_of(tmp_path, 2_000_000)), np.random.default_rng(seed)
        try:
            while True:
                numbers = rng.integers(0, 150, 8)
                assert_rows(dataset.read(numbers), numbers)
        finally:  # whatever it was, the parent sees the code
            os._exit(3)

    def start(seed):
        child = os.fork()
        if not child:
            read_for_ever(seed)
        return child

    rng, children, end = random.Random(0), [start(seed) for seed in range(4)], time.monotonic() + 8
    codes = []
    for seed in range(100, 10**6):
        time.sleep(rng.uniform(0, 0.1))
        victim = children.pop(rng.randrange(4))
        os.kill(victim, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]))
        children.append(start(seed))
        if time.monotonic() > end:
            break
    for child in children:
        os.kill(child, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert set(codes) == {-9} and len(codes) > 10
    dataset = train_of(manifest, cache_of(tmp_path, 2_000_000))
    assert_rows(dataset.read(np.arange(150)), range(150))
    assert used_bytes(tmp_path) < 4_000_000
