"""A store that goes wrong while remote shards are read ahead and read: no sample lost, repeated or wrong, no hang."""

import random
import threading

import numpy as np
import pytest
import s3fs
from helpers import remote_shards
from helpers.fakes.bad_server import BadServer
from helpers.remote_shards import assert_rows

from kftrain.core import outages, remote, s3_ranges
from kftrain.data.dataset import ShardedDataset
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.read_ahead import AheadPlan
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.manifest import read_manifest
from kftrain.data.shards.verified import Uses
from kftrain.data.tuning import Tuning
from kftrain.errors import DataError, StorageError

URI = "s3://bucket/shards/manifest.json"
NUM_SAMPLES = 120
FAULTS = ("cut", "short", "shifted", "page", "whole", "stall", "silent", 503, 500, 429)
"""A proxy's page, an ignored range, bodies that end too soon or never, throttling, a server that never answers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return remote_shards.write_dataset(tmp_path_factory.mktemp("remote") / "shards", NUM_SAMPLES)


@pytest.fixture
def server(folder, monkeypatch):
    running = BadServer(GET="answer", LIST="answer")
    running.objects = {f"/bucket/shards/{path.name}": path.read_bytes() for path in folder.iterdir()}
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(outages, "_retry_policy", outages.OutagePolicy())
    monkeypatch.setattr(outages, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(outages, "MAX_DELAY_SECONDS", 0.05)
    read_manifest(URI)  # loads botocore's models, which takes longer than a short deadline
    monkeypatch.setattr(remote, "deadline", remote.Deadline(2.0, 2.0, 1e9))
    yield running
    running.close()
    s3fs.S3FileSystem.clear_instance_cache()


def train(manifest, node, rank, num_ranks, seen):
    dataset = ShardedDataset(URI, manifest, "train", Uses(node))
    order, plan = TrainingOrder(NUM_SAMPLES, 0, 8, 4), BatchPlan(12, num_ranks)
    ahead = AheadPlan(dataset.plan_fetches, 5) if node.max_bytes else None
    loader = TrainLoader(dataset, order, plan, rank, Tuning(2), ahead=ahead)
    for step, batch in enumerate(loader.steps(0, NUM_SAMPLES // 12)):
        numbers = order.locate(step * 12 + np.arange(*plan.share(rank)))
        assert_rows(batch.micro_batches[0].arrays, numbers)
        seen.extend(numbers.tolist())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rest_seconds", [0.0, 30.0], ids=["obstore", "s3fs"])
@pytest.mark.parametrize("cache_bytes", ["auto", 0])
def test_an_epoch_over_a_store_that_fails_in_every_way_is_whole(
    server, tmp_path, monkeypatch, seed, rest_seconds, cache_bytes
):
    monkeypatch.setattr(s3_ranges, "REST_SECONDS", rest_seconds)
    manifest, rng, seen = read_manifest(URI), random.Random(seed), [[], []]
    num_good = [0]

    def choose():
        """The same wrong bytes twice would be what the store holds."""
        what = rng.choice(FAULTS) if rng.random() < 0.3 else "answer"
        what = "answer" if what == "shifted" and num_good[0] < 10 else what
        num_good[0] = 0 if what == "shifted" else num_good[0] + 1
        return what

    server.plan["GET"] = choose

    def run(rank):
        train(manifest, NodeCache.of_node(str(tmp_path / "cache"), cache_bytes), rank, 2, seen[rank])

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
    assert sorted(seen[0] + seen[1]) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("what", [503, "silent", "cut", "page"])
def test_a_store_that_stays_away_ends_the_attempt_and_names_it(server, tmp_path, what):
    manifest = read_manifest(URI)
    outages.limit(0.5)
    server.plan["GET"] = what
    with pytest.raises(StorageError, match="s3://bucket/shards/train-00000") as caught:
        train(manifest, NodeCache.of_node(str(tmp_path / "cache"), "auto"), 0, 1, [])
    assert caught.value.exit_code == 138


def test_a_damaged_block_ends_it_for_good_though_it_was_fetched_ahead(server, tmp_path):
    manifest = read_manifest(URI)
    (path,) = [path for path in server.objects if path.endswith("train-000001.tar")]
    content = bytearray(server.objects[path])
    content[700_000] ^= 1
    server.objects[path] = bytes(content)
    with pytest.raises(
        DataError, match=r"train-000001\.tar: its content has changed in bytes 589,824 to 786,432 \(dir/"
    ):
        train(manifest, NodeCache.of_node(str(tmp_path / "cache"), "auto"), 0, 1, [])
