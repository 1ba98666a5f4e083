"""Verification that the shards of a dataset still are what its manifest says."""

from __future__ import annotations

import contextlib
import functools
import itertools
import stat
from array import array
from collections.abc import Callable, Iterator

import numpy as np

from kftrain.core import storage, threads
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
from kftrain.data.shards.reader import count_index_bytes, read_index
from kftrain.data.shards.verified import describe_truncation, require_content, require_shard_size
from kftrain.errors import DataError

MAX_NAMED = 3
"""Samples of damaged bytes that are named; the others are counted."""

MAX_LISTINGS = 16
"""Folders that are listed at once."""

MANY_FOLDERS = 1000
"""Folders of parts that take longer to list than all that lies beside them is likely to."""


def verify_shards(uri: str, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> None:
    """Read shards i, i + n, … of the manifest, which lies at `uri`, and compare them with it, for `share` = (i, n).

    Returns if all is well. That no key comes twice was seen when the shards were written, and equal content is equal
    keys. Raises DataError that names the first shard which is missing, truncated or changed.
    """
    shards = [(name, shard) for name in SPLITS for shard in manifest.splits[name].shards][share[0] :: share[1]]
    seen: set[tuple[str, str]] = set()
    for split, shard in shards:
        fix, tar, index = choose_fix(shard), shard_uri(uri, shard), index_uri(uri, shard)
        if (tar, shard.sha256) not in seen:
            require_shard_size(tar, shard.bytes, fix)  # an adopted tar may hold samples of both splits
            require_content(tar, shard.sha256, fix)
        seen.add((tar, shard.sha256))
        require_shard_size(index, count_index_bytes(shard, manifest.schema_of(split)), fix)
        require_content(index, shard.index_sha256, fix)


def check_listing(uri: str, manifest: Manifest) -> dict[str, str]:
    """Compare the length of every file with the manifest, by one listing.

    Return the URI of each file -> what changes with its content, empty where its store does not say. Raises DataError
    that names the first file that is missing or has another length.
    """
    expected = describe_files(uri, manifest)
    folders = choose_listings(uri, list(dict.fromkeys(where.rpartition("/")[0] for where in expected)))
    listed = threads.call_together(_list_files, folders, MAX_LISTINGS)
    files = dict(itertools.chain.from_iterable(listed))  # parts have folders of their own
    for where, (num_bytes, fix) in expected.items():
        if where not in files:
            raise DataError("missing", where=where, fix=fix)
        if files[where][0] != num_bytes:
            raise DataError(describe_truncation(files[where][0], num_bytes), where=where, fix=fix)
    return {where: files[where][1] for where in expected}


def describe_files(uri: str, manifest: Manifest) -> dict[str, tuple[int, str]]:
    """Return the URI of each file of a dataset -> its length, and what to do where it has another one."""
    expected: dict[str, tuple[int, str]] = {}
    for split in SPLITS:
        schema = manifest.schema_of(split)
        for shard in manifest.splits[split].shards:
            expected[shard_uri(uri, shard)] = shard.bytes, choose_fix(shard)
            expected[index_uri(uri, shard)] = count_index_bytes(shard, schema), choose_fix(shard)
    return expected


def choose_listings(uri: str, folders: list[str]) -> list[str]:
    """Choose what to list of a dataset whose manifest lies at `uri`: its folders, or once all parts of its store.

    A store lists all that is below a folder, a thousand files at a time: also the parts of other datasets.
    """
    parts = storage.join(uri.rsplit("/", 2)[0], "parts")
    others = [folder for folder in folders if folder.rpartition("/")[0] != parts]
    is_worth = len(folders) - len(others) >= MANY_FOLDERS and not storage.is_local(uri)
    return [parts, *others] if is_worth else folders


def _list_files(folder: str) -> list[tuple[str, tuple[int, str]]]:
    """List URI, size and version of each file of a folder, and in a store of those below; none where there is none."""
    with reading(folder), contextlib.suppress(FileNotFoundError):
        if not storage.is_local(folder):
            return [
                (storage.join(folder, name), (int(info["size"]), f"{storage.read_version(info)} {version}".strip()))
                for name, info in storage.find(folder).values()
                for version in [info.get("VersionId") or info.get("generation") or ""]
            ]
        entries = storage.entries(storage.local_path(folder))
        return [
            (f"{folder}/{path.name}", (status.st_size, f"{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"))
            for path, status in entries
            if stat.S_ISREG(status.st_mode)
        ]
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


def name_samples(manifest_uri: str, shard: Shard, schema: SampleSchema, start: int, stop: int) -> str:
    """Name the samples of which something lies in bytes start … stop - 1 of a shard. Reads the shard up to there."""
    index = read_index(manifest_uri, shard, schema)
    touches = (index[:, 1::2] < stop) & (index[:, 1::2] + index[:, 2::2] > start)
    blocks = np.flatnonzero(touches.any(axis=1)).tolist()
    keys: list[str] = []
    with contextlib.suppress(DataError):  # a header may be damaged, too
        all_keys = read_shard_keys(manifest_uri, shard, schema)
        keys = list(itertools.islice(all_keys, blocks[0], blocks[0] + MAX_NAMED)) if blocks else []
    names = ", ".join(keys[: len(blocks)]) or "no key that can be read"
    return f"{names} and {len(blocks) - len(keys)} more" if len(blocks) > len(keys) > 0 else names


def has_its_shards(folder_uri: str) -> bool:
    """Tell whether the dataset in a folder is there, by its manifest and the sizes of its files."""
    try:
        uri = storage.join(folder_uri, MANIFEST_NAME)
        check_listing(uri, read_manifest(uri))
    except DataError:
        return False
    return True
