"""Datasets of any number of shards that nobody wrote: a manifest and, in a counting store, objects of their sizes."""

import hashlib

from kftrain.data.schema import SPLITS, Field, SampleSchema
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards.manifest import Manifest, Shard, Split, index_uri, shard_uri
from kftrain.data.shards.reader import count_index_bytes

SCHEMA = SampleSchema((Field("x", "uint8", (4,)),))


def digest(*named):
    return hashlib.sha256(repr(named).encode()).hexdigest()


def make_shard(split, number, folder=""):
    """A shard of a part of its own or, in a folder, an adopted one."""
    return Shard(
        name=f"{split}-000000.tar" if not folder else f"{split}/{number}.tar",
        bytes=64_000_000 + number % 1000,
        sha256=digest(split, number, "tar"),
        num_blocks=1000 + number % 7,
        num_samples=10_000 + number % 13,
        index_sha256=digest(split, number, "index"),
        folder=folder or f"../parts/{digest(number)}",
        index=f"{split}-{number:06d}.index.npy" if folder else "",
    )


def make_manifest(num_train, num_validation, folder="", **fields):
    counts = dict(zip(SPLITS, (num_train, num_validation), strict=True))
    splits = {name: [make_shard(name, number, folder) for number in range(count)] for name, count in counts.items()}
    return Manifest(
        dataset_digest=manifests.content_digest(SCHEMA, {}, splits, fields.get("components", ())),
        sample_schema=SCHEMA,
        task_kind="toy",
        task_settings={},
        splits={name: Split(shards=shards) for name, shards in splits.items()},
        source="nowhere",
        source_listing_digest="",
        baselines={},
        **fields,
    )


def lay_out(store, uri, manifest):
    """Lays objects of the sizes that the manifest tells into a counting store: tars and indexes."""
    for split in SPLITS:
        for shard in manifest.splits[split].shards:
            store.put(shard_uri(uri, shard), size_bytes=shard.bytes)
            store.put(index_uri(uri, shard), size_bytes=count_index_bytes(shard, manifest.schema_of(split)))
