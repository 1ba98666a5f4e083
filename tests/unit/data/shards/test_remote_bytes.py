"""Ranged reads of remote shards: nothing is used that is not verified, nothing is read twice, little is asked for."""

import errno
import fcntl
import functools
import os
import threading
import time

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from helpers import remote_shards
from helpers.remote_shards import FOLDER, URI, assert_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kftrain.core import remote, storage, threads
from kftrain.data.dataset import ShardedDataset
from kftrain.data.settings import DataConfig
from kftrain.data.shards import remote_bytes
from kftrain.data.shards.block_digests import DIGEST_BLOCK_BYTES
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.manifest import read_manifest
from kftrain.data.shards.verified import FirstUse, make_first_use
from kftrain.errors import DataError, StorageAwayError

NUM_SAMPLES = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return remote_shards.write_dataset(tmp_path_factory.mktemp("remote") / "shards", NUM_SAMPLES)


@pytest.fixture
def manifest(folder):
    uri = remote_shards.upload(folder)
    yield read_manifest(uri)
    fsspec.filesystem("memory").rm(FOLDER, recursive=True)


@pytest.fixture
def requests(monkeypatch, manifest):
    with remote_shards.counted_requests(monkeypatch) as counted:
        yield counted


def first_use_of(tmp_path, manifest, **data):
    config = DataConfig.model_validate({"cache_dir": str(tmp_path / "cache"), **data})
    return make_first_use(config, manifest.dataset_digest)


def open_train(tmp_path, manifest, **data):
    return ShardedDataset(URI, manifest, "train", first_use_of(tmp_path, manifest, **data))


def damage(name, position, num_bytes=1):
    store = fsspec.filesystem("memory")
    content = bytearray(store.cat_file(f"{FOLDER}/{name}"))
    for place in range(position, position + num_bytes):
        content[place] ^= 0x55
    store.pipe_file(f"{FOLDER}/{name}", bytes(content))


@pytest.mark.parametrize("cache_bytes", ["auto", 0, 1 << 20])
def test_rows_are_those_that_were_written_whatever_is_kept(tmp_path, manifest, cache_bytes):
    dataset, rng = open_train(tmp_path, manifest, cache_bytes=cache_bytes), np.random.default_rng(0)
    for _ in range(5):
        numbers = rng.integers(0, NUM_SAMPLES, 32)
        assert_rows(dataset.read(numbers), numbers)
    assert_rows(dataset.read_range(0, NUM_SAMPLES)[0], range(NUM_SAMPLES))
    assert dataset.extensions_of(np.array([7, 3]))["image"] == ["jpg", "jpg"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2_990_000), st.integers(0, 700_000)), min_size=1, max_size=8))
def test_any_ranges_of_a_shard_are_its_bytes(manifest, spans):
    shard = manifest.splits["train"].shards[0]
    content = fsspec.filesystem("memory").cat_file(f"{FOLDER}/{shard.name}")
    opened = remote_bytes.RemoteBytes(URI, shard, NodeCache(None, 0), lambda start, stop: "")
    starts = np.minimum([start for start, _ in spans], shard.bytes)
    stops = np.minimum(starts + [size for _, size in spans], shard.bytes)
    files = opened.fetch(starts, stops).files(starts, stops - starts)
    assert [bytes(file) for file in files] == [content[a:b] for a, b in zip(starts, stops, strict=True)]


def test_a_node_reads_what_it_needs_once_and_asks_no_size(tmp_path, manifest, requests):
    numbers = np.array([5, 6, 250])
    for _ in range(2):  # the second one is another process, or the next attempt
        dataset = open_train(tmp_path, manifest)
        for _ in range(3):
            assert_rows(dataset.read(numbers), numbers)
        dataset._uses.require_verified()
    assert not requests.of("", kind="HEAD")
    assert len(requests.of(".index.npy")) == len(requests.of(".blocks")) == 2, "one of each shard"
    assert sum(requests.of(".tar")) <= 4 * DIGEST_BLOCK_BYTES


def test_what_lies_side_by_side_is_one_request_of_a_few_megabytes(tmp_path, manifest, requests):
    dataset = open_train(tmp_path, manifest)
    dataset.read_range(0, NUM_SAMPLES)
    shards = manifest.splits["train"].shards
    assert sum(requests.of(".tar")) == sum(shard.bytes for shard in shards), "each byte once"
    assert len(requests.of(".tar")) == sum(-(-shard.bytes // (4 << 20)) for shard in shards)
    requests.all.clear()
    other = open_train(tmp_path / "other", manifest)
    for number in range(0, 160, 2):
        other.read_range(number, number + 2)
    assert len(requests.of(".tar")) <= 3, "who reads one after another is given what comes next"
    assert max(requests.of(".tar")) > 2 << 20


def test_a_single_sample_costs_its_blocks(tmp_path, manifest, requests):
    open_train(tmp_path, manifest).read(np.array([60]))
    assert sum(requests.of(".tar")) <= 2 * DIGEST_BLOCK_BYTES


def test_a_block_between_two_that_are_needed_comes_along(tmp_path, manifest, requests):
    numbers = np.flatnonzero(np.isin(find_blocks_of(manifest), [3, 5]))
    dataset = open_train(tmp_path, manifest)
    assert_rows(dataset.read(numbers), numbers)
    assert len(requests.of(".tar")) == 1, "which takes less time than two"
    requests.all.clear()
    numbers = np.flatnonzero(np.isin(find_blocks_of(manifest), [9, 12]))
    assert_rows(dataset.read(numbers), numbers)
    assert requests.of(".tar") == [DIGEST_BLOCK_BYTES] * 2


def find_blocks_of(manifest):
    """The block of each sample of the first shard whose bytes are in one; else -1."""
    index = np.load(fsspec.filesystem("memory").open(f"{FOLDER}/{name_of(manifest)[:-4]}.index.npy"))
    first = index[:, 1] // DIGEST_BLOCK_BYTES
    last = (index[:, 3] + index[:, 4]) // DIGEST_BLOCK_BYTES
    return np.where(first == last, first, -1)


def test_the_requests_of_a_process_that_are_under_way_at_once_are_few(tmp_path, manifest, monkeypatch):
    """However many shards and readers: each takes megabytes, and drivers have few connections."""
    lock, now, most = threading.Lock(), [0], [0]
    are_all, read_range = threading.Event(), storage.read_range

    def slow(uri, *arguments):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == remote_bytes.MAX_FETCHES:
                are_all.set()
        are_all.wait(120)  # nobody is done before as many as may be are under way
        time.sleep(0.02)  # one more would begin meanwhile
        content = read_range(uri, *arguments)
        with lock:
            now[0] -= 1
        return content

    datasets = [open_train(tmp_path / str(number), manifest) for number in range(3)]
    for dataset in datasets:
        dataset.sample_bytes(np.arange(NUM_SAMPLES))  # opens shards
    monkeypatch.setattr(storage, "read_range", slow)
    numbers = np.arange(0, NUM_SAMPLES, 20)
    answers = threads.call_together(lambda dataset: dataset.read(numbers), datasets, 3)
    assert all(len(answer["rows"]) == len(numbers) for answer in answers)
    assert most[0] == remote_bytes.MAX_FETCHES


def flaky(monkeypatch, spoil):
    """Whatever `spoil` makes of the bytes of a tar comes instead of them: given the number of the request."""
    cat_file, numbers = MemoryFileSystem.cat_file, iter(range(10**6))

    def cat(self, path, start=None, end=None, **options):
        content = cat_file(self, path, start=start, end=end, **options)
        return spoil(next(numbers), content) if path.endswith(".tar") else content

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat)


@pytest.mark.parametrize("cache_bytes", ["auto", 0])
def test_a_block_that_comes_damaged_once_is_asked_for_again(tmp_path, manifest, monkeypatch, requests, cache_bytes):
    flaky(monkeypatch, lambda number, content: content if number else bytes([content[0] ^ 1]) + content[1:])
    dataset = open_train(tmp_path, manifest, cache_bytes=cache_bytes)
    assert_rows(dataset.read_range(0, 80)[0], range(80))
    first, second, third = requests.of(".tar")
    assert second == DIGEST_BLOCK_BYTES == first - third, "and no other one"


def test_an_answer_that_is_cut_off_is_used_as_far_as_it_goes(tmp_path, manifest, monkeypatch, requests):
    flaky(monkeypatch, lambda number, content: content if number else content[: 5 * DIGEST_BLOCK_BYTES + 77])
    dataset = open_train(tmp_path, manifest)
    assert_rows(dataset.read_range(0, 80)[0], range(80))
    first, second = requests.of(".tar")
    assert first - second == 5 * DIGEST_BLOCK_BYTES


def name_of(manifest, number=0):
    return manifest.splits["train"].shards[number].name


@pytest.mark.parametrize("cache_bytes", ["auto", 0])
def test_a_damaged_block_is_named_with_its_shard_and_its_samples(tmp_path, manifest, cache_bytes):
    dataset = open_train(tmp_path, manifest, cache_bytes=cache_bytes)
    index = np.load(fsspec.filesystem("memory").open(f"{FOLDER}/{name_of(manifest)[:-4]}.index.npy"))
    damage(name_of(manifest), int(index[60, 1]), 10)
    (block,) = index[60:61, 1] // DIGEST_BLOCK_BYTES
    first, last = block * DIGEST_BLOCK_BYTES, (block + 1) * DIGEST_BLOCK_BYTES
    inside = [n for n, (a, size) in enumerate(index[:, 1:3].tolist()) if a < last and a + size > first]
    with pytest.raises(DataError, match=rf"{name_of(manifest)}: its content has changed") as caught:
        dataset.read(np.array([60]))
    assert f"dir/{inside[0]:04d}" in caught.value.line and caught.value.exit_code == 11
    assert f"and {len(inside) - 3} more" in caught.value.line
    with pytest.raises(DataError):
        dataset.read(np.array([60]))
    good = np.array([0, 1, 250])
    assert_rows(dataset.read(good), good)


def test_a_shard_of_another_length_is_named(tmp_path, manifest):
    store = fsspec.filesystem("memory")
    content = store.cat_file(f"{FOLDER}/{name_of(manifest)}")
    store.pipe_file(f"{FOLDER}/{name_of(manifest)}", content[:-700_000])
    dataset = open_train(tmp_path, manifest)
    with pytest.raises(DataError, match=rf"{name_of(manifest)}: truncated or changed: it has"):
        dataset.read_range(0, 100)
    store.rm(f"{FOLDER}/{name_of(manifest)}")
    with pytest.raises(DataError, match=rf"{name_of(manifest)}: missing"):
        dataset.read_range(0, 100)


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        *((suffix, how) for suffix in (".blocks", ".index.npy") for how in ("damaged", "longer", "shorter")),
        (".index.npy", "gone"),
    ],
)
def test_a_table_or_an_index_that_is_another_one_is_named(tmp_path, manifest, suffix, change):
    store, path = fsspec.filesystem("memory"), f"{FOLDER}/{name_of(manifest)[:-4]}{suffix}"
    content = store.cat_file(path)
    changed = {"damaged": content[:-1] + b"x", "longer": b"x" + content, "shorter": content[:-1]}
    store.rm(path) if change == "gone" else store.pipe_file(path, changed[change])
    with pytest.raises(DataError, match=rf"{name_of(manifest)[:-4]}{suffix}: "):
        open_train(tmp_path, manifest).read(np.array([3]))


def test_a_shard_that_is_replaced_while_it_is_read_gives_no_sample_of_both(tmp_path, manifest):
    dataset = open_train(tmp_path, manifest)
    assert_rows(dataset.read(np.array([0])), [0])
    store = fsspec.filesystem("memory")
    content = store.cat_file(f"{FOLDER}/{name_of(manifest)}")
    store.pipe_file(f"{FOLDER}/{name_of(manifest)}", content[::-1])
    assert_rows(dataset.read(np.array([0])), [0])
    with pytest.raises(DataError, match="its content has changed"):
        dataset.read(np.array([60]))


def test_whoever_waits_for_a_block_that_another_thread_fetches_fetches_nothing(
    tmp_path, manifest, monkeypatch, requests
):
    begun, goes_on = threading.Event(), threading.Event()

    def slow(number, content):
        begun.set()
        assert goes_on.wait(240)
        return content

    flaky(monkeypatch, slow)
    datasets = [open_train(tmp_path, manifest) for _ in range(4)]
    answers = []
    readers = [threading.Thread(target=lambda one=one: answers.append(one.read(np.array([50])))) for one in datasets]
    readers[0].start()
    assert begun.wait(240)
    for reader in readers[1:]:
        reader.start()
    readers[1].join(0.3)
    assert readers[1].is_alive()
    goes_on.set()
    for reader in readers:
        reader.join(240)
    for arrays in answers:
        assert_rows(arrays, [50])
    assert len(answers) == 4 and sum(requests.of(".tar")) <= 2 * DIGEST_BLOCK_BYTES


def test_nobody_waits_for_ever_for_a_block_that_another_one_has_claimed(tmp_path, manifest, monkeypatch):
    monkeypatch.setattr(remote, "deadline", remote.Deadline(0.3, 0.3, 1e9))
    dataset = open_train(tmp_path, manifest)
    shard = manifest.splits["train"].shards[0]
    file = NodeCache.of_node(str(tmp_path / "cache"), "auto").open(shard.blocks_sha256, shard.bytes)
    with file.claim(0, 12) as is_claimed:
        assert is_claimed
        assert_rows(dataset.read(np.array([5])), [5])


def test_a_stopped_process_costs_the_others_their_patience_once(tmp_path, manifest, monkeypatch, requests):
    monkeypatch.setattr(remote, "deadline", remote.Deadline(2.0, 2.0, 1e9))
    dataset = open_train(tmp_path, manifest)
    shard = manifest.splits["train"].shards[0]
    file = NodeCache.of_node(str(tmp_path / "cache"), "auto").open(shard.blocks_sha256, shard.bytes)
    with file.claim(0, 12) as is_claimed:
        assert is_claimed
        seconds = []
        for number in range(0, 40, 4):
            start = time.monotonic()
            assert_rows(dataset.read(np.array([number])), [number])
            seconds.append(time.monotonic() - start)
        assert seconds[0] > 1.9 and sum(seconds) < 6, seconds
        assert_rows(dataset.read(np.array([80, 85, 90, 200])), [80, 85, 90, 200])
    assert file.list_missing(np.arange(16)).size < 16, "what nobody has claimed is kept on the node still"


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOLCK, errno.ENOSYS])
def test_nothing_waits_where_the_system_has_no_locks_on_bytes(tmp_path, manifest, monkeypatch, error):
    def refuse(*arguments):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(remote, "deadline", remote.Deadline(30.0, 30.0, 1e9))
    start, dataset = time.monotonic(), open_train(tmp_path, manifest)
    for number in range(0, 300, 50):
        assert_rows(dataset.read(np.array([number])), [number])
    assert time.monotonic() - start < 20


def test_no_room_for_a_block_does_not_fetch_those_again_that_are_there(tmp_path, manifest, monkeypatch, requests):
    dataset = open_train(tmp_path, manifest)
    before = np.array([0, 2, 60, 62])
    assert_rows(dataset.read(before), before)
    monkeypatch.setattr(NodeCache, "reserve", lambda self, file, num_bytes: file.is_private)
    requests.all.clear()
    numbers = np.array([0, 2, 60, 62, 30])
    for _ in range(3):
        assert_rows(dataset.read(numbers), numbers)
    assert len(requests.of(".tar")) == 1 and sum(requests.of(".tar")) <= 2 * DIGEST_BLOCK_BYTES


def without_tables(manifest):
    """As a release before has written it."""
    old = manifest.model_copy(deep=True)
    for split in old.splits.values():
        split.shards[:] = [shard.model_copy(update={"blocks_sha256": ""}) for shard in split.shards]
    return old


def test_what_nobody_verified_does_not_outlive_the_process_that_fetched_it(tmp_path, manifest, monkeypatch, requests):
    """The store gives wrong bytes once, and the whole that is hashed right ones: they are kept nowhere."""
    old, numbers = without_tables(manifest), np.array([0, 2, 1, 3])
    with monkeypatch.context() as patch:
        flaky(patch, lambda number, content: content if number else bytes(byte ^ 1 for byte in content))
        dataset = open_train(tmp_path, old)
        dataset.read(numbers)
        dataset._uses.require_verified()
    for _ in range(2):  # as other processes, or the next run
        dataset = open_train(tmp_path, old)
        assert_rows(dataset.read(numbers), numbers)
    folder = tmp_path / "cache" / f"kftrain-{os.getuid()}" / "shards"
    assert {path.suffix for path in folder.iterdir()} == {".file"}


@pytest.mark.parametrize("suffix", [".blocks", ".index.npy"])
def test_a_small_file_whose_ranges_always_differ_from_its_whole_is_given_up(tmp_path, manifest, monkeypatch, suffix):
    read_range = storage.read_range

    def read(uri, *span):
        content = read_range(uri, *span)
        return content[::-1] if uri.endswith(suffix) else content

    monkeypatch.setattr(storage, "read_range", read)
    with pytest.raises(StorageAwayError, match=rf"{suffix}: something else answers for its store"):
        open_train(tmp_path, manifest).read(np.array([3]))


def test_the_old_way_is_told_once_and_waited_for(tmp_path, manifest, folder, capsys, monkeypatch):
    store = fsspec.filesystem("memory")
    whole = []
    monkeypatch.setattr(FirstUse, "_settle", functools.partialmethod(lambda self, file: not whole.append(file.uri)))
    open_train(tmp_path, manifest).read_range(0, NUM_SAMPLES)
    assert not whole, "nothing is hashed that verifies itself"
    old = without_tables(manifest)
    store.rm([path for path in store.ls(FOLDER, detail=False) if path.endswith(".blocks")])
    assert "kftrain shards verify" not in capsys.readouterr().out
    dataset = open_train(tmp_path, old)
    assert_rows(dataset.read_range(0, NUM_SAMPLES)[0], range(NUM_SAMPLES))
    dataset._uses.require_verified()
    assert sorted(whole) == [f"memory://remote-shards/{shard.name}" for shard in old.splits["train"].shards]
    assert capsys.readouterr().out.count("kftrain shards verify") == 1


def test_a_table_that_is_missing_is_told_once_and_a_damaged_one_refused(tmp_path, manifest, capsys):
    store, (first, second) = fsspec.filesystem("memory"), [name_of(manifest, number) for number in (0, 1)]
    for name in (first, second):
        store.rm(f"{FOLDER}/{name.replace('.tar', '.blocks')}")
    dataset = open_train(tmp_path, manifest)
    assert_rows(dataset.read_range(0, NUM_SAMPLES)[0], range(NUM_SAMPLES))
    dataset._uses.require_verified()
    assert capsys.readouterr().out.count("kftrain shards verify") == 1
    store.pipe_file(f"{FOLDER}/{first.replace('.tar', '.blocks')}", b"x" * 32)
    with pytest.raises(DataError, match=r"000\.blocks: .*kftrain shards verify"):
        open_train(tmp_path, manifest).read_range(0, NUM_SAMPLES)


def test_a_damaged_shard_of_before_fails_the_barrier_still(tmp_path, manifest):
    old = without_tables(manifest)
    damage(name_of(manifest), 2_000_000)
    dataset = open_train(tmp_path, old)
    dataset.read(np.array([0]))
    with pytest.raises(DataError, match=f"{name_of(manifest)}: its content has changed"):
        dataset._uses.require_verified()
    assert os.listdir(tmp_path / "cache")
