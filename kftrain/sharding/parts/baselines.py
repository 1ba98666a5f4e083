"""Baselines that a metric must be read against: measured on the validation split, whose blocks are read as stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from kftrain.data.conversion import Conversion, find_conversion
from kftrain.data.dataset import ShardedDataset
from kftrain.data.schema import Arrays
from kftrain.data.shards.manifest import Manifest
from kftrain.data.shards.reader import read_index
from kftrain.errors import DataError
from kftrain.sharding.parts.encoder import Encoding


def measure_baselines(encoding: Encoding, manifest_uri: str, manifest: Manifest) -> dict[str, dict[str, float]]:
    """Measure the task's baselines on the validation split.

    Raises DataError where one is not finite, and UserCodeError.

    Of adopted shards one sample is read in any case: whether the task can read them is seen here.
    """
    with encoding.run_task_code():
        samples = read_stored_blocks(manifest_uri, manifest, "validation", find_conversion(manifest, encoding.task))
        first = [next(samples)] if manifest.is_adopted else []
        figures = encoding.task.baselines(itertools.chain(first, samples))
    baselines = {metric: {name: float(value) for name, value in values.items()} for metric, values in figures.items()}
    if not all(math.isfinite(value) for values in baselines.values() for value in values.values()):
        raise DataError("a baseline is not finite", where="task.baselines()", value=baselines)
    return baselines


READ_BYTES = 8 << 20
"""Bytes that are read at once."""


def read_stored_blocks(
    manifest_uri: str, manifest: Manifest, split: str, conversion: Conversion | None = None
) -> Iterator[Arrays]:
    """Yield field name -> `[rows, *shape]` of each block, in order. Raises DataError for a shard that is damaged."""
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
