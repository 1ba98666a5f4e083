"""`shards.json`: which shards a run trains on."""

from __future__ import annotations

from kftrain.data.shards.manifest import Manifest, read_manifest
from kftrain.run.documents import RunPaths, RunShards
from kftrain.trust import read_shards as read_shards


def read_dataset(paths: RunPaths) -> tuple[RunShards, Manifest]:
    """The dataset of a run with its manifest. Raises DataError where one of them is missing or damaged."""
    shards = read_shards(paths)
    return shards, read_manifest(shards.manifest_uri)
