"""Nodes of a job that differ only in rank and number: what each asks of a store that counts, to read an epoch.

A node runs what a process of a job runs before and between its steps, `read_training` and the loader of
`kftrain.train.reading`, with a cache folder of its own, and computes nothing. One process is a node, and the nodes of
a fleet run one after the other. A step is read when it is asked for, and takes as long as what is read ahead of it: so
nothing that is counted depends on time. The dataset is real: shards that the product's writer has written, on disk, and
mapped by the store, so that it takes no memory.

As a program it is one node in a process of its own, which writes its requests to a file:

    python -m helpers.simulated_nodes FOLDER RANK NODES CACHE REQUESTS
"""

import dataclasses
import json
import mmap
import sys
import tempfile
import threading
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from helpers.fakes import counting_store
from helpers.fakes.counting_store import Request
from helpers.models.toy_task import ToyTask

from kftrain import config
from kftrain.core import storage
from kftrain.data.schema import Block
from kftrain.data.shards.manifest import Manifest, Shard, Split, content_digest, publish_manifest
from kftrain.data.shards.verified import make_first_use
from kftrain.data.shards.writer import SplitWriter
from kftrain.run.documents import RunShards
from kftrain.run.paths import RunPaths
from kftrain.train import reading

TASK = "helpers.models.toy_task:ToyTask"
ROOT = f"{counting_store.SCHEME}://bucket/root"
PATHS = RunPaths.of(ROOT, "r")
BLOCK_ROWS = 64

VERIFIES_RANGES = "blocks_sha256" in Shard.model_fields
"""Whether a ranged read verifies itself. Without it each node reads a shard whole that it reads from, to hash it."""


@dataclass(frozen=True)
class Size:
    """A dataset and its order. By default a range is 4 MiB, and a window 256 MiB: packed tokens, 1,024 a sample."""

    num_windows: int = 3
    lanes: int = 64
    range_samples: int = 1024
    row_bytes: int = 4096
    batch: int = 4096
    shard_bytes: int = 64_000_000

    @property
    def num_samples(self):
        return self.num_windows * self.lanes * self.range_samples

    def configure(self, cache_dir=""):
        """The configuration of a run; all else is as by default."""
        data = {"source": "nowhere", "cache_dir": str(cache_dir), "lanes": self.lanes, "order": 3}
        data |= {"prefetch_batches": 0}
        data |= {"shuffle_range_samples": self.range_samples, "shuffle_window_ranges": self.lanes}
        document = {"run": {"storage_root": ROOT}, "data": data, "task": {"kind": TASK, "width": self.row_bytes}}
        return config.parse(json.dumps(document | {"train": {"global_batch_size": self.batch}}))


@dataclass(frozen=True)
class NodeReads:
    """What a node has read, and the requests that it took."""

    numbers: list[int]
    """Samples, by the number that is written in each."""
    requests: list[Request]


def write_dataset(folder, size):
    """Writes a run and its dataset below a folder, as they lie below the storage root. Sample n holds n."""
    task = ToyTask(width=size.row_bytes)
    shards = {}
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        for split, num_samples in (("train", size.num_samples), ("validation", BLOCK_ROWS)):
            with SplitWriter(Path(aside), split, task.schema(), size.shard_bytes) as writer:
                for start in range(0, num_samples, BLOCK_ROWS):
                    writer.write(_make_block(start, size.row_bytes))
                shards[split] = writer.finish()
        digest = content_digest(task.schema(), task.settings(), shards)
        below = Path("shards") / digest
        (folder / "shards").mkdir()
        Path(aside).rename(folder / below)
        Path(aside).mkdir()
    manifest = Manifest(
        dataset_digest=digest,
        sample_schema=task.schema(),
        task_kind=TASK,
        task_settings=task.settings(),
        splits={split: Split(shards=of_split) for split, of_split in shards.items()},
        source="nowhere",
        source_listing_digest="",
        baselines={},
    )
    publish_manifest(str(folder / below / "manifest.json"), manifest)
    sha256 = storage.sha256_file(str(folder / below / "manifest.json"))
    uri = f"{ROOT}/{below.as_posix()}/manifest.json"
    known = RunShards(manifest_uri=uri, dataset_digest=digest, manifest_sha256=sha256)
    storage.publish_json(RunPaths.of(str(folder), "r").shards, known.to_dict())
    return manifest


def _make_block(start, row_bytes):
    numbers = np.arange(start, start + BLOCK_ROWS)
    rows = np.zeros((BLOCK_ROWS, row_bytes), np.uint8)
    rows[:, :8] = numbers.astype("<i8")[:, None].view(np.uint8).reshape(BLOCK_ROWS, 8)
    return Block(f"{start:09d}", {"data": rows, "length": numbers})


def open_store(folder):
    """The store that holds what `write_dataset` wrote."""
    store = counting_store.open_store()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        with path.open("rb") as stream:
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        store.put(f"{ROOT}/{path.relative_to(folder).as_posix()}", content)
    return store


def read_epoch(store, size, rank, num_nodes, cache_dir):
    """One node of a job reads its part of an epoch, and waits until it is verified."""
    store.take()
    chosen = size.configure(cache_dir)
    training = reading.read_training(PATHS, chosen)
    first_use = make_first_use(chosen.data, training.manifest.dataset_digest)
    training = dataclasses.replace(training, uses=first_use)
    loader = reading.open_loader(training, num_nodes, rank, lambda micro: micro.weight)
    numbers = []
    for step, batch in enumerate(loader.steps(0, size.num_samples // size.batch)):
        for micro in batch.micro_batches:
            numbers.extend(read_numbers(micro))
        wait_for_read_ahead(loader, step)
    first_use.require_verified()
    loader.close()
    for thread in threading.enumerate():  # what they ask for at the end is this node's, too
        if thread.name == "read ahead":
            thread.join(60)
    return NodeReads(numbers, store.take())


def wait_for_read_ahead(loader, step):
    """Computes a step for as long as what may be fetched after it takes."""
    ahead, end = loader._read_ahead, time.monotonic() + 60
    while ahead._upcoming and ahead._upcoming.start <= step + ahead._plan.num_steps and time.monotonic() < end:
        time.sleep(0.001)


def read_numbers(micro):
    """Samples of a micro batch, without padding; each must hold its number twice, and zeros."""
    arrays = {name: rows[micro.weight > 0] for name, rows in micro.arrays.items()}
    written = np.ascontiguousarray(arrays["data"][:, :8]).view("<i8").ravel()
    assert np.array_equal(written, arrays["length"]) and not arrays["data"][:, 8:].any()
    return written.tolist()


def main(folder, rank, num_nodes, cache_dir, requests):
    size = Size(**json.loads((Path(folder).parent / "size.json").read_text()))
    reads = read_epoch(open_store(folder), size, int(rank), int(num_nodes), cache_dir)
    document = {"numbers": reads.numbers, "requests": [astuple(request) for request in reads.requests]}
    Path(requests).write_text(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
