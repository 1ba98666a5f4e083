"""`manifest.json`: what a dataset's shards are, and whether they still are that.

    <root>/shards/<dataset digest>/manifest.json
                                   train-000000.tar        train-000000.index.npy
                                   validation-000000.tar   validation-000000.index.npy

The dataset digest is the sha256 of content alone: format version, sample schema, task settings (which say how
to read the bytes) and the digests of all shards and indexes. Neither the source's listing nor a time is part
of it, so equal input and settings give the equal digest on any machine; of two sources with equal content,
the manifest names the one that was sharded first.
"""

from __future__ import annotations

import contextlib
import math
import re
from array import array
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from kftrain import storage
from kftrain.data import schema as schemas
from kftrain.data.schema import SPLITS, SampleSchema
from kftrain.data.shards.keys import decode_key
from kftrain.data.shards.npy_header import npy_header, stored_dtype
from kftrain.data.sources import tar_reader
from kftrain.data.sources.listing import list_files
from kftrain.errors import DataError
from kftrain.run import documents

FORMAT_VERSION = 1
"""Of shards and indexes: part of the dataset digest, and of what decides whether shards can be used again."""

MANIFEST_NAME = "manifest.json"

DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
"""What a field may consist of: plain numbers, so that reading a shard can never run code."""

MAX_ROW_BYTES = (1 << 31) - 1
"""Largest row of a field: what numpy can hold as one item."""

_FIELD_NAME = re.compile(r"[a-z0-9_]{1,40}")
_SHARD_AGAIN = "shard the data again: kftrain shard"
_DIGEST = r"^[0-9a-f]{64}$"


class Shard(BaseModel):
    """One tar with its index."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^(train|validation)-\d{6,}\.tar$")
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=_DIGEST)
    num_blocks: int = Field(ge=1)
    num_samples: int = Field(ge=1)
    index_sha256: str = Field(pattern=_DIGEST)


class Split(BaseModel):
    """The shards of one split, in order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shards: list[Shard] = Field(min_length=1)

    @property
    def num_samples(self) -> int:
        """Rows of all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_blocks(self) -> int:
        """Blocks of all shards; in the validation split each is an independent unit."""
        return sum(shard.num_blocks for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Size of all tars."""
        return sum(shard.bytes for shard in self.shards)


class Manifest(documents.Document):
    """What the shards of a dataset are."""

    format_version: int = FORMAT_VERSION
    dataset_digest: str = Field(pattern=_DIGEST)
    sample_schema: SampleSchema
    task_kind: str
    task_settings: dict[str, Any]
    splits: dict[str, Split]
    source: str
    """`data.source` of the sharding that wrote this."""
    source_listing_digest: str
    """Digest of the source's listing at that time."""
    baselines: dict[str, dict[str, float]]
    """On the validation records: metric name -> baseline name -> value."""


def shard_name(split: str, number: int) -> str:
    """File name of a shard."""
    return f"{split}-{number:06d}.tar"


def index_name(shard: str) -> str:
    """File name of a shard's index."""
    return shard.removesuffix(".tar") + ".index.npy"


def content_digest(schema: SampleSchema, task_settings: dict[str, Any], splits: dict[str, list[Shard]]) -> str:
    """The dataset digest."""
    return storage.digest_json(
        {
            "format_version": FORMAT_VERSION,
            "sample_schema": schema.to_dict(),
            "task_settings": task_settings,
            "splits": {
                name: [[shard.sha256, shard.index_sha256] for shard in shards] for name, shards in splits.items()
            },
        }
    )


def read_manifest(uri: str) -> Manifest:
    """The manifest at `uri`. Raises DataError where it is missing, damaged, edited or of another format."""
    manifest = documents.read(Manifest, uri)
    if manifest.format_version != FORMAT_VERSION or set(manifest.splits) != set(SPLITS):
        raise DataError("the shards have another format", where=uri, value=manifest.format_version, fix=_SHARD_AGAIN)
    shards = {name: manifest.splits[name].shards for name in SPLITS}
    expected = content_digest(manifest.sample_schema, manifest.task_settings, shards)
    check_schema(manifest.sample_schema, uri)
    if manifest.dataset_digest != expected:
        raise DataError("the manifest does not match its own digest", where=uri, value=expected, fix=_SHARD_AGAIN)
    return manifest


def shard_uri(manifest_uri: str, name: str) -> str:
    """URI of a file beside the manifest."""
    return storage.join(manifest_uri.rsplit("/", 1)[0], name)


def check_schema(schema: SampleSchema, where: str) -> None:
    """Refuses with a DataError what shards cannot hold: fields of strange names, of objects, of empty rows."""
    names = [field.name for field in schema.fields]
    if not names or len(set(names)) < len(names):
        raise DataError("a sample schema needs fields of different names", where=where, value=names)
    for field in schema.fields:
        if not _FIELD_NAME.fullmatch(field.name):
            raise DataError(
                "a field's name is not of lower-case letters, digits and underscores",
                where=where,
                value=field.name,
            )
        shown = f"{field.dtype} {list(field.shape)}"
        if field.dtype not in DTYPES or not all(length >= 1 for length in field.shape):
            raise DataError(f"field {field.name} has no fixed numeric format", where=where, value=shown)
        if row_bytes(field) > MAX_ROW_BYTES:
            raise DataError(f"a row of field {field.name} is larger than 2 GiB", where=where, value=shown, fix="cut it")


def describe(manifest: Manifest) -> dict[str, Any]:
    """What `kftrain shards show` prints: plain data."""
    return {
        "dataset_digest": manifest.dataset_digest,
        "source": manifest.source,
        "task": manifest.task_kind,
        "fields": {f.name: f"{f.dtype} {list(f.shape)}" for f in manifest.sample_schema.fields},
        "splits": {
            name: {
                "shards": len(split.shards),
                "blocks": split.num_blocks,
                "samples": split.num_samples,
                "bytes": split.num_bytes,
            }
            for name, split in manifest.splits.items()
        },
        "baselines": manifest.baselines,
    }


def verify_shards(uri: str, level: Literal["sha256", "size"] = "sha256", share: tuple[int, int] = (0, 1)) -> None:
    """Compares shards i, i + n, … of the manifest at `uri` with it, for `share` = (i, n); returns if all is well.

    `size` looks at lengths only, `sha256` reads everything. That no key comes twice was seen when the shards were
    written, and equal content is equal keys. Raises DataError that names the first shard which is missing, truncated
    or changed.
    """
    manifest = read_manifest(uri)
    chosen = [shard for name in SPLITS for shard in manifest.splits[name].shards][share[0] :: share[1]]
    for shard in chosen:
        _verify_size(shard_uri(uri, shard.name), shard.bytes)
        _verify_size(shard_uri(uri, index_name(shard.name)), index_bytes(shard, manifest.sample_schema))
        if level == "sha256":
            _verify_content(shard_uri(uri, shard.name), shard.sha256)
            _verify_content(shard_uri(uri, index_name(shard.name)), shard.index_sha256)


def check_listing(uri: str, manifest: Manifest) -> None:
    """Raises DataError that names the first file of the dataset that is missing or has another length: one listing."""
    found = {entry.name: entry.size_bytes for entry in list_files(uri.rsplit("/", 1)[0], lambda _: True)}
    for shard in (shard for name in SPLITS for shard in manifest.splits[name].shards):
        expected = {shard.name: shard.bytes, index_name(shard.name): index_bytes(shard, manifest.sample_schema)}
        for name, num_bytes in expected.items():
            if name not in found:
                raise DataError("missing", where=shard_uri(uri, name), fix=_SHARD_AGAIN)
            if found[name] != num_bytes:
                raise _truncated(shard_uri(uri, name), found[name], num_bytes)


def verify_keys(uri: str) -> None:
    """Raises DataError where a key comes twice in a split of the dataset at `uri`: somebody else wrote these shards."""
    manifest = read_manifest(uri)
    for split in manifest.splits.values():
        refuse_duplicate_keys([shard_uri(uri, shard.name) for shard in split.shards], manifest.sample_schema)


def refuse_duplicate_keys(shard_uris: list[str], schema: SampleSchema, fix: str = _SHARD_AGAIN) -> None:
    """Raises DataError that names the key and both shards where a key comes twice. Memory: 8 bytes per block."""
    suspects = repeated(array("q", (hash(key) for uri in shard_uris for key in block_keys(uri, schema))))
    first_seen: dict[str, str] = {}
    for uri in shard_uris if suspects else []:
        name = uri.rsplit("/", 1)[-1]
        for key in block_keys(uri, schema):
            if key in first_seen:
                raise DataError(f"a key comes twice, first in {first_seen[key]}", where=name, value=key, fix=fix)
            if hash(key) in suspects:
                first_seen[key] = name


def repeated(values: array[int]) -> set[int]:
    """The values of an int64 array that come more than once."""
    ordered = np.sort(np.frombuffer(values, np.int64))
    return set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())


def block_keys(uri: str, schema: SampleSchema) -> Iterator[str]:
    """The keys of a shard's blocks, in order, from the tar's own headers. Raises DataError."""
    suffix = f".{schema.fields[0].name}.npy"
    with storage.open_read(uri) as stream:
        for member in tar_reader.walk(stream, uri):
            if member.name.endswith(suffix):
                yield decode_key(member.name.removesuffix(suffix))


def row_bytes(field: schemas.Field) -> int:
    """Size of one row of a field."""
    return stored_dtype(field.dtype).itemsize * math.prod(field.shape)


def index_bytes(shard: Shard, schema: SampleSchema) -> int:
    """Size of a shard's index file, which follows from its shape."""
    shape = (shard.num_blocks, 1 + len(schema.fields))
    return len(npy_header("<i8", shape)) + 8 * shape[0] * shape[1]


def _verify_size(uri: str, expected: int) -> None:
    with reading(uri):
        found = storage.size_bytes(uri)
    if found != expected:
        raise _truncated(uri, found, expected)


def _truncated(uri: str, found: int, expected: int) -> DataError:
    return DataError(f"truncated or changed: it has {found} bytes, not {expected}", where=uri, fix=_SHARD_AGAIN)


def _verify_content(uri: str, expected: str) -> None:
    with reading(uri):
        found = storage.sha256_file(uri)
    if found != expected:
        raise DataError("its content has changed: the sha256 differs from the manifest's", where=uri, fix=_SHARD_AGAIN)


@contextlib.contextmanager
def reading(uri: str) -> Iterator[None]:
    """Makes what goes wrong while reading a shard or its index a DataError that names it.

    Storage that is away for now is a StorageError: another attempt may find it.
    """
    try:
        with storage.plain_errors(uri):
            yield
    except FileNotFoundError as error:
        raise DataError("missing", where=uri, fix=_SHARD_AGAIN) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=uri, fix="check the storage and its permissions") from error
