"""Bytes of a shard in an object store: what a reader asks for is fetched as runs of blocks, and kept on the node.

Each block is compared with its digest before a byte of it is used. One that is damaged is fetched once more, and then
named with its samples. Of the processes of a node one fetches a block, the others wait for it. Blocks of a shard
without a table of digests, which a release before has written, are used as they come: `FirstUse` hashes the whole.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable

import numpy as np

from kftrain.core import remote, storage, threads
from kftrain.data.shards.block_digests import DIGEST_BLOCK_BYTES, DIGEST_BYTES, count_digest_blocks
from kftrain.data.shards.block_file import BlockFile
from kftrain.data.shards.cache import BUSY_SECONDS, NodeCache
from kftrain.data.shards.manifest import VERIFY_AGAIN, Shard, blocks_uri, choose_fix, reading, shard_uri
from kftrain.data.shards.mapped import MappedBytes
from kftrain.data.shards.verified import File, make_changed_error, require_content, require_shard_size
from kftrain.errors import DataError, KftrainError

REQUEST_BLOCKS = 24
"""Most blocks of one request: 4.5 MiB, a range of 4 MiB wherever in its blocks it begins. A request that fails is made
again from there."""

MAX_FETCHES = 32
"""Requests that one process has under way at once."""

_turns = threading.Semaphore(MAX_FETCHES)

NameSamples = Callable[[int, int], str]
"""Names the samples of which something lies between two bytes of a shard. Slow."""

Run = tuple[int, int]
"""First block, and the one behind the last."""

Fetch = Callable[[], None]
"""Makes a request."""


class RemoteBytes:
    """Shard in an object store. All methods may be called from any thread."""

    def __init__(self, manifest_uri: str, shard: Shard, cache: NodeCache, name_samples: NameSamples) -> None:
        """Read its table. Raises DataError where that is damaged, or a shard without one has another size."""
        self._uri = shard_uri(manifest_uri, shard)
        self._shard = shard
        self._cache = cache
        self._name_samples = name_samples
        self._planned: dict[int, Run] = {}
        """Request for each block that was planned last."""
        self._name = shard.blocks_sha256
        """Name of its file in the cache."""
        self.file: File | None = None
        """File that must be hashed as a whole, having no table."""
        self._digests = self._read_digests(blocks_uri(manifest_uri, shard))
        if not self._digests:
            self.file = File(self._uri, *require_shard_size(self._uri, shard.bytes, choose_fix(shard)), shard.sha256)
            self._name = storage.sha256_text(f"{shard.sha256} {self.file.version}")

    def _read_digests(self, uri: str) -> bytes:
        """Read the table; return nothing where there is none."""
        sha256, num_bytes = self._shard.blocks_sha256, DIGEST_BYTES * count_digest_blocks(self._shard.bytes)
        try:
            return read_small_file(uri, num_bytes, sha256, self._cache, VERIFY_AGAIN) if sha256 else b""
        except DataError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return b""

    def find_whole(self) -> MappedBytes | None:
        """Return bytes that hold all of the shard; None where the node lacks some, or has not looked."""
        file = self._open()
        return MappedBytes(file.content) if file.is_whole else None

    def find(self, starts: np.ndarray, stops: np.ndarray) -> MappedBytes | None:
        """Return bytes that hold these ranges, int64 `[k]`; None where the node lacks something of them."""
        file, blocks = self._open(), self._find_blocks(starts, stops)
        return None if file.list_missing(blocks).size else MappedBytes(file.content)

    def fetch(self, starts: np.ndarray, stops: np.ndarray, is_sequence: bool = False) -> MappedBytes:
        """Return bytes that hold these ranges, int64 `[k]`; fetch what the node lacks. Raises DataError.

        `is_sequence`: what follows them is read next, so that the last request is as large as may be.
        """
        file, blocks = self._open(), self._find_blocks(starts, stops)
        share = self._cache.patience
        end = time.monotonic() + share * remote.deadline.seconds(REQUEST_BLOCKS * DIGEST_BLOCK_BYTES)
        while (missing := file.list_missing(blocks)).size:
            # Fewer, larger requests: what is planned together is needed soon, and a block between two is soon fetched.
            missing = np.union1d(missing, missing[:-1][np.diff(missing) == 2] + 1)
            planned = [self._planned.get(block, (block, block + 1)) for block in missing.tolist()]
            runs = cut_runs(np.unique([number for run in planned for number in range(*run)]))
            if is_sequence:
                runs[-1] = runs[-1][0], min(runs[-1][0] + REQUEST_BLOCKS, count_digest_blocks(self._shard.bytes))
            outcomes = threads.call_together(functools.partial(self._fetch_run, file), runs, MAX_FETCHES)
            if False in outcomes and time.monotonic() > end:
                self._cache.patience = share / 8  # whoever has claimed them may be stopped, and would be for long
                outcomes.append(None)
            if None in outcomes:
                file = self._move_to_memory(file, blocks)
            if False in outcomes:
                time.sleep(BUSY_SECONDS)
        return MappedBytes(file.content)

    def plan(self, starts: np.ndarray, stops: np.ndarray) -> list[Fetch]:
        """Return the requests for what the node lacks of these ranges, int64 `[k]`.

        Nothing is fetched that somebody else fetches, or that the node has no room for.
        """
        file = self._open()
        runs = [] if file.is_private else cut_runs(file.list_missing(self._find_blocks(starts, stops)))
        self._planned = {block: run for run in runs for block in range(*run)}
        return [functools.partial(self._fetch_ahead, run) for run in runs]

    def _fetch_ahead(self, run: Run) -> None:
        file, (first, stop) = self._open(), run
        if not file.is_private and self._fetch_run(file, run) is False and first + 1 < stop:
            middle = (first + stop) // 2  # somebody else fetches a part of it
            self._fetch_ahead((first, middle))
            self._fetch_ahead((middle, stop))

    def _open(self) -> BlockFile:
        """Open the node's file, or one in memory for what nobody can verify: it must not outlive this process."""
        return self._cache.open(self._name, self._shard.bytes, is_private=not self._digests)

    def _move_to_memory(self, file: BlockFile, blocks: np.ndarray) -> BlockFile:
        """Return a file in memory in place of one that these blocks cannot be written to; it is given what is there."""
        memory = self._cache.open(self._name, self._shard.bytes, is_private=True)
        lacking = memory.list_missing(blocks)
        for block in np.setdiff1d(lacking, file.list_missing(lacking)).tolist():
            self._cache.reserve(memory, DIGEST_BLOCK_BYTES)
            start = block * DIGEST_BLOCK_BYTES
            memory.write(block, memoryview(file.content)[start : start + DIGEST_BLOCK_BYTES])
        return memory

    def _find_blocks(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return the numbers of the blocks in which ranges lie, ascending, int64 `[blocks]`.

        An empty range at the end of the shard lies in its last block.
        """
        firsts = np.minimum(starts, self._shard.bytes - 1) // DIGEST_BLOCK_BYTES
        ends = np.maximum(firsts, (stops - 1) // DIGEST_BLOCK_BYTES) + 1
        length = count_digest_blocks(self._shard.bytes) + 1
        is_needed = (np.bincount(firsts, minlength=length) - np.bincount(ends, minlength=length)).cumsum() > 0
        return np.flatnonzero(is_needed)

    def _fetch_run(self, file: BlockFile, run: Run) -> bool | None:
        """Fetch the blocks of a run; False: somebody else fetches some of them, None: the node has no room."""
        try:
            with file.claim(*run) as is_claimed:
                if not is_claimed:
                    return False
                for first, stop in cut_runs(file.list_missing(np.arange(*run))):  # others may just have fetched some
                    if not self._cache.reserve(file, (stop - first) * DIGEST_BLOCK_BYTES):
                        return None
                    self._fetch_blocks(file, first, stop)
        except OSError:  # of this node: what the store answers is a KftrainError
            if file.is_private:
                raise
            with self._cache.tell_failure():
                raise
            return None
        return True

    def _fetch_blocks(self, file: BlockFile, first: int, stop: int) -> None:
        """Fetch claimed blocks. An answer that is cut off is used as far as it goes, and asked for again from there."""
        damaged = b""
        while first < stop:
            content = memoryview(self._read(first, first + 1 if damaged else stop))
            num_good = self._count_good(first, content)
            file.write(first, content[: num_good * DIGEST_BLOCK_BYTES])
            first += num_good
            if not num_good and damaged:
                raise self._make_damaged_error(first, is_same=damaged == content)
            damaged = b"" if num_good else bytes(content[:DIGEST_BLOCK_BYTES])

    def _count_good(self, first: int, content: memoryview) -> int:
        """Count the blocks at the beginning of a content, from block `first` on, that are what they should be."""
        if not self._digests:
            return count_digest_blocks(len(content))
        num_good = 0
        while content:
            block, content = content[:DIGEST_BLOCK_BYTES], content[DIGEST_BLOCK_BYTES:]
            start = (first + num_good) * DIGEST_BYTES
            if hashlib.sha256(block).digest() != self._digests[start : start + DIGEST_BYTES]:
                break
            num_good += 1
        return num_good

    def _read(self, first: int, stop: int) -> bytes:
        """Read blocks, the first of them whole. Raises DataError, which says so where the shard has another size."""
        start, end = first * DIGEST_BLOCK_BYTES, min(stop * DIGEST_BLOCK_BYTES, self._shard.bytes)
        least = min(DIGEST_BLOCK_BYTES, end - start) if self._digests else end - start
        try:
            with _turns, reading(self._uri, choose_fix(self._shard)):
                return storage.read_range(self._uri, start, end, least)
        except DataError:
            require_shard_size(self._uri, self._shard.bytes, choose_fix(self._shard))
            raise

    def _make_damaged_error(self, block: int, is_same: bool) -> KftrainError:
        """Make the error for a block that came damaged twice, and as the same bytes or not."""
        fix, start = choose_fix(self._shard), block * DIGEST_BLOCK_BYTES
        require_shard_size(self._uri, self._shard.bytes, fix)
        stop = min(start + DIGEST_BLOCK_BYTES, self._shard.bytes)
        what = f"its content has changed in bytes {start:,} to {stop:,} ({self._name_samples(start, stop)})"
        return make_changed_error(self._uri, what, fix, self._shard.bytes if is_same else -1)


def cut_runs(blocks: np.ndarray) -> list[Run]:
    """Cut ascending blocks into runs of those that follow each other, none longer than a request."""
    runs: list[Run] = []
    for block in blocks.tolist():
        if runs and runs[-1][1] == block and block - runs[-1][0] < REQUEST_BLOCKS:
            runs[-1] = runs[-1][0], block + 1
        else:
            runs.append((block, block + 1))
    return runs


def read_small_file(uri: str, num_bytes: int, sha256: str, cache: NodeCache | None, fix: str) -> bytes:
    """Read a file of known size and digest; a remote one once for all processes of a node that share a cache.

    Raises DataError where it is missing or another one.
    """
    is_local = storage.is_local(uri)

    def fetch() -> bytes:
        for _ in range(2):  # what answers for a store may be wrong once
            try:
                with reading(uri, fix):
                    content = storage.read_bytes(uri) if is_local else storage.read_range(uri, 0, num_bytes)
            except DataError:
                require_shard_size(uri, num_bytes, fix)
                raise
            if storage.sha256_bytes(content) == sha256:
                return content
            require_content(uri, sha256, fix)
        raise make_changed_error(uri, "what is read of it is not what it holds", fix, -1)

    return fetch() if is_local or cache is None else cache.read_file(sha256, fetch)
