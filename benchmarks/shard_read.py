"""How fast samples are read: ours against webdataset's own WebDataset, from the same shards, contents checked equal.

    python benchmarks/shard_read.py [--rounds 5] [--scale 1.0] [--folder /dev/shm]

    ours                    ShardedDataset.read_range: stored order, batches of 64
    ours, shuffled          TrainLoader: training order over a window of 16 shards, batches of 64, one prefetch thread
    webdataset              WebDataset(...).decode(), as a user calls it: stored order, samples one by one, no batches
    webdataset, bytes       WebDataset(...) without decoding: its best case
    limit                   read() of the same files

The kinds of samples are those of shard_write.py. One process each; rates are samples per second. The checksum is the
sum over the first element of every sample, and must not differ.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import fresh_process
import numpy as np
import shard_write
import webdataset

from kftrain.data.dataset import ShardedDataset
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.shards.manifest import Manifest, Split, content_digest
from kftrain.data.shards.writer import SplitWriter
from kftrain.storage import publish_json

BATCH_SIZE = 64
FIELD = {"images": "image", "tokens": "tokens", "packed tokens": "tokens"}


def write_dataset(folder: Path, kind: str, num_samples: int) -> None:
    """The samples of shard_write.py as a dataset; validation is there because a dataset has one."""
    schema, items = shard_write.samples(kind, num_samples)
    shards = {}
    for split in ("train", "validation"):
        with SplitWriter(folder, split, schema, shard_write.SHARD_SIZE_BYTES) as writer:
            chosen = items if split == "train" else items[:1]
            shard_write.fill(writer, chosen, shard_write.ROWS_PER_BLOCK if kind == "packed tokens" else 1)
            shards[split] = writer.finish()
    manifest = Manifest(
        dataset_digest=content_digest(schema, {}, shards),
        sample_schema=schema,
        task_kind="benchmark",
        task_settings={},
        splits={split: Split(shards=found) for split, found in shards.items()},
        source="benchmark",
        source_listing_digest="",
        baselines={},
    )
    publish_json(str(folder / "manifest.json"), manifest.to_dict())


def read_shuffled(folder: Path, field: str) -> tuple[int, float]:
    dataset = ShardedDataset.open(str(folder / "manifest.json"), "train")
    order = TrainingOrder(dataset.samples_per_shard, "digest", 0, 16)
    loader = TrainLoader(dataset, order, BatchPlan(BATCH_SIZE, 1), 0, prefetch_batches=2)
    total, remaining = 0, dataset.num_samples
    for step in loader.steps(0, math.ceil(dataset.num_samples / BATCH_SIZE)):
        rows = step.micro_batches[0].arrays[field][:remaining]  # the last step runs into the next epoch
        total += int(rows[:, 0].sum(dtype=np.int64))
        remaining -= len(rows)
    return dataset.num_samples, total


def read_in_stored_order(folder: Path, field: str) -> tuple[int, float]:
    dataset = ShardedDataset.open(str(folder / "manifest.json"), "train")
    total = 0
    for start in range(0, dataset.num_samples, BATCH_SIZE):
        arrays, _ = dataset.read_range(start, min(start + BATCH_SIZE, dataset.num_samples))
        total += int(arrays[field][:, 0].sum(dtype=np.int64))
    return dataset.num_samples, total


def read_decoded(folder: Path, field: str) -> tuple[int, float]:
    urls = sorted(map(str, folder.glob("train-*.tar")))
    num_samples = total = 0
    for sample in webdataset.WebDataset(urls, shardshuffle=False).decode():
        rows = sample[f"{field}.npy"]
        num_samples += len(rows)
        total += int(rows[0, 0]) if len(rows) == 1 else int(rows[:, 0].sum(dtype=np.int64))
    return num_samples, total


def read_undecoded(folder: Path, field: str) -> tuple[int, float]:
    width = {"image": 20_000, "tokens": 4_096}[field]
    urls = sorted(map(str, folder.glob("train-*.tar")))
    samples = webdataset.WebDataset(urls, shardshuffle=False)
    return sum(len(sample[f"{field}.npy"]) // width for sample in samples), math.nan


def read_files(folder: Path, field: str) -> tuple[int, float]:
    buffer = bytearray(shard_write.SHARD_SIZE_BYTES)
    for path in sorted(folder.glob("train-*.tar")):
        with path.open("rb", buffering=0) as stream:
            stream.readinto(buffer)
    return ShardedDataset.open(str(folder / "manifest.json"), "train").num_samples, math.nan


VARIANTS: dict[str, Callable[[Path, str], tuple[int, float]]] = {
    fresh_process.OURS: read_in_stored_order,
    "ours, shuffled": read_shuffled,
    "webdataset": read_decoded,
    "webdataset, bytes": read_undecoded,
    "limit": read_files,
}


def compare(kind: str, num_samples: int, rounds: int, parent: str) -> None:
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        write_dataset(folder, kind, num_samples)
        found = fresh_process.compare(__file__, list(VARIANTS), ["--kind", kind, "--folder", str(folder)], rounds)
    finally:
        shutil.rmtree(folder)
    fresh_process.report(f"read {kind} (samples)", found, "checksum")
    checksums = {run.extra for runs in found.values() for run in runs if not math.isnan(run.extra)}
    if len(checksums) != 1:
        raise SystemExit(f"the variants read different contents: checksums {sorted(checksums)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples to read")
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    parser.add_argument("--kind", choices=FIELD, help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        read = VARIANTS[arguments.variant]
        fresh_process.measure(lambda: read(Path(arguments.folder), FIELD[arguments.kind]))
        return
    for kind in FIELD:
        compare(kind, int(shard_write.NUM_SAMPLES[kind] * arguments.scale), arguments.rounds, arguments.folder)


if __name__ == "__main__":
    main()
