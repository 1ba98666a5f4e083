"""Counts for the laws of scale: a fleet's epoch, a node's start, a schedule's firing, a listing of parts."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from helpers import large_datasets, simulated_nodes
from helpers.fakes import counting_store
from helpers.fakes.counting_store import count, count_bytes
from helpers.models.toy_task import ToyTask
from helpers.toy_data import shard_toy, text_folder, toy_config

from kftrain.core import storage
from kftrain.data.dataset import ShardedDataset
from kftrain.data.settings import DataConfig
from kftrain.data.shards.manifest import publish_manifest, read_manifest
from kftrain.data.shards.verified import Uses
from kftrain.data.shards.verify import check_listing
from kftrain.run.documents import RunShards
from kftrain.run.paths import RunPaths
from kftrain.sharding import unchanged
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.tasks import run_dataset

LARGE = 100_000
"""Shards of a large dataset, half of them for training."""

MEGABYTE = 1e6


@dataclass(frozen=True)
class EpochCount:
    """What a fleet asks of a store in one epoch, from its first request on: the run's documents, too."""

    num_nodes: int
    num_simulated: int
    """Nodes that were simulated, which stand for all."""
    num_bytes: float
    num_requests: float
    dataset_bytes: int
    """Size of the tars of the training split."""

    @property
    def factor(self):
        return self.num_bytes / self.dataset_bytes

    @property
    def requests_per_megabyte(self):
        return self.num_requests / self.num_bytes * MEGABYTE


def count_epoch(store, size, num_nodes, num_simulated=0):
    """Lets so many nodes read an epoch, each into a cache of its own; together they read each sample once.

    With `num_simulated` only so many of them read, evenly spread, and stand for all.
    """
    ranks = range(num_nodes) if not num_simulated else range(0, num_nodes, -(-num_nodes // num_simulated))
    seen, num_bytes, num_requests = [], 0, 0
    for rank in ranks:
        with tempfile.TemporaryDirectory() as cache:
            reads = simulated_nodes.read_epoch(store, size, rank, num_nodes, cache)
        seen += reads.numbers
        num_bytes += count_bytes(reads.requests)
        num_requests += count(reads.requests)
    assert len(seen) == len(set(seen)) and (len(ranks) < num_nodes or len(seen) == size.num_samples)
    tars = (uri for uri in store.objects if "/train-" in uri and uri.endswith(".tar"))
    dataset_bytes = sum(store.objects[uri].size_bytes for uri in tars)
    of_all = num_nodes / len(ranks)
    return EpochCount(num_nodes, len(ranks), num_bytes * of_all, num_requests * of_all, dataset_bytes)


def open_large_store():
    """A store that holds a run of a dataset of 100,000 shards, of which the manifest alone has a content."""
    store = counting_store.open_store()
    manifest = large_datasets.make_manifest(LARGE // 2, LARGE // 2)
    uri = store.uri("root", "shards", manifest.dataset_digest, "manifest.json")
    publish_manifest(uri, manifest)
    known = RunShards(
        manifest_uri=uri, dataset_digest=manifest.dataset_digest, manifest_sha256=storage.sha256_file(uri)
    )
    storage.publish_json(RunPaths.of(store.uri("root"), "r").shards, known.to_dict())
    return store, uri, manifest


def count_start(store, rank, num_nodes, cache_dir, num_shards=16):
    """Requests of each of two processes of a node, from reading its run to knowing the first shards that it reads."""
    requests = []
    for _ in range(2):
        store.take()
        shards, manifest = run_dataset.read_dataset(
            RunPaths.of(store.uri("root"), "r"), DataConfig(cache_dir=str(cache_dir))
        )
        dataset = ShardedDataset(shards.manifest_uri, manifest, "train", Uses())
        first = rank * len(manifest.splits["train"].shards) // num_nodes
        assert dataset.num_samples and len(list(manifest.splits["train"].shards[first : first + num_shards]))
        requests.append(store.take())
    return requests


def count_unchanged_firing(folder):
    """Requests of the shard step where nothing has changed of a source, whose dataset has 100,000 shards."""
    store, uri, large = open_large_store()
    source = text_folder(Path(folder) / "texts", 20)
    small = shard_toy(source, store.uri("root"))
    large_datasets.lay_out(store, uri, large)
    unchanged.note_written(uri, large, ())
    (pointer,) = (f"{counting_store.SCHEME}://{name}" for name in list(store.objects) if "/by-source/" in name)
    store.put(pointer, store.content(pointer).replace(small.dataset_digest.encode(), large.dataset_digest.encode()))
    store.take()
    assert shard_dataset(toy_config(source, store.uri("root")), ToyTask(), lambda line: None).reused
    return store.take()


def count_listing():
    """Requests of the look that the stage which starts a job takes at a dataset in 100,000 folders of parts."""
    store, uri, large = open_large_store()
    large_datasets.lay_out(store, uri, large)
    manifest = read_manifest(uri)
    store.take()
    check_listing(uri, manifest)
    return store.take()
