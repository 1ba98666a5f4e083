"""What a rank reads next is on its node before it is read: in few requests, each byte once, within a budget."""

import contextlib
import functools
import threading
import time
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from helpers import remote_shards
from helpers.remote_shards import FOLDER, URI, assert_rows
from hypothesis import given
from hypothesis import strategies as st

from kftrain.data import read_ahead
from kftrain.data.dataset import ShardedDataset
from kftrain.data.loader import TrainLoader
from kftrain.data.mixture import Concatenated
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.read_ahead import AheadPlan, ReadAhead, choose_steps_ahead
from kftrain.data.schema import Window
from kftrain.data.shards import remote_bytes
from kftrain.data.shards.block_digests import DIGEST_BLOCK_BYTES, count_digest_blocks
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.manifest import read_manifest
from kftrain.data.shards.verified import Uses
from kftrain.data.tuning import Tuning
from kftrain.data.windows import TokenWindows
from kftrain.errors import StorageAwayError, StorageError
from kftrain.train.reading import _plan_ahead

NUM_SAMPLES = 300
BATCH = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return remote_shards.write_dataset(tmp_path_factory.mktemp("remote") / "shards", NUM_SAMPLES)


@pytest.fixture
def requests(folder, monkeypatch):
    remote_shards.upload(folder)
    with remote_shards.counted_requests(monkeypatch) as counted:
        yield counted
    fsspec.filesystem("memory").rm(FOLDER, recursive=True)


def train_of(tmp_path):
    return ShardedDataset(URI, read_manifest(URI), "train", Uses(NodeCache.of_node(str(tmp_path / "cache"), "auto")))


def loader_of(dataset, num_ranks=1, rank=0, num_steps=5):
    order = TrainingOrder(NUM_SAMPLES, 0, 16, 5)
    plan = AheadPlan(dataset.plan_fetches, num_steps)
    return order, TrainLoader(dataset, order, BatchPlan(BATCH, num_ranks), rank, Tuning(0), ahead=plan)


def wait_for(condition):
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_steps_read_what_is_there_each_byte_once_in_large_requests(tmp_path, requests):
    dataset = train_of(tmp_path)
    order, loader = loader_of(dataset, num_steps=1000)
    size = sum(shard.bytes for shard in dataset._shards)
    for step, batch in enumerate(loader.steps(0, NUM_SAMPLES // BATCH)):
        if not step:
            wait_for(lambda: sum(requests.of(".tar")) == size)
        assert_rows(batch.micro_batches[0].arrays, order.locate(np.arange(step * BATCH, (step + 1) * BATCH)))
    assert sum(requests.of(".tar")) == size
    assert len(requests.of(".tar")) <= 2.2 * size / 1e6, "the first step asks for its own blocks, too"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_of_a_node_share_what_is_fetched_ahead(tmp_path, requests, num_ranks):
    dataset = train_of(tmp_path)
    seen = []

    def train(rank):
        order, loader = loader_of(train_of(tmp_path), num_ranks, rank)
        plan = BatchPlan(BATCH, num_ranks)
        for step, batch in enumerate(loader.steps(3, 20), 3):
            numbers = order.locate(step * BATCH + np.arange(*plan.share(rank)))
            assert_rows(batch.micro_batches[0].arrays, numbers)
            seen.append(len(numbers))

    ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
    assert sum(seen) == 20 * BATCH
    assert sum(requests.of(".tar")) <= sum(shard.bytes for shard in dataset._shards)


def test_the_first_step_is_read_before_anything_is_planned(tmp_path, requests, monkeypatch):
    """With what comes after it under way, it would share the network with a window."""
    planned, cat_file = [], MemoryFileSystem.cat_file
    dataset = train_of(tmp_path)
    order, plan = TrainingOrder(NUM_SAMPLES, 0, 16, 5), AheadPlan(lambda numbers: planned.append(numbers) or [], 5)
    loader = TrainLoader(dataset, order, BatchPlan(BATCH, 1), 0, Tuning(0), ahead=plan)

    def cat(self, path, **options):
        time.sleep(0.02)
        assert not planned
        return cat_file(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat)
    steps = loader.steps(3, 5)
    assert_rows(next(steps).micro_batches[0].arrays, order.locate(np.arange(3 * BATCH, 4 * BATCH)))
    assert sum(requests.of(".tar")) <= 3 * BATCH * DIGEST_BLOCK_BYTES, "its own blocks"
    wait_for(lambda: planned)
    steps.close()


def test_a_step_that_is_needed_now_does_not_wait_for_what_is_read_ahead(tmp_path, requests):
    """As many requests ahead as there may be hang; whoever reads still has its turn."""
    hanging, goes_on = threading.Semaphore(0), threading.Event()

    def hang():
        with remote_bytes._turns:
            hanging.release()
            assert goes_on.wait(60)

    ahead = ReadAhead(AheadPlan(lambda numbers: [hang] * 100, 5), range(5), np.array)
    ahead.note_read(1)
    for _ in range(read_ahead.NUM_REQUESTS):
        assert hanging.acquire(timeout=60)
    answers = []
    reader = threading.Thread(target=lambda: answers.append(train_of(tmp_path).read(np.array([0, 250]))))
    reader.start()
    reader.join(60)
    goes_on.set()
    ahead.close()
    assert_rows(answers[0], [0, 250])


def test_whoever_comes_first_makes_the_planned_request(tmp_path, requests):
    dataset = train_of(tmp_path)
    fetches = dataset.plan_fetches(np.arange(NUM_SAMPLES))
    assert_rows(dataset.read(np.array([60])), [60])
    (first,) = requests.of(".tar")
    assert first > 2 << 20, "and not the block of that sample alone"
    for fetch in fetches:
        fetch()
    assert sum(requests.of(".tar")) == sum(shard.bytes for shard in dataset._shards)


def test_of_what_somebody_else_fetches_in_part_the_rest_is_fetched(tmp_path, requests):
    dataset = train_of(tmp_path)
    first, *_ = dataset.plan_fetches(np.arange(NUM_SAMPLES))
    shard = dataset._shards[0]
    file = dataset._cache.open(shard.blocks_sha256, shard.bytes)
    with file.claim(5, 6) as is_claimed:
        assert is_claimed
        first()
    num_blocks = count_digest_blocks(shard.bytes)
    assert file.list_missing(np.arange(num_blocks)).tolist() == [5]


def record_steps(made, num_steps=4):
    """A plan that notes the first step of what is fetched."""
    return AheadPlan(lambda numbers: [lambda: made.append(int(numbers[0]))], num_steps)


def test_a_window_is_fetched_when_the_one_before_it_is_begun():
    made = []
    ahead = ReadAhead(record_steps(made), range(7, 27), np.array)
    for step in range(7, 27):
        time.sleep(0.002)
        num_begun = 0 if step == 7 else min(5, (step - 8) // 4 + 2)
        wait_for(lambda count=num_begun: len(made) >= count)
        assert made == [7, 11, 15, 19, 23][:num_begun]
        ahead.note_read(step + 1)
    wait_for(ahead._thread.done)
    ahead.close()


@given(st.integers(1, 5000), st.integers(1, 4096), st.floats(1, 1e6), st.floats(0, 1e11))
def test_as_many_steps_are_fetched_together_as_fit(window_steps, step_samples, sample_bytes, max_bytes):
    num_steps = choose_steps_ahead(window_steps, step_samples, sample_bytes, max_bytes)
    if window_steps * step_samples * sample_bytes <= max_bytes:
        assert num_steps == window_steps
    else:
        assert 1 <= num_steps <= window_steps
        assert num_steps == 1 or num_steps * step_samples * (sample_bytes + DIGEST_BLOCK_BYTES) <= max_bytes


def test_what_goes_wrong_ahead_is_for_the_reader_and_ends_nothing():
    made, planned = [], []
    errors = [StorageError("away"), None, OSError("too many open files"), None, StorageAwayError("away")]

    def fail(error):
        if error is None:
            time.sleep(0.005)
        made.append(1)
        if error:
            raise error

    def plan(numbers):
        planned.append(len(made))
        if error := errors[len(planned) % 5]:
            raise error
        return [functools.partial(fail, error) for error in errors]

    ahead = ReadAhead(AheadPlan(plan, 1), range(50), np.array)
    for step in range(50):
        ahead.note_read(step + 1)
    wait_for(ahead._thread.done)
    ahead.note_read(50)
    good = [errors[number % 5] is None for number in range(1, 51)]
    assert planned == (5 * np.cumsum([0, *good[:-1]])).tolist(), "each window after all requests of those before it"
    assert len(made) == 5 * sum(good)
    ahead.close()


@pytest.mark.parametrize("is_in_plan", [True, False])
def test_a_bug_ahead_is_raised(is_in_plan):
    def fail(*_):
        raise KeyError("a bug")

    ahead = ReadAhead(AheadPlan(fail if is_in_plan else lambda numbers: [fail] * 3, 1), range(1), np.array)
    with contextlib.suppress(KeyError):
        ahead.note_read(1)
    wait_for(ahead._thread.done)
    with pytest.raises(KeyError, match="a bug"):
        ahead.note_read(1)
    ahead.close()


def test_a_window_beyond_the_nodes_room_is_fetched_in_parts(tmp_path, requests):
    """As `kftrain train` plans it: what is fetched and not read yet is within half of the node's cache."""
    samples, manifest = train_of(tmp_path), read_manifest(URI)
    for max_bytes, num_steps in ((1 << 30, 40), (32 << 20, 3), (1 << 20, 1)):
        config = SimpleNamespace(data=SimpleNamespace(shuffle_range_samples=40, shuffle_window_ranges=10))
        uses = Uses(NodeCache(tmp_path, max_bytes))
        training = SimpleNamespace(config=config, uses=uses, manifest=manifest, manifest_uri=URI)
        assert _plan_ahead(training, samples, BatchPlan(BATCH, 1)).num_steps == num_steps
    training.uses = Uses(NodeCache(None, 0))
    assert _plan_ahead(training, samples, None) is None
    training.uses, training.manifest_uri = uses, "/shards/manifest.json"
    assert _plan_ahead(training, samples, None) is None


def test_a_loader_that_is_left_makes_no_more_requests(tmp_path, requests):
    _, loader = loader_of(train_of(tmp_path), num_steps=1)
    steps = loader.steps(0, 30)
    next(steps)
    steps.close()
    wait_for(loader._read_ahead._thread.done)
    count = len(requests.all)
    time.sleep(0.1)
    assert len(requests.all) == count


def test_nothing_of_a_window_is_asked_for_after_the_end():
    made, begun, goes_on = [], threading.Event(), threading.Event()

    def fetch():
        made.append(1)
        begun.set()
        assert goes_on.wait(240)

    ahead = ReadAhead(AheadPlan(lambda numbers: [fetch] * 1000, 1), range(5), np.array)
    ahead.note_read(1)
    assert begun.wait(240)
    ahead.close()
    goes_on.set()
    wait_for(ahead._thread.done)
    assert len(made) <= read_ahead.NUM_REQUESTS


def test_views_of_a_split_ask_for_what_their_samples_lie_in(tmp_path, requests):
    for samples, numbers in (
        (Concatenated([train_of(tmp_path / "a"), train_of(tmp_path / "b")]), np.array([299, 599, 0, 300])),
        (TokenWindows(train_of(tmp_path / "c"), Window(4, 4, {})), np.array([3, 74, 0])),
    ):
        for fetch in samples.plan_fetches(numbers):
            fetch()
        assert not samples.plan_fetches(numbers)
    assert train_of(tmp_path).plan_fetches(np.array([0]))
