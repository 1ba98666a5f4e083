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
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from kftrain.core import storage, threads, traffic
from kftrain.data.conversion import Conversion
from kftrain.data.schema import Arrays, SampleSchema
from kftrain.data.shards.gather import RowPlaces, find_address
from kftrain.data.shards.manifest import Manifest, Shard, choose_fix, shard_uri
from kftrain.data.shards.mapped import MappedBytes
from kftrain.data.shards.npy_header import stored_dtype
from kftrain.data.shards.reader import ShardReader, read_index
from kftrain.data.shards.remote_bytes import MAX_FETCHES, Fetch
from kftrain.data.shards.verified import Uses
from kftrain.data.shards.verify import name_samples, read_shard_keys
from kftrain.errors import DataError

MAX_OPEN_SHARDS = 128
"""Most shards that stay open: enough for several shuffle windows of usual width. What was not read for the longest time
is closed first."""


class ShardedDataset:
    """A split of a dataset, read by number.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        manifest_uri: str,
        manifest: Manifest,
        split: str,
        uses: Uses | None = None,
        conversion: Conversion | None = None,
        left_out: Sequence[int] = (),
    ) -> None:
        """Open no shard yet.

        `uses`: is told which shards are read; without it none is hashed. `conversion`: makes of adopted samples what a
        task reads. `left_out`: samples in stored order that are not seen, nor groups that have no others; the others
        are numbered anew.
        """
        self._uri = manifest_uri
        self._conversion = conversion
        self._uses = uses or Uses()
        self._shards: Sequence[Shard] = manifest.splits[split].shards
        self._stored: SampleSchema = manifest.schema_of(split)
        self.schema: SampleSchema = conversion.schema if conversion else self._stored
        """Of what `read` gives."""
        self._left_out = np.sort(np.asarray(left_out, np.int64))
        self.num_groups = manifest.splits[split].num_blocks
        """Blocks; in the validation split each is an independent unit (a document, an image)."""
        self._shard_starts = np.append(0, np.cumsum(manifest.splits[split].column("num_samples")))
        self._key_prefixes = [
            f"{component.name}/" for component in manifest.components for _ in range(component.num_shards[split])
        ]
        self._cache = self._uses.cache
        self._open: OrderedDict[int, Future[ShardReader]] = OrderedDict()
        self._max_open = MAX_OPEN_SHARDS
        self._lock = threading.Lock()
        if left_out:
            self.num_groups = len(self._group_ends)

    @property
    def num_samples(self) -> int:
        """Number of rows of the split."""
        return int(self._shard_starts[-1]) - len(self._left_out)

    def expect_window(self, num_ranges: int, range_samples: int) -> None:
        """Expect that samples of so many ranges are read in turns: the shards of these and the next ones stay open.

        Opening a shard again reads and checks its index again, which costs many times what reading a sample does.
        """
        shards_of_range = 2 + range_samples * len(self._shards) // self.num_samples
        half_of_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        wanted = min(2 * num_ranges * shards_of_range, len(self._shards), half_of_open_files)
        self._max_open = max(MAX_OPEN_SHARDS, wanted)

    def read(self, samples: np.ndarray) -> Arrays:
        """Read samples by their number in stored order, int64 `[k]`: field name -> new array `[k, *shape]`.

        What is encoded is `[k]` of `object`: bytes, or views of the mapped shard. Raises DataError that names the shard
        where one is missing or damaged, or was found to be while it was read before.
        """
        places = self._make_places(len(samples))
        for reader, chosen, rows, source in self._find_bytes(samples):
            reader.locate(rows, places, chosen, source)
        arrays = places.copy()
        return self._conversion(arrays, lambda row: self.place_of(int(samples[row]))) if self._conversion else arrays

    def read_range(self, start: int, stop: int) -> tuple[Arrays, np.ndarray]:
        """Read samples start … stop - 1 in stored order, and the group id of each, int64 `[stop - start]`."""
        samples = np.arange(start, stop, dtype=np.int64)
        return self.read(samples), self.group_of(samples)

    def read_runs(self, starts: np.ndarray, length: int) -> Arrays:
        """Read `length` rows from each start on: field name -> new array `[k, length, *shape]`.

        Rows are numbered in stored order, and all of them are in the split. For fields of numbers. Raises DataError.
        """
        places = self._make_places(len(starts), (length,))
        for reader, chosen, rows, _ in self._find_bytes(starts):
            is_whole = reader.rows_left(rows) >= length
            reader.locate(rows[is_whole], places, chosen[is_whole], reader.fetch(rows[is_whole], length), length)
            for number in chosen[~is_whole]:
                for name, content in self._read_joined_run(int(starts[number]), length).items():
                    places.put(number, name, np.int64(find_address(content)), content)
        return places.copy()

    def _read_joined_run(self, start: int, length: int) -> dict[str, bytes]:
        """Read the bytes of rows that follow each other across blocks or shards."""
        parts = {field.name: b"" for field in self.schema.fields}
        stop = start + length
        while start < stop:
            (shard_id,), row = self._locate(np.array([start]))
            reader = self._open_shard(int(shard_id))
            taken = min(stop - start, int(reader.rows_left(row)[0]))
            places = self._make_places(1, (taken,))
            reader.locate(row, places, np.zeros(1, np.int64), reader.fetch(row, taken), taken)
            for name, rows in places.copy().items():
                parts[name] += rows.tobytes()
            start += taken
        return parts

    def plan_fetches(self, samples: np.ndarray) -> list[Fetch]:
        """Return the requests for what the node lacks of these samples, int64 `[k]`. Raises DataError."""
        return [fetch for reader, _, rows in self._split_by_shard(samples) for fetch in reader.plan(rows)]

    def _make_places(self, num_rows: int, length: tuple[int, ...] = ()) -> RowPlaces:
        types = {
            field.name: np.dtype(object if field.is_encoded else (stored_dtype(field.dtype), (*length, *field.shape)))
            for field in self._stored.fields
        }
        return RowPlaces(types, num_rows)

    def sample_bytes(self, samples: np.ndarray) -> np.ndarray:
        """Return the bytes of each sample over all fields, int64 `[k]`, from the indexes alone."""
        sizes = np.empty(len(samples), np.int64)
        for reader, chosen, rows in self._split_by_shard(samples):
            sizes[chosen] = reader.sample_bytes(rows)
        return sizes

    def extensions_of(self, samples: np.ndarray) -> dict[str, list[str]]:
        """Return for each encoded field the extensions of these samples' files, by number in stored order."""
        fields = [field for field in self.schema.fields if field.is_encoded]
        extensions = {field.name: [field.extensions[0]] * len(samples) for field in fields}
        for reader, chosen, rows in self._split_by_shard(samples):
            for field in fields:
                for row, name in zip(chosen.tolist(), reader.member_names(rows, field.name), strict=True):
                    extension = name.rpartition("/")[2].partition(".")[2].lower()
                    if extension in field.extensions:
                        extensions[field.name][row] = extension
        return extensions

    def group_of(self, global_rows: np.ndarray) -> np.ndarray:
        """Return group ids, int64 `[k]` in 0 … num_groups - 1, of samples by their number in stored order."""
        return np.searchsorted(self._group_ends, global_rows, side="right")

    def group_keys(self) -> list[str]:
        """Return the key of each group, in the order of their ids; of a mixture below the name of its component.

        A key of content that comes again in another part is counted on: `a.jsonl:1f…` becomes `a.jsonl:1f…#2`. Raises
        DataError where a shard is damaged.
        """
        keys: dict[str, None] = {}
        numbers = Counter[str]()
        prefixes = self._key_prefixes or [""] * len(self._shards)
        for number, (shard, prefix) in enumerate(zip(self._shards, prefixes, strict=True)):
            self._open_shard(number)
            block_keys = list(read_shard_keys(self._uri, shard, self._stored))
            if len(block_keys) != shard.num_blocks:
                raise DataError(
                    f"the archive has {len(block_keys)} blocks, not {shard.num_blocks}",
                    where=shard_uri(self._uri, shard),
                    fix=choose_fix(shard),
                )
            for key in (prefix + key_in_shard for key_in_shard in block_keys):
                while key in keys:
                    content = key.rpartition("#")[0] or key
                    numbers[content] += 1
                    key = f"{content}#{numbers[content] + 1}"
                keys[key] = None
        return list(itertools.compress(keys, self._group_rows))

    def place_of(self, sample: int) -> str:
        """Tell people where a sample lies: the URI of its shard, and its key.

        Reads the shard up to there.
        """
        (shard_id,), (row,) = (located.tolist() for located in self._locate(np.array([sample])))
        shard = self._shards[shard_id]
        uri = shard_uri(self._uri, shard)
        stops = np.cumsum(read_index(self._uri, shard, self._stored, self._cache)[:, 0])
        block = int(np.searchsorted(stops, row, side="right"))
        keys = read_shard_keys(self._uri, shard, self._stored)
        return f"{uri}, {next(itertools.islice(keys, block, None), 'unknown key')}"

    @functools.cached_property
    def _group_rows(self) -> np.ndarray:
        """Rows of each block that are seen."""
        rows = np.concatenate([read_index(self._uri, shard, self._stored, self._cache)[:, 0] for shard in self._shards])
        blocks = np.searchsorted(np.cumsum(rows), self._left_out, side="right")
        seen: np.ndarray = rows - np.bincount(blocks, minlength=len(rows))
        return seen

    @functools.cached_property
    def _group_ends(self) -> np.ndarray:
        return np.cumsum(self._group_rows[self._group_rows > 0])

    def _locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return shard ids, and rows within them. Raises IndexError for a number that no sample has."""
        if len(samples) and not 0 <= samples.min() <= samples.max() < self.num_samples:
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {self.num_samples}")
        num_seen_before = self._left_out - np.arange(len(self._left_out))
        stored = samples + np.searchsorted(num_seen_before, samples, side="right")
        shard_ids = np.searchsorted(self._shard_starts, stored, side="right") - 1
        return shard_ids, stored - self._shard_starts[shard_ids]

    def _split_by_shard(self, samples: np.ndarray) -> Iterator[tuple[ShardReader, np.ndarray, np.ndarray]]:
        """Yield each shard that holds some of these samples, which of them those are, and their rows in it."""
        shard_ids, rows = self._locate(samples)
        order = np.argsort(shard_ids, kind="stable")
        starts = np.flatnonzero(np.diff(shard_ids[order], prepend=-1)).tolist()
        closed = [number for number in shard_ids[order[starts]].tolist() if number not in self._open]
        if self.is_remote and len(closed) > 1:
            threads.call_together(self._open_shard, closed, MAX_FETCHES)
        for start, stop in itertools.pairwise([*starts, len(rows)]):
            chosen = order[start:stop]
            yield self._open_shard(int(shard_ids[chosen[0]])), chosen, rows[chosen]

    def _find_bytes(self, samples: np.ndarray) -> Iterator[tuple[ShardReader, np.ndarray, np.ndarray, MappedBytes]]:
        """Yield the same with the bytes that hold these rows; what the node lacks comes from all shards at once."""
        parts = [(reader, chosen, rows, reader.find(rows)) for reader, chosen, rows in self._split_by_shard(samples)]
        lacking = [part for part in parts if part[3] is None]
        if self.is_remote:
            traffic.count(cache_hits=len(parts) - len(lacking), cache_misses=len(lacking))
        is_sequence = bool(lacking) and len(samples) > 1 and bool((np.diff(samples) == 1).all())
        fetched = iter(threads.call_together(lambda part: part[0].fetch(part[2], 1, is_sequence), lacking, MAX_FETCHES))
        for reader, chosen, rows, source in parts:
            yield reader, chosen, rows, source or next(fetched)

    @functools.cached_property
    def is_remote(self) -> bool:
        """True where the shards lie in an object store."""
        return not storage.is_local(shard_uri(self._uri, self._shards[0]))

    def _open_shard(self, number: int) -> ShardReader:
        self._uses.raise_found()
        with self._lock:
            reader = self._open.get(number)
            is_opened_here = reader is None
            if reader is None:
                reader = self._open[number] = Future()
                if len(self._open) > self._max_open:
                    self._open.popitem(last=False)
            self._open.move_to_end(number)
        if is_opened_here:
            self._open_into(reader, number)
        return reader.result()

    def _open_into(self, opening: Future[ShardReader], number: int) -> None:
        """Open a shard without the lock, so that several are opened at once; one that cannot be is tried again."""
        shard = self._shards[number]
        try:
            name = functools.partial(name_samples, self._uri, shard, self._stored)
            reader = ShardReader(self._uri, shard, self._stored, self._cache, name)
            if reader.file is not None:
                self._uses.begin(reader.file)
        except BaseException as error:  # noqa: BLE001 - it is raised again, in all threads that wait
            with self._lock:
                self._open.pop(number, None)
            opening.set_exception(error)
        else:
            opening.set_result(reader)
