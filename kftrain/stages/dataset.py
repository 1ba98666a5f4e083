"""`shards.json`: which shards a run trains on."""

from __future__ import annotations

from kftrain import contracts
from kftrain.contracts import RunPaths, RunShards
from kftrain.data.manifest import Manifest, read_manifest


def read_shards(paths: RunPaths) -> RunShards:
    """The dataset of a run. Raises DataError where it has none yet."""
    return contracts.read(RunShards, paths.shards)


def read_dataset(paths: RunPaths) -> tuple[RunShards, Manifest]:
    """The dataset of a run with its manifest. Raises DataError where one of them is missing or damaged."""
    shards = read_shards(paths)
    return shards, read_manifest(shards.manifest_uri)
