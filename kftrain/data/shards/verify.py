"""Verification that the shards of a dataset still are what its manifest says."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import stat
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from kftrain.core import storage
from kftrain.data.schema import SPLITS, SampleSchema
from kftrain.data.shards import tar_reader, tar_samples
from kftrain.data.shards.keys import decode_key
from kftrain.data.shards.manifest import (
    MANIFEST_NAME,
    SHARD_AGAIN,
    Manifest,
    Shard,
    choose_fix,
    index_uri,
    read_manifest,
    reading,
    shard_uri,
)
from kftrain.data.shards.npy_header import npy_header
from kftrain.data.shards.reader import read_index
from kftrain.data.shards.verified import describe_truncation, require_content, require_shard_size
from kftrain.errors import DataError

MAX_LISTINGS = 16
"""Folders that are listed at once."""


def verify_shards(
    uri: str, manifest: Manifest, level: Literal["sha256", "size"] = "sha256", share: tuple[int, int] = (0, 1)
) -> None:
    """Compare shards i, i + n, … of the manifest, which lies at `uri`, with it, for `share` = (i, n).

    Returns if all is well. `size` looks at lengths only, `sha256` reads everything. That no key comes twice was seen
    when the shards were written, and equal content is equal keys. Raises DataError that names the first shard which is
    missing, truncated or changed.
    """
    chosen = [(name, shard) for name in SPLITS for shard in manifest.splits[name].shards][share[0] :: share[1]]
    seen: set[tuple[str, str]] = set()
    for split, shard in chosen:
        fix, tar = choose_fix(shard), shard_uri(uri, shard)
        require_shard_size(tar, shard.bytes, fix)
        require_shard_size(index_uri(uri, shard), count_index_bytes(shard, manifest, split), fix)
        if level == "sha256":
            if (tar, shard.sha256) not in seen:  # an adopted tar may hold samples of both splits
                require_content(tar, shard.sha256, fix)
            seen.add((tar, shard.sha256))
            require_content(index_uri(uri, shard), shard.index_sha256, fix)


def verify_before_start(uri: str, manifest: Manifest, verify: str, rank: int, num_ranks: int) -> None:
    """Check the dataset before the first step of an attempt, as `data.verify` says.

    One process lists the files; for `everything` all processes hash their share.
    """
    if rank == 0:
        check_listing(uri, manifest)
    if verify == "everything":
        verify_shards(uri, manifest, share=(rank, num_ranks))


def check_listing(uri: str, manifest: Manifest) -> None:
    """Raise DataError that names the first file that is missing or has another length, by one listing."""
    expected: dict[str, tuple[int, Shard]] = {}
    for split in SPLITS:
        for shard in manifest.splits[split].shards:
            expected[shard_uri(uri, shard)] = shard.bytes, shard
            expected[index_uri(uri, shard)] = count_index_bytes(shard, manifest, split), shard
    folders = dict.fromkeys(where.rpartition("/")[0] for where in expected)
    calls = [(contextvars.copy_context(), folder) for folder in folders]  # how long the caller waits for storage
    with ThreadPoolExecutor(MAX_LISTINGS) as threads:  # parts have folders of their own
        listed = threads.map(lambda call: call[0].run(_list_sizes, call[1]), calls)
        sizes = dict(itertools.chain.from_iterable(listed))
    for where, (num_bytes, shard) in expected.items():
        if where not in sizes:
            raise DataError("missing", where=where, fix=choose_fix(shard))
        if sizes[where] != num_bytes:
            raise DataError(describe_truncation(sizes[where], num_bytes), where=where, fix=choose_fix(shard))


def _list_sizes(folder: str) -> list[tuple[str, int]]:
    """List URI and size of each file of a folder; none where there is no folder."""
    with reading(folder), contextlib.suppress(FileNotFoundError):
        if not storage.is_local(folder):
            return [(storage.join(folder, name), int(info["size"])) for name, info in storage.find(folder).values()]
        entries = storage.entries(storage.local_path(folder))
        return [(f"{folder}/{path.name}", status.st_size) for path, status in entries if stat.S_ISREG(status.st_mode)]
    return []


def verify_keys(uri: str, manifest: Manifest) -> None:
    """Raise DataError where a key comes twice in a split and a part, or an index does not fit its shard.

    Then somebody else wrote these shards.
    """
    for name, split in (item for one in manifest.split_by_component() for item in one.splits.items()):
        schema = manifest.schema_of(name)
        folders: dict[str, list[Shard]] = {}
        for shard in split.shards:  # a task may count the blocks of each part from 0 on
            folders.setdefault(shard.folder, []).append(shard)
        for shards in folders.values():
            _refuse_duplicates([(one.name, functools.partial(read_shard_keys, uri, one, schema)) for one in shards])
        for shard in split.shards:
            read_index(uri, shard, schema)


def refuse_duplicate_keys(shard_uris: list[str], schema: SampleSchema, fix: str = SHARD_AGAIN) -> None:
    """Raise DataError that names the key and both shards where a key comes twice. Memory: 8 bytes per block."""
    _refuse_duplicates(
        [(uri.rsplit("/", 1)[-1], functools.partial(read_block_keys, uri, schema)) for uri in shard_uris], fix
    )


def _refuse_duplicates(shards: list[tuple[str, Callable[[], Iterator[str]]]], fix: str = SHARD_AGAIN) -> None:
    suspects = find_repeated(array("q", (hash(key) for _, keys in shards for key in keys())))
    first_seen: dict[str, str] = {}
    for name, keys in shards if suspects else []:
        for key in keys():
            if key in first_seen:
                raise DataError(f"a key comes twice, first in {first_seen[key]}", where=name, value=key, fix=fix)
            if hash(key) in suspects:
                first_seen[key] = name


def find_repeated(values: array[int]) -> set[int]:
    """Return the values of an int64 array that come more than once."""
    ordered = np.sort(np.frombuffer(values, np.int64))
    return set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())


def read_block_keys(uri: str, schema: SampleSchema) -> Iterator[str]:
    """Yield the keys of a shard's blocks, in order, from the tar's own headers. Raises DataError."""
    suffixes = schema.fields[0].suffixes
    with storage.open_read(uri) as stream:
        for member in tar_reader.walk(stream, uri):
            folder, slash, base = member.name.rpartition("/")
            key, dot, extension = base.partition(".")
            if dot + extension in suffixes:
                yield decode_key(folder + slash + key)


def read_shard_keys(manifest_uri: str, shard: Shard, schema: SampleSchema) -> Iterator[str]:
    """Yield the keys of a shard's blocks, in order. Raises DataError.

    Those of an adopted one begin with its name, as shards of others may repeat each other's keys.
    """
    uri = shard_uri(manifest_uri, shard)
    if not shard.is_adopted:
        yield from read_block_keys(uri, schema)
        return
    index = read_index(manifest_uri, shard, schema)
    with reading(uri, choose_fix(shard)), storage.open_read(uri) as stream:
        starts = iter(index[:, 1].tolist())
        start = next(starts, None)
        for key, members in tar_samples.group_members(stream, uri):
            if any(member.offset_bytes == start for member in members.values()):
                yield f"{shard.name}:{key}"
                start = next(starts, None)


def count_index_bytes(shard: Shard, manifest: Manifest, split: str) -> int:
    """Return the size of a shard's index file, which follows from its shape."""
    shape = (shard.num_blocks, 1 + 2 * len(manifest.schema_of(split).fields))
    return len(npy_header("<i8", shape)) + 8 * shape[0] * shape[1]


def has_its_shards(folder_uri: str) -> bool:
    """Tell whether the dataset in a folder is there, by its manifest and the sizes of its files."""
    try:
        uri = storage.join(folder_uri, MANIFEST_NAME)
        verify_shards(uri, read_manifest(uri), "size")
    except DataError:
        return False
    return True
