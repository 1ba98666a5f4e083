"""The samples of one split, by number: what training and evaluation read.

Memory: the manifest, and per shard that was read lately its index and its mapping (the page cache holds the data). Of
a shuffle window all shards stay open, as far as the limit of open files allows. Nothing grows with the number of
samples, except `group_of` and `group_keys`, which need 8 bytes and one key per block.
"""

from __future__ import annotations

import functools
import itertools
import resource
import threading
from collections import OrderedDict

import numpy as np

from kftrain.data.schema import Arrays, SampleSchema
from kftrain.data.shards.manifest import Manifest, block_keys, read_manifest, row_bytes, shard_uri
from kftrain.data.shards.npy_header import stored_dtype
from kftrain.data.shards.reader import ShardReader, read_index
from kftrain.errors import DataError

MAX_OPEN_SHARDS = 128
"""Enough for several shuffle windows of usual width; what was not read for the longest time is closed first."""


class ShardedDataset:
    """One split of a dataset. All methods may be called from any thread."""

    def __init__(self, manifest_uri: str, manifest: Manifest, split: str) -> None:
        self._uri = manifest_uri
        self._shards = manifest.splits[split].shards
        self.schema: SampleSchema = manifest.sample_schema
        self.num_groups = manifest.splits[split].num_blocks
        """Blocks; in the validation split each is an independent unit (a document, an image)."""
        self.samples_per_shard = np.array([shard.num_samples for shard in self._shards], np.int64)
        self._shard_starts = np.concatenate([[0], np.cumsum(self.samples_per_shard)])
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._max_open = MAX_OPEN_SHARDS
        self._lock = threading.Lock()

    @classmethod
    def open(cls, manifest_uri: str, split: str) -> ShardedDataset:
        """The split `train` or `validation` of the dataset at `manifest_uri`.

        Raises DataError; opens no shard yet.
        """
        return cls(manifest_uri, read_manifest(manifest_uri), split)

    @property
    def num_samples(self) -> int:
        """Rows of the split."""
        return int(self._shard_starts[-1])

    def expect_window(self, num_shards: int) -> None:
        """Says that samples of so many shards will be read in turns: these and the next ones then stay open.

        Opening a shard again reads and checks its index again, which costs many times what reading a sample does.
        """
        half_of_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._max_open = max(MAX_OPEN_SHARDS, min(2 * num_shards, half_of_open_files))

    def read(self, shard_ids: np.ndarray, rows: np.ndarray) -> Arrays:
        """Samples by shard and row in the shard, int64 `[k]` each: field name -> new array `[k, *shape]`.

        Raises DataError that names the shard where one is missing or damaged.
        """
        order = np.argsort(shard_ids, kind="stable")
        starts = np.flatnonzero(np.diff(shard_ids[order], prepend=-1)).tolist()
        gathered = {field.name: np.empty(len(rows), f"V{row_bytes(field)}") for field in self.schema.fields}
        for start, stop in itertools.pairwise([*starts, len(rows)]):
            chosen = order[start:stop]
            for name, found in self._shard(int(shard_ids[chosen[0]])).gather(rows[chosen]).items():
                gathered[name][chosen] = found
        return {
            field.name: gathered[field.name].view(stored_dtype(field.dtype)).reshape(len(rows), *field.shape)
            for field in self.schema.fields
        }

    def read_range(self, start: int, stop: int) -> tuple[Arrays, np.ndarray]:
        """Samples start … stop - 1 in stored order, and the group id of each, int64 `[stop - start]`."""
        global_rows = np.arange(start, stop, dtype=np.int64)
        shard_ids = np.searchsorted(self._shard_starts, global_rows, side="right") - 1
        return self.read(shard_ids, global_rows - self._shard_starts[shard_ids]), self.group_of(global_rows)

    def group_of(self, global_rows: np.ndarray) -> np.ndarray:
        """Group ids, int64 `[k]` in 0 … num_groups - 1, of samples by their number in stored order."""
        return np.searchsorted(self._group_starts, global_rows, side="right") - 1

    def group_keys(self) -> list[str]:
        """The key of each group, in the order of their ids. Raises DataError where a shard is damaged."""
        keys: list[str] = []
        for shard in self._shards:
            found = list(block_keys(shard_uri(self._uri, shard.name), self.schema))
            if len(found) != shard.num_blocks:
                raise DataError(
                    f"the archive has {len(found)} blocks, not {shard.num_blocks}",
                    where=shard_uri(self._uri, shard.name),
                    fix="shard the data again",
                )
            keys += found
        return keys

    @functools.cached_property
    def _group_starts(self) -> np.ndarray:
        rows = np.concatenate([read_index(self._uri, shard, self.schema)[:, 0] for shard in self._shards])
        starts: np.ndarray = np.cumsum(rows) - rows
        return starts

    def _shard(self, number: int) -> ShardReader:
        with self._lock:
            reader = self._open.get(number)
            if reader is None:
                reader = self._open[number] = ShardReader(self._uri, self._shards[number], self.schema)
                if len(self._open) > self._max_open:
                    self._open.popitem(last=False)
            self._open.move_to_end(number)
            return reader
