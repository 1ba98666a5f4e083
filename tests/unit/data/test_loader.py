import contextlib
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.splits import open_split
from helpers.toy_data import shard_toy, text_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data import dataset as datasets
from kftrain.data import loader as loaders
from kftrain.data.counters import Counters
from kftrain.data.dataset import ShardedDataset
from kftrain.data.decoding import Decoding
from kftrain.data.loader import MicroBatch, StepBatch, TrainLoader, choose_steps_of_read
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.tuning import Limits, Tuning
from kftrain.errors import DataError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    folder = tmp_path_factory.mktemp("sharded")
    return open_split(shard_toy(text_folder(folder / "texts", 400), folder / "root").manifest_uri, "train")


def loader_of(
    dataset: ShardedDataset, ranks: int = 1, rank: int = 0, batch: int = 16, micro: int = 0, prefetch: int = 2
) -> TrainLoader:
    order = TrainingOrder(dataset.num_samples, 7, 32, 4)
    return TrainLoader(dataset, order, BatchPlan(batch, ranks, micro), rank, Tuning(prefetch))


def kept(batches: list[StepBatch]) -> list[bytes]:
    return [
        bytes(row) + length.tobytes()
        for batch in batches
        for micro in batch.micro_batches
        for row, length, weight in zip(micro.arrays["data"], micro.arrays["length"], micro.weight, strict=True)
        if weight
    ]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_loss_terms_are_counted_where_a_batch_is_loaded(dataset: ShardedDataset, prefetch: int) -> None:
    threads = []

    def length(micro: MicroBatch) -> np.ndarray:
        threads.append(threading.current_thread().name.partition("_")[0])
        return micro.arrays["length"] * micro.weight

    order, plan = TrainingOrder(dataset.num_samples, 7, 32, 4), BatchPlan(10, 3, 3)
    for rank in range(3):  # the last one has padding
        batches = list(TrainLoader(dataset, order, plan, rank, Tuning(prefetch), count_terms=length).steps(0, 4))
        plain = list(TrainLoader(dataset, order, plan, rank, Tuning(prefetch)).steps(0, 4))
        lengths = [[int(n) for m in b.micro_batches for n in m.arrays["length"][m.weight > 0]] for b in batches]
        assert [batch.num_terms for batch in batches] == [sum(each) for each in lengths]
        assert [batch.num_terms for batch in plain] == [len(each) for each in lengths]
    assert set(threads) == ({"MainThread", "prefetch"} if prefetch else {"MainThread"}), "the first is waited for"


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_an_epoch_of_steps_holds_every_sample_exactly_once(dataset: ShardedDataset) -> None:
    everything, _ = dataset.read_range(0, dataset.num_samples)
    expected = [bytes(d) + n.tobytes() for d, n in zip(everything["data"], everything["length"], strict=True)]
    batch = next(size for size in range(11, 1000) if dataset.num_samples % size == 0)
    assert sorted(kept(list(loader_of(dataset, batch=batch).steps(0, dataset.num_samples // batch)))) == sorted(
        expected
    )


@settings(derandomize=True, max_examples=12, deadline=None)
@given(st.integers(1, 8), st.integers(0, 5), st.integers(0, 400), st.sampled_from([0, 1, 3]))
def test_ranks_micro_batches_prefetching_and_resuming_change_no_sample(
    dataset: ShardedDataset, ranks: int, micro: int, first_step: int, prefetch: int
) -> None:
    alone = list(loader_of(dataset, prefetch=0).steps(first_step, 4))
    parts = [
        list(loader_of(dataset, ranks, rank, micro=micro, prefetch=prefetch).steps(first_step, 4))
        for rank in range(ranks)
    ]
    for step in range(4):
        assert kept([part[step] for part in parts]) == kept([alone[step]])
        assert {part[step].first_sample for part in parts} == {(first_step + step) * 16}
        assert len({tuple(micro.weight.size for micro in part[step].micro_batches) for part in parts}) == 1


def test_weights_and_arrays_have_the_documented_form(dataset: ShardedDataset) -> None:
    (step,) = loader_of(dataset, ranks=3, rank=2, batch=10, micro=2).steps(0, 1)
    assert [micro.weight.tolist() for micro in step.micro_batches] == [[1, 1], [1, 0]]
    for micro in step.micro_batches:
        assert micro.weight.dtype == np.float32
        assert micro.arrays["data"].shape == (2, 8) and micro.arrays["length"].shape == (2,)


def test_what_a_consumer_does_to_a_batch_stays_in_that_batch(dataset: ShardedDataset) -> None:
    steps = loader_of(dataset, prefetch=0).steps(0, 2)
    first = next(steps).micro_batches[0]
    first.weight[:] = 0
    first.arrays["data"][:] = 0
    assert next(steps).micro_batches[0].weight.all()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_reader_is_raised_in_the_consumer_at_its_step(
    dataset: ShardedDataset, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    loader = loader_of(dataset, prefetch=prefetch)
    read = dataset.read
    missing = TrainingOrder(dataset.num_samples, 7, 32, 4).locate(np.array([3 * 16 + 5]))

    def failing(samples: np.ndarray) -> dict[str, np.ndarray]:
        if missing in samples:
            raise DataError("missing", where="train-000000.tar")
        return read(samples)

    monkeypatch.setattr(dataset, "read", failing)
    steps = loader.steps(0, 10)
    assert [next(steps).first_sample for _ in range(3)] == [0, 16, 32]
    with pytest.raises(DataError, match=r"train-000000\.tar: missing"):
        next(steps)
    assert not prefetch_threads()


def test_closing_the_iterator_or_dropping_it_ends_the_thread(dataset: ShardedDataset) -> None:
    steps = loader_of(dataset).steps(0, 1000)
    next(steps)
    assert prefetch_threads()
    steps.close()
    assert not prefetch_threads()
    steps = loader_of(dataset).steps(0, 1000)
    next(steps)
    del steps
    assert not prefetch_threads()
    assert len(list(loader_of(dataset).steps(0, 5))) == 5
    assert not prefetch_threads()


def test_reading_goes_on_while_the_consumer_computes(dataset: ShardedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(dataset, prefetch=2)
    read, started = dataset.read, []
    monkeypatch.setattr(dataset, "read", lambda samples: (started.append(len(samples) // 16), read(samples))[1])
    steps = loader.steps(0, 10)
    next(steps)
    deadline = time.monotonic() + 120
    while sum(started) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert started == [1, 2], "the step that was taken, and two ahead"
    steps.close()


def test_small_steps_are_read_together(dataset: ShardedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    read, sizes = dataset.read, []
    monkeypatch.setattr(dataset, "read", lambda samples: (sizes.append(len(samples)), read(samples))[1])
    batches = list(loader_of(dataset, prefetch=2).steps(3, 40))
    assert sizes == [16, 32, 64, 128, 256, 144]
    monkeypatch.undo()
    alone = list(loader_of(dataset, prefetch=0).steps(3, 40))
    for batch, expected in zip(batches, alone, strict=True):
        assert batch.first_sample == expected.first_sample and batch.num_terms == expected.num_terms
        for field, array in expected.micro_batches[0].arrays.items():
            assert np.array_equal(batch.micro_batches[0].arrays[field], array)


@given(st.integers(1, 1000), st.integers(0, 1 << 33))
def test_what_is_read_at_once_is_bounded(num_steps: int, step_bytes: int) -> None:
    found = choose_steps_of_read(num_steps, step_bytes)
    assert 1 <= found <= 2 * num_steps and (found == 1 or found * step_bytes <= 4 << 20)


def test_waiting_for_data_is_counted(dataset: ShardedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(dataset, prefetch=1)
    read = dataset.read
    monkeypatch.setattr(dataset, "read", lambda *arguments: (time.sleep(0.4), read(*arguments))[1])
    assert loader.counters.stall_seconds == 0
    list(loader.steps(0, 3))
    assert loader.counters.stall_seconds >= 0.4  # of two reads: one step, and two at once


def test_more_processes_than_samples_are_refused_with_both_numbers(tmp_path: Path) -> None:
    text_folder(tmp_path / "texts", 8)
    small = open_split(shard_toy(tmp_path / "texts", tmp_path / "root").manifest_uri, "train")
    ranks = small.num_samples + 1
    with pytest.raises(DataError, match=f"{ranks} processes for {small.num_samples} training samples"):
        loader_of(small, ranks=ranks, batch=ranks)


def test_a_wide_shuffle_window_opens_each_shard_once_an_epoch(
    dataset: ShardedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    class Counted(datasets.ShardReader):
        def __init__(self, uri, shard, *others):
            opened.append(shard.name)
            super().__init__(uri, shard, *others)

    monkeypatch.setattr(datasets, "MAX_OPEN_SHARDS", 1)
    monkeypatch.setattr(datasets, "ShardReader", Counted)
    num_shards = len(dataset._shards)
    assert num_shards >= 3
    fresh = open_split(dataset._uri, "train")
    order = TrainingOrder(fresh.num_samples, 7, 4, fresh.num_samples // 4)
    fresh.expect_window(order.window_ranges, order.range_samples)
    loader = TrainLoader(fresh, order, BatchPlan(16, 1), 0, Tuning(0))
    for _ in loader.steps(0, fresh.num_samples // 16):
        pass
    assert sorted(opened) == sorted(set(opened)) and len(opened) == num_shards


def test_a_window_is_kept_open_only_as_far_as_open_files_allow(
    dataset: ShardedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.resource, "getrlimit", lambda which: (1024, 4096))
    num_shards = 10_000
    many = open_split(dataset._uri, "train")
    many._shards, many._shard_starts = many._shards[:1] * num_shards, np.arange(num_shards + 1) * 500
    for window, expected in ((1, datasets.MAX_OPEN_SHARDS), (50, 400), (10_000, 512)):
        many.expect_window(window, 1024)
        assert many._max_open == expected
    dataset.expect_window(10_000, 1024)
    assert dataset._max_open == datasets.MAX_OPEN_SHARDS  # it has fewer


class Pretended:
    """Samples in memory; a read may fail, or give files."""

    num_samples = 64

    def __init__(self, fails_at: int = 0, file_bytes: int = 0) -> None:
        self.num_reads = 0
        self._fails_at = fails_at
        self._file_bytes = file_bytes

    def read(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        self.num_reads += 1
        if self.num_reads == self._fails_at:
            raise DataError("damaged, once")
        if not self._file_bytes:
            return {"number": samples.copy()}
        files = np.empty(len(samples), object)
        files[:] = [bytes(self._file_bytes)] * len(samples)
        return {"file": files}

    def place_of(self, sample: int) -> str:
        return f"sample {sample}"

    def locate(self, positions: np.ndarray) -> np.ndarray:
        return positions % self.num_samples


@pytest.mark.parametrize("steps", [0, 1, 2, 8])
@pytest.mark.parametrize("fails_at", [2, 3, 5])
def test_what_can_be_read_when_it_is_asked_for_again_ends_nothing(steps: int, fails_at: int) -> None:
    samples = Pretended(fails_at)
    taken: list[int] = []
    for step in range(3):
        loader = TrainLoader(samples, samples, BatchPlan(4, 1), 0, Tuning(steps))
        try:
            for batch in loader.steps(len(taken), 100 - len(taken)):
                taken.append(batch.first_sample)
                assert (batch.micro_batches[0].arrays["number"] == np.arange(4) + 4 * (len(taken) - 1) % 64).all()
            break
        except DataError:  # a read of one step, which nobody repeats here
            assert step < 2 and (steps == 0 or fails_at == 2 or steps == 1)
    assert taken == list(range(0, 400, 4))


@pytest.mark.timeout(120)
def test_only_the_next_two_steps_are_sent_to_the_device_however_many_are_ahead() -> None:
    samples, sent = Pretended(), []
    decoding = Decoding(lambda sample, generator: sample, 0)
    loader = TrainLoader(
        *(samples, samples, BatchPlan(4, 1), 0, Tuning(16, 2, 2)),
        decoding=decoding,
        send=lambda micro, terms: sent.append(micro.arrays["number"][0]),
    )
    with contextlib.closing(loader), contextlib.closing(loader.steps(0, 100)) as steps:
        for number in range(5):
            next(steps)
            deadline = time.monotonic() + 60
            while (samples.num_reads < 17 + number or len(sent) < number + 3) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.05)
            assert len(sent) == number + 3, "the one that was taken, and two more"
            assert samples.num_reads >= 17 + number, "host memory holds more of them"


def test_one_thread_alone_writes_a_loaders_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    writers = set()

    class Noted(Counters):
        def add(self, other: Counters) -> None:
            writers.add((id(self), threading.current_thread().name.partition("_")[0]))
            super().add(other)

    monkeypatch.setattr(loaders, "Counters", Noted)
    samples = Pretended()
    loader = TrainLoader(
        *(samples, samples, BatchPlan(4, 1), 0, Tuning(8, 2, 2)),
        decoding=Decoding(lambda sample, generator: sample, 0),
    )
    with contextlib.closing(loader):
        list(loader.steps(0, 200))
    assert {name for number, name in writers if number == id(loader.counters)} == {"MainThread"}
    assert loader.counters.num_steps == loader.counters.num_made == 200


@pytest.mark.timeout(120)
def test_files_that_no_task_decodes_count_with_their_bytes() -> None:
    samples, seen = Pretended(file_bytes=1000), []
    loader = TrainLoader(samples, samples, BatchPlan(32, 1), 0, Tuning(2))
    monitor = loader._tuner.take
    loader._tuner.take = lambda step_bytes: (seen.append(step_bytes), monitor(step_bytes))[1]  # type: ignore[method-assign]
    list(loader.steps(0, 20))
    assert set(seen) == {32_000}


@pytest.mark.timeout(120)
def test_steps_beyond_those_that_are_sent_are_read_by_one_request_at_a_time() -> None:
    samples = Pretended()
    loader = TrainLoader(samples, samples, BatchPlan(4, 1), 0, Tuning(16))
    with contextlib.closing(loader), contextlib.closing(loader.steps(0, 100)) as steps:
        next(steps)
        deadline = time.monotonic() + 60
        while samples.num_reads < 9 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert samples.num_reads == 9, "the first step, and two at a time"


@pytest.mark.timeout(120)
def test_a_step_that_somebody_has_only_looked_at_says_nothing_about_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the dry run of a model does, before the training asks for the same step; the store is slow."""
    samples, read = Pretended(), Pretended.read
    monkeypatch.setattr(Pretended, "read", lambda self, numbers: (time.sleep(0.1), read(self, numbers))[1])
    loader = TrainLoader(samples, samples, BatchPlan(4, 1), 0, Tuning(2), limits=Limits(Tuning(8, 0, 4)))
    with contextlib.closing(loader):
        with contextlib.closing(loader.steps(0, 1)) as steps:
            next(steps)
        assert [batch.first_sample for batch in loader.steps(0, 5)] == [0, 4, 8, 12, 16]
