"""Samples of a dataset that its report shows: `overview.json` beside the manifest.

The number of blocks alone decides which ones. They are read from the shards, so that the report shows what training
gets, and written once for each dataset.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.data.dataset import ShardedDataset
from kftrain.data.schema import SPLITS, Arrays
from kftrain.data.shards.manifest import Manifest, shard_uri
from kftrain.data.shards.reader import read_index
from kftrain.data.shards.verify import read_block_keys
from kftrain.errors import UserCodeError
from kftrain.tasks.base import Task
from kftrain.tasks.shown import format_example

OVERVIEW_NAME = "overview.json"

NUM_EXAMPLES = {"train": 8, "validation": 4}

MAX_ROWS = 512
"""Most rows of a block that a task is given to show."""


def read_overview(manifest_uri: str) -> Any:
    """Return the dataset's overview; None if none was written."""
    return storage.read_json_if_exists(_uri(manifest_uri))


def write_overview(task: Task, manifest_uri: str, manifest: Manifest) -> Any:
    """Return the dataset's overview; write it first if there is none. Raises DataError for a damaged shard."""
    overview = read_overview(manifest_uri)
    if overview is None:
        overview = {"examples": [row for split in SPLITS for row in _show_split(task, manifest_uri, manifest, split)]}
        storage.publish_json(_uri(manifest_uri), overview)
    return overview


def _uri(manifest_uri: str) -> str:
    return storage.join(manifest_uri.rsplit("/", 1)[0], OVERVIEW_NAME)


def _show_split(task: Task, manifest_uri: str, manifest: Manifest, split: str) -> list[dict[str, Any]]:
    dataset = ShardedDataset(manifest_uri, manifest, split)
    shards = manifest.splits[split].shards
    block_starts, sample_starts = (
        np.append(0, np.cumsum(manifest.splits[split].column(name))) for name in ("num_blocks", "num_samples")
    )
    count = min(NUM_EXAMPLES[split], int(block_starts[-1]))
    examples = []
    for number in (step * int(block_starts[-1]) // count for step in range(count)):
        place = int(np.searchsorted(block_starts, number, side="right")) - 1
        shard, block = shards[place], number - int(block_starts[place])
        rows = read_index(manifest_uri, shard, manifest.schema_of(split))[:, 0]
        start = int(sample_starts[place] + rows[:block].sum())
        arrays = dataset.read(np.arange(start, start + min(MAX_ROWS, int(rows[block]))))
        keys = read_block_keys(shard_uri(manifest_uri, shard), manifest.schema_of(split))
        key = next(itertools.islice(keys, block, None), "")
        examples.append({"key": key, "split": split, **format_example(_show_block(task, arrays), "task.show")})
    return examples


def _show_block(task: Task, arrays: Arrays) -> Mapping[str, Any]:
    with user_code("task.show"):
        shown = task.show(arrays)
    if not isinstance(shown, Mapping):
        raise UserCodeError("must return a mapping", where="task.show", value=type(shown).__name__)
    return shown
