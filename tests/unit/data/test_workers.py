"""Reading and decoding by threads and by processes: the same rows from any number of either."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import decoded_samples
from helpers.decoded_samples import NUM_SAMPLES, SEED, InMemory, Shuffled, decoding
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.decoding import Generators
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan
from kftrain.data.tuning import Limits, Tuning
from kftrain.data.worker_processes import WorkerCommand
from kftrain.errors import DataError, FailureClass, RetryableError, UserCodeError

BATCH = 6
TESTS = Path(__file__).parents[2]


def command(decode="augment", max_bad=0):
    words = [sys.executable, "-m", "helpers.decoded_samples"]
    return WorkerCommand(words, {"name": decode, "max_bad_samples": max_bad})


def ids_of_workers(loader):
    return [worker.child.process_id for worker in loader._fetchers[-1]._workers]


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{TESTS.parent}")


@pytest.fixture
def new_loader():
    made = []

    def new(count=0, kind="threads", decode="augment", max_bad=0, ranks=1, rank=0, micro=0, prefetch=2):
        used = decoding(decode, max_bad)
        plan, tuning = BatchPlan(BATCH, ranks, micro), Tuning(prefetch, count, max(1, count), kind)
        started = command(decode, max_bad)
        made.append(TrainLoader(InMemory(), Shuffled(), plan, rank, tuning, decoding=used, command=started))
        return made[-1]

    yield new
    for loader in made:
        loader.close()


def expected(position):
    """By other means: a fresh generator of numpy with the key and the counter of that position."""
    epoch, offset = divmod(position, NUM_SAMPLES)
    number = (offset * (5 + epoch % 3) + epoch) % NUM_SAMPLES
    key = Generators(SEED)._philox.state["state"]["key"]
    generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, position, 0]))
    return np.r_[np.float64(number), generator.random(2), generator.normal(size=3)]


def rows(batches):
    """Copies of the rows of weight 1."""
    return [
        row.copy()
        for batch in batches
        for micro in batch.micro_batches
        for row, weight in zip(micro.arrays["row"], micro.weight, strict=True)
        if weight
    ]


def assert_steps(found, first_step, num_steps):
    positions = range(first_step * BATCH, (first_step + num_steps) * BATCH)
    assert len(found) == len(positions)
    for row, position in zip(found, positions, strict=True):
        assert row.tobytes() == expected(position).tobytes(), position


@settings(derandomize=True, max_examples=20, deadline=None)
@given(st.sampled_from([0, 1, 3]), st.sampled_from([1, 2, 4]), st.integers(0, 3), st.integers(0, 30), st.integers(0, 3))
def test_threads_give_the_same_bytes_for_any_number_of_them_of_ranks_and_after_a_resume(
    count, ranks, micro, first_step, prefetch
):
    loaders = [
        TrainLoader(
            *(InMemory(), Shuffled(), BatchPlan(BATCH, ranks, micro), rank, Tuning(prefetch, count, max(1, count))),
            decoding=decoding("augment"),
        )
        for rank in range(ranks)
    ]
    steps = zip(*(loader.steps(first_step, 5) for loader in loaders), strict=True)
    assert_steps(rows([part for parts in steps for part in parts]), first_step, 5)
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 1)])
def test_processes_that_are_started_once_give_the_same_bytes_as_threads(new_loader, count, ranks):
    loaders = [new_loader(count, "processes", ranks=ranks, rank=rank) for rank in range(ranks)]
    seen = set()
    for first_step in (0, 11):
        steps = zip(*(loader.steps(first_step, 4) for loader in loaders), strict=True)
        assert_steps(rows([part for parts in steps for part in parts]), first_step, 4)
        seen.update(process_id for loader in loaders for process_id in ids_of_workers(loader))
    assert len(seen) == ranks * count
    for loader in loaders:
        loader.close()
    assert not any(map(psutil.pid_exists, seen))


def test_batches_that_are_kept_stay_as_they_are_and_those_that_are_dropped_give_their_memory_back(new_loader):
    loader = new_loader(2, "processes")
    kept = list(loader.steps(0, 12))
    assert loader._fetchers[-1]._slots.num_slots >= 12
    assert_steps(rows(kept), 0, 12)
    before = loader._fetchers[-1]._slots.num_slots
    del kept
    gc.collect()
    for number, batch in enumerate(loader.steps(0, 40)):
        assert_steps(rows([batch]), number, 1)
    assert loader._fetchers[-1]._slots.num_slots == before, "no new memory"


def test_an_iterator_that_is_closed_early_leaves_nothing_for_the_next_one(new_loader):
    for kind, count in (("threads", 3), ("processes", 1)):
        loader = new_loader(count, kind, prefetch=3)
        for first_step in (0, 5, 20):
            steps = loader.steps(first_step, 10)
            assert_steps(rows([next(steps)]), first_step, 1)
            steps.close()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_fault_9_a_bad_sample_fails_with_shard_and_key(new_loader, kind):
    loader = new_loader(2, kind, "bad_at_7_and_20")
    with pytest.raises(DataError, match=r"train-000\.tar, key-(7|20): task\.decode: not an image") as caught:
        list(loader.steps(0, 10))
    assert caught.value.exit_code == 11


@pytest.mark.parametrize(("kind", "count"), [("threads", 0), ("threads", 3), ("processes", 2)])
def test_bad_samples_that_are_tolerated_have_weight_0_on_whichever_rank_reads_them(new_loader, kind, count):
    num_steps = 2 * NUM_SAMPLES // BATCH
    numbers, left_out = [], []
    for rank in range(2):
        loader = new_loader(count, kind, "bad_at_7_and_20", max_bad=2, ranks=2, rank=rank)
        for batch in loader.steps(0, num_steps):
            numbers += [int(row[0]) for row in rows([batch])]
            left_out += batch.bad_samples
            assert batch.num_terms == sum(float(micro.weight.sum()) for micro in batch.micro_batches)
            for micro in batch.micro_batches:
                replaced = micro.arrays["row"][micro.weight == 0]
                assert all(row.tobytes() == expected(0).tobytes() for row in replaced)
    wanted = Shuffled().locate(np.arange(num_steps * BATCH)).tolist()
    assert sorted(numbers) == sorted(number for number in wanted if number not in (7, 20))
    assert sorted(sample.number for sample in left_out) == sorted(n for n in wanted if n in (7, 20))
    for sample in left_out:
        assert sample.error.line == f"train-000.tar, key-{sample.number}: task.decode: not an image"


def test_fault_11_a_worker_that_is_killed_is_named_and_retryable_and_the_rest_is_exact_afterwards(new_loader):
    loader = new_loader(2, "processes", "dies_at_11")
    steps = loader.steps(0, 20)
    done = 0
    with pytest.raises(RetryableError, match=r"data worker [01] \(process \d+\) was killed by SIGKILL") as caught:
        for batch in steps:
            assert_steps(rows([batch]), done, 1)
            done += 1
    assert caught.value.exit_code == 138 and caught.value.failure_class == FailureClass.HOST_MEMORY
    assert 11 in Shuffled().locate(np.arange(done * BATCH, (done + 1) * BATCH))
    loader.close()
    again = new_loader(3, "processes")
    assert_steps(rows(again.steps(done, 5)), done, 5)


def test_a_worker_killed_while_nobody_waits_for_it_is_named(new_loader):
    loader = new_loader(2, "processes", prefetch=1)
    steps = loader.steps(0, 50)
    next(steps)
    victim = ids_of_workers(loader)[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RetryableError, match=rf"data worker 1 \(process {victim}\) was killed by SIGKILL"):
        list(steps)


PARENT = """
import sys
from helpers.decoded_samples import InMemory, Shuffled, decoding
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan
from kftrain.data.tuning import Tuning
from kftrain.data.worker_processes import WorkerCommand
command = WorkerCommand([sys.executable, "-m", "helpers.decoded_samples"], {"name": "slow"})
how, tuning = decoding("slow"), Tuning(2, 2, 1, "processes")
loader = TrainLoader(InMemory(), Shuffled(), BatchPlan(6, 1), 0, tuning, decoding=how, command=command)
steps = loader.steps(0, 100)
next(steps)
print(*(worker.child.process_id for worker in loader._fetchers[-1]._workers), flush=True)
list(steps)
"""


def test_workers_of_a_process_that_is_killed_end_and_nothing_stays_in_shared_memory():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process_ids = [int(word) for word in parent.stdout.readline().split()]
        named = [file for process_id in (parent.pid, *process_ids) for file in _shared_files(process_id)]
        parent.kill()
    deadline = time.monotonic() + 240
    while any(map(_runs, process_ids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(process_ids) == 2 and not any(map(_runs, process_ids))
    assert not named, "what has no name is gone with the last process that has it"


def _shared_files(process_id):
    """What a process has mapped or opened that has a name in shared memory; other tests have files there, too."""
    opened = []
    for path in Path(f"/proc/{process_id}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            opened.append(os.readlink(path))
    mapped = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{process_id}/maps").read_text().splitlines()]
    return [file for file in opened + mapped if file.startswith("/dev/shm/") and not file.endswith("(deleted)")]


def _runs(process_id):
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_decoding_that_differs_from_sample_to_sample_is_the_users_error(new_loader, monkeypatch):
    def ragged(sample, generator):
        return {"row": np.zeros(int(sample["number"]) % 7 + 1)}

    monkeypatch.setattr(decoded_samples, "ragged", ragged, raising=False)
    with pytest.raises(UserCodeError, match=r"key-5: task.decode: must return 'row' as float64 \[1\] for each sample"):
        list(new_loader(decode="ragged").steps(0, 1))
    monkeypatch.setattr(decoded_samples, "ragged", lambda sample, generator: dict(sample))
    with pytest.raises(UserCodeError, match=r"must return numbers, got \|S13 as 'file'"):
        list(new_loader(decode="ragged").steps(0, 1))


def test_random_numbers_of_two_positions_have_nothing_in_common_and_a_key_is_of_its_seed():
    generators = Generators(SEED)
    found = {generators.at(position).bytes(16) for position in (*range(1000), 2**40, 2**63)}
    assert len(found) == 1002
    assert Generators(SEED + 1).at(3).bytes(16) not in found
    drawn = generators.at(3)
    drawn.integers(0, 2, dtype=np.uint8)  # half of a word is left over
    assert generators.at(3).bytes(16) == Generators(SEED).at(3).bytes(16)


def test_what_workers_have_counted_arrives_with_their_rows(new_loader):
    loader = new_loader(2, "processes", "asks_again")
    list(loader.steps(0, 5))
    counters = loader.counters
    assert counters.retries == 3 * BATCH, "each read takes along what was counted before it; each worker keeps its last"
    assert counters.num_made == counters.num_steps == 5 and counters.num_bytes > 0
    assert counters.decode_seconds > 0 and 0 < counters.slowest_seconds <= counters.read_seconds
    assert 0 < counters.stall_seconds <= counters.seconds


def test_threads_of_a_loader_end_with_it(new_loader):
    loader = new_loader(3)
    list(loader.steps(0, 3))
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data worker")]


class Scripted:
    """Chooses what a list says, step after step, instead of by measurements."""

    def __init__(self, tunings):
        self._left = list(tunings)
        self.computed = []
        self.now = self._left.pop(0)

    def take(self, step_bytes):
        if self._left:
            self.now = self._left.pop(0)
            return "a choice"
        return ""


TUNINGS = [Tuning(2, 1, 1), Tuning(3, 1, 4), Tuning(3, 3, 4), Tuning(7, 3, 9), Tuning(7, 4, 9)]
PROCESSES = [Tuning(2, 1, 1), Tuning(4, 2, 1, "processes"), Tuning(4, 3, 1, "processes")]


@pytest.mark.parametrize(("kind", "tunings"), [("threads", TUNINGS), ("processes", PROCESSES)])
def test_settings_that_change_while_steps_are_ahead_change_no_row(new_loader, kind, tunings):
    loader = new_loader(1, "threads")
    loader._limits = Limits(tunings[-1])
    loader._tuner = Scripted(tunings)
    assert_steps(rows(loader.steps(3, 30)), 3, 30)
    assert loader.tuning == tunings[-1]
    if kind == "processes":
        assert len(ids_of_workers(loader)) == 3 and len(loader._fetchers) == 2
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data worker")]


def test_no_more_decode_at_once_than_there_are_workers_however_many_read(new_loader, monkeypatch):
    at_once, most = [], []

    def counted(sample, generator):
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.001)
        at_once.pop()
        return decoded_samples.augment(sample, generator)

    monkeypatch.setattr(decoded_samples, "counted", counted, raising=False)
    loader = new_loader(2, decode="counted", prefetch=8)
    loader._tuner = Scripted([Tuning(8, 2, 8)])
    assert_steps(rows(loader.steps(0, 20)), 0, 20)
    assert max(most) == 2


@pytest.mark.parametrize(("max_bytes", "expected"), [(1 << 30, 3), (1, 1)])
def test_a_loader_that_is_waited_for_reads_further_ahead_as_far_as_it_fits(monkeypatch, capsys, max_bytes, expected):
    monkeypatch.setattr(decoded_samples.time, "sleep", lambda seconds, sleep=time.sleep: sleep(seconds / 20))
    used = decoding("slow")
    limits = Limits(Tuning(256), 1, max_bytes)
    loader = TrainLoader(InMemory(), Shuffled(), BatchPlan(BATCH, 1), 0, Tuning(2), decoding=used, limits=limits)
    assert_steps(rows(loader.steps(0, 20)), 0, 20)
    assert loader.tuning.steps == expected, "whose consumer does nothing waits however much is ahead"
    lines = [line for line in capsys.readouterr().out.splitlines() if f"data: steps 2 -> {expected}" in line]
    assert len(lines) == 1
