"""Faults 1 to 12 and 16 of the catalogue in an object store: a real server, behind a proxy that goes wrong.

No sample is lost, repeated or wrong, and nobody waits for ever: a store that goes wrong costs time, or the attempt; a
dataset that is wrong ends the run with an error that names the place.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import s3fs
from botocore.exceptions import FlexibleChecksumError
from helpers import simulated_nodes
from helpers.fakes.fault_proxy import FAULTS, FaultProxy
from helpers.fakes.object_store import BUCKET, ObjectStore
from helpers.models.toy_task import ToyTask
from helpers.simulated_nodes import Size
from helpers.splits import open_split
from helpers.toy_data import shard_toy, text_folder, toy_config

from kftrain.core import outages, remote, storage
from kftrain.data.dataset import ShardedDataset
from kftrain.data.decoding import Decoding
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.settings import DataConfig
from kftrain.data.shards.manifest import index_uri, read_manifest, shard_uri
from kftrain.data.shards.verified import make_first_use
from kftrain.data.shards.verify import check_listing, verify_keys
from kftrain.data.tuning import Tuning
from kftrain.errors import DataError, StorageError
from kftrain.sharding.shard_dataset import shard_dataset

TRANSPORT_FAULTS = [fault for fault in FAULTS if fault != "damage"]
"""Those that whoever reads can see without a digest."""

USED_FAULTS = FAULTS if simulated_nodes.VERIFIES_RANGES else TRANSPORT_FAULTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Drivers leave connections to the garbage collector, those that were hung up on among them.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TESTS = Path(__file__).parents[2]
SIZE = Size(num_windows=3, lanes=2, range_samples=256, row_bytes=1024, batch=64, shard_bytes=700_000)
"""1,536 samples of 1 kB in three shards."""
ROOT = f"s3://{BUCKET}/faults"


@pytest.fixture(scope="module")
def server():
    running = ObjectStore()
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    simulated_nodes.write_dataset(folder, SIZE)
    return folder


@pytest.fixture
def proxy(server, monkeypatch, tmp_path):
    """The store behind the proxy, which does nothing yet. Answers are waited for as long as a test may take."""
    with FaultProxy(server.environment["AWS_ENDPOINT_URL"]) as running:
        for name, value in {**server.environment, "AWS_ENDPOINT_URL": running.uri}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        s3fs.S3FileSystem.clear_instance_cache()
        monkeypatch.setattr(outages, "_retry_policy", outages.OutagePolicy())
        monkeypatch.setattr(outages, "FIRST_DELAY_SECONDS", 0.01)
        monkeypatch.setattr(outages, "MAX_DELAY_SECONDS", 0.1)
        storage.exists(ROOT)  # loads botocore's models, which takes longer than a short deadline
        monkeypatch.setattr(remote, "deadline", remote.Deadline(5.0, 5.0, 1e9))
        yield running
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def uri(proxy, local):
    """The manifest of the dataset in the store."""
    for path in (path for path in (local / "shards").rglob("*") if path.is_file()):
        storage.publish(f"{ROOT}/{path.relative_to(local).as_posix()}", path.read_bytes())
    (manifest,) = (local / "shards").glob("*/manifest.json")
    return f"{ROOT}/{manifest.relative_to(local).as_posix()}"


def read_part(uri, tmp_path, rank=0, num_ranks=1, num_steps=SIZE.num_samples // SIZE.batch, first_step=0):
    """A rank reads its part of an epoch with a cache of its own; returns what is written in each sample."""
    manifest = read_manifest(uri)
    first_use = make_first_use(DataConfig(cache_dir=str(tmp_path / f"node-{rank}")), manifest.dataset_digest)
    dataset = ShardedDataset(uri, manifest, "train", first_use)
    order = TrainingOrder(dataset.num_samples, 0, SIZE.range_samples, SIZE.lanes)
    loader = TrainLoader(dataset, order, BatchPlan(SIZE.batch, num_ranks), rank, Tuning(2))
    batches = list(loader.steps(first_step, num_steps))
    first_use.require_verified()
    return [simulated_nodes.read_numbers(micro) for batch in batches for micro in batch.micro_batches]


def flatten(parts):
    return sorted(number for part in parts for number in part)


def train_shard(uri, number=1):
    return shard_uri(uri, read_manifest(uri).splits["train"].shards[number])


def change(uri, how):
    """Change an object in the store."""
    storage.publish(uri, how(storage.read_bytes(uri)))


def cut_at_member(content):
    """The tar up to the header of a member in its middle."""
    header = next(
        place for place in range(len(content) // 2 // 512 * 512, 0, -512) if content[place + 257 :][:5] == b"ustar"
    )
    return content[:header]


def flip(place):
    return lambda content: content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    "how",
    [cut_at_member, lambda content: content[: len(content) // 2 + 777], flip(3), flip(100_000)],
    ids=["1 cut at a member", "2 cut within a payload", "3 bit of a header", "4 bit of a payload"],
)
def test_faults_1_to_4_a_shard_that_is_not_what_it_was_is_named(uri, tmp_path, how):
    where = train_shard(uri)
    change(where, how)
    with pytest.raises(DataError, match=where) as caught:
        read_part(uri, tmp_path)
    assert caught.value.exit_code == 11


@pytest.mark.parametrize("kind", [shard_uri, index_uri])
@pytest.mark.parametrize("how", ["missing", "empty"])
def test_fault_5_a_file_that_is_gone_or_empty_is_named_before_a_job_is_started(uri, kind, how):
    manifest = read_manifest(uri)
    where = kind(uri, manifest.splits["train"].shards[2])
    storage.remove(where) if how == "missing" else storage.publish(where, b"")
    with pytest.raises(DataError, match=f"{where}: (missing|truncated or changed: it has 0 bytes)") as caught:
        check_listing(uri, manifest)
    assert caught.value.exit_code == 11


SHARD = """
import sys
from helpers.toy_data import shard_toy
print(shard_toy(sys.argv[1], sys.argv[2], part_size_bytes=1 << 16, processes=1).dataset_digest)
"""


@pytest.mark.parametrize("after", [1, 4, 9])
def test_fault_6_a_sharder_that_is_killed_between_its_writes_is_repeated_with_the_same_bytes(proxy, tmp_path, after):
    source = text_folder(tmp_path / "texts", 200)
    expected = shard_toy(source, tmp_path / "local", part_size_bytes=1 << 16, processes=1)
    root = f"{ROOT}/killed-{after}"
    victims = []
    proxy.use(lambda number: os.kill(victims[0].pid, signal.SIGKILL) if number == after else None, "PUT ")
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    victims.append(subprocess.Popen([sys.executable, "-c", SHARD, str(source), root], env=environment))
    assert victims[0].wait(300) == -signal.SIGKILL
    proxy.use({}, "PUT ")
    again = shard_toy(source, root, part_size_bytes=1 << 16, processes=1)
    assert again.dataset_digest == expected.dataset_digest
    check_listing(again.manifest_uri, again.manifest)
    assert shard_toy(source, root, part_size_bytes=1 << 16, processes=1).reused


@pytest.mark.parametrize("num_ranks", [2, 5], ids=["7 uneven shards", "8 more ranks than shards"])
def test_faults_7_and_8_ranks_take_equally_many_steps_whatever_the_shards(uri, tmp_path, num_ranks):
    parts = [read_part(uri, tmp_path, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(part) for part in parts}) == 1
    assert flatten(number for part in parts for number in part) == list(range(SIZE.num_samples))


def test_fault_9_a_sample_that_cannot_be_decoded_is_named_and_counted_within_its_budget(uri, tmp_path):
    def decode(sample, generator):
        if int(sample["length"]) == 700:
            raise DataError("not an image")
        return sample

    dataset = open_split(uri, "train")
    order, plan = TrainingOrder(dataset.num_samples, 0, SIZE.range_samples, SIZE.lanes), BatchPlan(SIZE.batch, 1)
    steps = SIZE.num_samples // SIZE.batch
    with pytest.raises(DataError, match=rf"{train_shard(uri)}, 000000640: .*not an image") as caught:
        list(TrainLoader(dataset, order, plan, 0, Tuning(2), decoding=Decoding(decode, 0, 0)).steps(0, steps))
    assert caught.value.exit_code == 11
    batches = list(TrainLoader(dataset, order, plan, 0, Tuning(2), decoding=Decoding(decode, 0, 1)).steps(0, steps))
    assert [bad.number for batch in batches for bad in batch.bad_samples] == [700]
    numbers = flatten(simulated_nodes.read_numbers(micro) for batch in batches for micro in batch.micro_batches)
    assert numbers == [number for number in range(SIZE.num_samples) if number != 700]


def test_fault_10_a_key_that_comes_twice_is_refused_with_both_places(proxy, tmp_path):
    class Repeating(ToyTask):
        def encode(self, records, split):
            for number, block in enumerate(super().encode(records, split)):
                yield type(block)("same.txt" if number in (1, 3) else block.key, block.arrays)

    source = text_folder(tmp_path / "texts")
    with pytest.raises(DataError, match=r"train-000000\.tar: a key comes twice, first in train-000000\.tar"):
        shard_dataset(toy_config(source, f"{ROOT}/repeated"), Repeating(), lambda line: None)
    assert not storage.exists(f"{ROOT}/repeated/shards/by-source")


def test_the_keys_of_a_dataset_in_the_store_come_once(uri):
    verify_keys(uri, read_manifest(uri))


LOADER = """
import sys
from pathlib import Path
import test_remote_faults_by_proxy as tests
for batch in tests.read_part(sys.argv[1], Path(sys.argv[2])):
    pass
"""


def test_fault_11_a_process_that_is_killed_while_it_reads_leaves_a_node_on_which_the_rest_is_exact(
    uri, proxy, tmp_path
):
    victims = []
    proxy.use(lambda number: os.kill(victims[0].pid, signal.SIGKILL) if number == 1 else None, r"GET .*train.*\.tar")
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent, Path(__file__).parent)))
    command = [sys.executable, "-c", LOADER, uri, str(tmp_path)]
    victims.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}))
    assert victims[0].wait(300) == -signal.SIGKILL
    proxy.use({}, "GET ")
    whole = read_part(uri, tmp_path)
    assert flatten(whole) == list(range(SIZE.num_samples))
    assert read_part(uri, tmp_path, first_step=10, num_steps=7) == whole[10:17]


def test_fault_12_a_store_that_never_answers_ends_the_attempt_and_names_the_shard(uri, proxy, tmp_path):
    outages.limit(1.0)
    proxy.use(lambda number: "silent", r"GET .*train.*\.tar")
    with pytest.raises(StorageError, match=f"{ROOT}/shards/.*/train-00000") as caught:
        read_part(uri, tmp_path)
    assert caught.value.exit_code == 138


def mark_damage(fault):
    skipped = pytest.mark.skipif(not simulated_nodes.VERIFIES_RANGES, reason="ranged reads do not verify themselves")
    return pytest.param(fault, marks=[skipped] if fault == "damage" else [])


@pytest.mark.parametrize("fault", [mark_damage(fault) for fault in FAULTS if fault != "silent"])
def test_fault_16_each_fault_costs_time_only(uri, proxy, tmp_path, fault):
    """One answer alone is damaged: bytes that come wrong twice are what the store holds."""
    numbers = range(1, 2) if fault == "damage" else range(1, 1000, 3)
    proxy.use(dict.fromkeys(numbers, fault), r"GET .*train-.*\.tar")
    assert flatten(read_part(uri, tmp_path)) == list(range(SIZE.num_samples))
    assert proxy.happened


@pytest.mark.parametrize("seed", range(2))
def test_fault_16_an_epoch_of_two_ranks_over_a_store_that_fails_in_every_way_is_whole(uri, proxy, tmp_path, seed):
    rng, last = random.Random(seed), [-10]

    def choose(number):
        fault = rng.choice(USED_FAULTS) if rng.random() < 0.3 else None
        if fault == "damage" and number - last[0] < 10:
            return None
        last[0] = number if fault == "damage" else last[0]
        return fault

    proxy.use(choose, r"(GET|HEAD) .*train-")
    parts = [read_part(uri, tmp_path, rank, 2) for rank in range(2)]
    assert flatten(number for part in parts for number in part) == list(range(SIZE.num_samples))


@pytest.mark.parametrize("fault", ["drop", "unavailable", "lose"])
def test_fault_16_what_is_written_while_the_store_fails_is_what_was_meant(proxy, tmp_path, fault):
    source = text_folder(tmp_path / "texts", 60)
    expected = shard_toy(source, tmp_path / "local", part_size_bytes=1 << 16, processes=1)
    proxy.use(lambda number: fault if number % 4 == 1 else None, "PUT ")
    written = shard_toy(source, f"{ROOT}/written-{fault}", part_size_bytes=1 << 16, processes=1)
    assert proxy.happened and written.dataset_digest == expected.dataset_digest
    train = open_split(written.manifest_uri, "train")
    ours, theirs = (one.read(np.arange(one.num_samples)) for one in (train, open_split(expected.manifest_uri, "train")))
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.parametrize("fault", ["lose", "drop", "unavailable"])
def test_fault_16_of_those_who_create_a_file_one_knows_that_it_did(proxy, fault):
    proxy.use({0: fault}, "PUT ")
    storage.create(f"{ROOT}/claim-{fault}", "mine")
    with pytest.raises(FileExistsError):
        storage.create(f"{ROOT}/claim-{fault}", "another's")
    assert storage.read_text(f"{ROOT}/claim-{fault}") == "mine"


@pytest.mark.skipif(
    not outages.is_outage(FlexibleChecksumError(error_msg="of a test")),
    reason="a checksum of the driver's own that differs is taken for what the store holds",
)
def test_fault_16_a_whole_file_of_which_a_bit_turned_on_the_way_is_asked_for_again(uri, proxy):
    proxy.use({0: "damage"}, r"GET .*manifest\.json")
    assert read_manifest(uri).splits["train"].num_samples == SIZE.num_samples
    assert proxy.num_requests == 2
