"""The blocks of a split as they are stored, one after the other: for what looks at a whole split without training."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kftrain.data.adopted.conversion import Conversion
from kftrain.data.dataset import ShardedDataset
from kftrain.data.schema import Arrays
from kftrain.data.shards.manifest import Manifest
from kftrain.data.shards.reader import read_index

READ_BYTES = 8 << 20
"""What is read at once."""


def stored_blocks(
    manifest_uri: str, manifest: Manifest, split: str, conversion: Conversion | None = None
) -> Iterator[Arrays]:
    """Field name -> `[rows, *shape]` of each block, in order. Raises DataError for a shard that is damaged."""
    dataset = ShardedDataset(manifest_uri, manifest, split, conversion=conversion)
    start = 0
    for shard in manifest.splits[split].shards:
        index = read_index(manifest_uri, shard, manifest.schema_of(split))
        read_together = np.cumsum(index[:, 2::2].sum(axis=1)) // READ_BYTES
        for rows in np.split(index[:, 0], np.flatnonzero(np.diff(read_together)) + 1):
            stops = np.cumsum(rows)
            arrays = dataset.read(np.arange(start, start + stops[-1]))
            for first, last in zip((stops - rows).tolist(), stops.tolist(), strict=True):
                yield {name: array[first:last] for name, array in arrays.items()}
            start += int(stops[-1])
