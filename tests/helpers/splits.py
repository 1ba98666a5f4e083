"""Opens a split as nobody in the product does: by its manifest alone, and unverified."""

from kftrain.data.dataset import ShardedDataset
from kftrain.data.shards.manifest import read_manifest


def open_split(manifest_uri: str, split: str) -> ShardedDataset:
    """Open the split `train` or `validation` of the dataset at `manifest_uri`; no shard yet. Raises DataError."""
    return ShardedDataset(manifest_uri, read_manifest(manifest_uri), split)
