"""`manifest.json`: what a dataset's shards are, and whether they still are that.

    <root>/shards/<dataset digest>/manifest.json
                                   train-000000.tar        train-000000.index.npy        train-000000.blocks
                                   validation-000000.tar   validation-000000.index.npy   validation-000000.blocks

Adopted shards stay where others have written them: the manifest says where that is, their indexes lie beside it.

The dataset digest is the sha256 of content alone: format version, sample schema, task settings (which say how
to read the bytes) and the digests of all shards and indexes. Neither the source's listing nor a time is part
of it, so equal input and settings give the equal digest on any machine; of two sources with equal content,
the manifest names the one that was sharded first. Nor are the tables of digests (`block_digests`): they follow from
the shards, and datasets of before have none.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kftrain.core import storage
from kftrain.data import schema as schemas
from kftrain.data.schema import SPLITS, SampleSchema
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.pages import DIGEST, MAX_COUNT, PagedShards, PagesEntry, publish_pages
from kftrain.data.shards.reading import ADOPT_AGAIN
from kftrain.data.shards.reading import SHARD_AGAIN as SHARD_AGAIN
from kftrain.data.shards.reading import VERIFY_AGAIN as VERIFY_AGAIN
from kftrain.data.shards.reading import reading as reading
from kftrain.errors import DataError
from kftrain.run import documents

FORMAT_VERSION = 2
"""Version of shards and indexes: part of the dataset digest, and of what decides whether shards are used again."""

MANIFEST_NAME = "manifest.json"

DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
"""Types that a field may consist of: plain numbers, so that reading a shard can never run code."""

MAX_ROW_BYTES = (1 << 31) - 1
"""Largest row of a field: what numpy can hold as one item."""

MAX_PLAIN_SHARDS = 512
"""Most shards that `manifest.json` lists itself; those of a larger dataset stand in pages beside it."""

PAGED_VERSION = 2
"""Schema version of a manifest with pages: releases before it refuse it."""

_FIELD_NAME = re.compile(r"[a-z0-9_]{1,40}")
_EXTENSION = re.compile(r"[a-z0-9_]{1,20}(\.[a-z0-9_]{1,20})*")
_NO_TEXT = re.compile(r"[\ud800-\udfff]")
"""Characters that Python makes of names that are not UTF-8."""
_UNPRINTABLE = re.compile(rf"[\x00-\x1f\x7f]|{_NO_TEXT.pattern}")
_OWN_NAME = re.compile(r"(train|validation)-\d{6,}\.tar")
_OWN_FOLDER = re.compile(r"(\.\./(parts/)?[0-9a-f]{64})?")
_ABSOLUTE = re.compile(r"/|[a-z0-9+.-]+://")


class Shard(BaseModel):
    """Tar of samples with its index."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[^\x00-\x1f\x7f]+\.[tT][aA][rR]$")
    """File name; of an adopted shard its path in `folder`."""
    bytes: int = Field(ge=0, le=MAX_COUNT)
    sha256: str = Field(pattern=DIGEST)
    num_blocks: int = Field(ge=1, le=MAX_COUNT)
    num_samples: int = Field(ge=1, le=MAX_COUNT)
    index_sha256: str = Field(pattern=DIGEST)
    blocks_sha256: str = Field("", pattern=rf"{DIGEST}|^$")
    """Digest of the table of the digests of its blocks; empty: there is none."""
    folder: str = ""
    """Folder from the manifest's own one; empty: there. Of an adopted shard an absolute path or URI."""
    index: str = Field("", pattern=r"^((train|validation)-\d{6,}\.index\.npy)?$")
    """Name of an adopted shard's index, which lies beside the manifest; else empty."""

    @property
    def is_adopted(self) -> bool:
        """True if somebody else has written it, and it is read where it is."""
        return bool(self.index)

    @model_validator(mode="after")
    def _check_place(self) -> Shard:
        """Refuse names of files that whoever can write a manifest may not name."""
        if self.is_adopted:
            if not _ABSOLUTE.match(self.folder) or "::" in self.folder or _climbs(self.folder.split("://", 1)[-1]):
                raise ValueError(f"no absolute folder: {self.folder}")
            if _climbs(self.name) or self.name.startswith("/"):
                raise ValueError(f"a name that leaves its folder: {self.name}")
        elif not _OWN_NAME.fullmatch(self.name) or not _OWN_FOLDER.fullmatch(self.folder):
            raise ValueError(f"no name of ours: {self.folder} {self.name}")
        return self


class Split(BaseModel):
    """The shards of one split, in order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shards: Sequence[Shard] = Field(min_length=1)

    def column(self, name: str) -> np.ndarray:
        """Return `bytes`, `num_blocks` or `num_samples` of each shard, int64 `[shards]`; no page is read for it."""
        if isinstance(self.shards, PagedShards):
            return self.shards.column(name)
        return np.array([vars(shard)[name] for shard in self.shards], np.int64)

    @property
    def num_samples(self) -> int:
        """Number of rows of all shards."""
        return sum(self.column("num_samples").tolist())

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all shards; in the validation split each is an independent unit."""
        return sum(self.column("num_blocks").tolist())

    @property
    def num_bytes(self) -> int:
        """Size of all tars in bytes."""
        return sum(self.column("bytes").tolist())


class Component(BaseModel):
    """Dataset of a mixture, by its place among the shards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    dataset_digest: str = Field(pattern=DIGEST)
    num_shards: dict[str, int]
    """Number of shards of each split; they follow those of the component before."""


class Manifest(documents.Document):
    """Description of a dataset: its shards, its schema and their digest."""

    format_version: int = FORMAT_VERSION
    dataset_digest: str = Field(pattern=DIGEST)
    sample_schema: SampleSchema
    task_kind: str
    task_settings: dict[str, Any]
    splits: dict[str, Split]
    source: str
    """`data.source` of the sharding that wrote this manifest."""
    source_listing_digest: str
    """Digest of the source's listing at that time."""
    baselines: dict[str, dict[str, float]]
    """Baselines on the validation records: metric name -> baseline name -> value."""
    parent: str = ""
    """Digest of the dataset whose shards this one holds, too, because input was added to its source; else empty."""
    findings: dict[str, Any] = Field(default_factory=dict)
    """Findings while writing: how many samples of a kind there are, and the names of the first ones."""
    statistics: dict[str, Any] = Field(default_factory=dict)
    """Counts over the records of each split, for reports; empty where nobody has counted them."""
    components: list[Component] = Field(default_factory=list)
    """Datasets of a mixture; empty for a dataset of one source."""
    validation_schema: SampleSchema | None = None
    """Schema of the validation split, where its samples have other fields than those of `sample_schema`."""

    @model_validator(mode="after")
    def _check_components(self) -> Manifest:
        """Refuse components that do not share out the shards of each split, each with some."""
        for split in self.splits if self.components else ():
            counts = [component.num_shards.get(split, 0) for component in self.components]
            if min(counts) < 1 or sum(counts) != len(self.splits[split].shards):
                raise ValueError(f"the components have {counts} shards of {split}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, in which all shards are listed. Raises DataError for a page that is damaged."""
        splits = {name: Split(shards=list(split.shards)) for name, split in self.splits.items()}  # pydantic reads none
        return documents.Document.to_dict(self.model_copy(update={"splits": splits}))

    def split_by_component(self) -> list[Manifest]:
        """Return the manifest of each dataset of a mixture, seen from where this one lies; else the whole."""
        if not self.components:
            return [self]
        manifests, starts = [], dict.fromkeys(SPLITS, 0)
        for component in self.components:
            stops = {split: starts[split] + component.num_shards[split] for split in SPLITS}
            splits = {
                split: Split.model_construct(shards=self.splits[split].shards[starts[split] : stops[split]])
                for split in SPLITS
            }
            manifests.append(self.model_copy(update={"splits": splits, "components": []}))
            starts = stops
        return manifests

    def schema_of(self, split: str) -> SampleSchema:
        """Return the fields of a split's samples."""
        return self.validation_schema if self.validation_schema and split == "validation" else self.sample_schema

    @property
    def is_adopted(self) -> bool:
        """True if the shards are those of others, read where they are."""
        return bool(self.adopted_folders)

    @property
    def adopted_folders(self) -> frozenset[str]:
        """Folders of all adopted shards; no page is read for it."""
        shards = [split.shards for split in self.splits.values()]
        if isinstance(shards[0], PagedShards):
            return frozenset(shards[0].entry.adopted_folders)
        return frozenset(shard.folder for shard in itertools.chain.from_iterable(shards) if shard.is_adopted)


def describe_counts(manifest: Manifest) -> str:
    """Tell people how much there is in the splits."""
    train, validation = (manifest.splits[split].num_samples for split in ("train", "validation"))
    is_stream = [(field.name, field.shape) for field in manifest.sample_schema.fields] == [("tokens", ())]
    units = ("tokens", "documents") if is_stream else ("samples", "")
    return f"{train:,} {units[0]} for training, {validation:,} {units[1]} for validation".replace("  ", " ")


def shard_name(split: str, number: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{number:06d}.tar"


def index_name(shard: str) -> str:
    """Return the file name of a shard's index."""
    return shard.removesuffix(".tar") + ".index.npy"


def content_digest(
    schema: SampleSchema,
    task_settings: dict[str, Any],
    splits: Mapping[str, Sequence[Shard]],
    components: Sequence[Component] = (),
    validation_schema: SampleSchema | None = None,
) -> str:
    """Compute the dataset digest."""
    parts = [[component.name, component.num_shards] for component in components]
    own = {"validation_schema": validation_schema.to_dict()} if validation_schema else {}
    return storage.digest_json(
        {
            "format_version": FORMAT_VERSION,
            "sample_schema": schema.to_dict(),
            **own,
            "task_settings": task_settings,
            "splits": {
                name: [[shard.sha256, shard.index_sha256] for shard in shards] for name, shards in splits.items()
            },
            **({"components": parts} if parts else {}),
        }
    )


def read_manifest(uri: str, cache: NodeCache | None = None, sha256: str = "") -> Manifest:
    """Read the manifest at `uri`. Raises DataError where it is missing, damaged, edited or of another format.

    `cache`: keeps what is read for the processes of this node. `sha256`: of the manifest when somebody has looked at
    the whole; only where it is that one no page is read here, but when a shard in it is asked for.
    """
    read = functools.partial(documents.read_content, uri)
    content = cache.read_file(sha256, read) if cache and sha256 else read()
    document = storage.decode_json(content, uri)
    is_paged = isinstance(document, dict) and document.get("schema_version") == PAGED_VERSION
    manifest = documents.validate(Manifest, _open_pages(document, uri, cache) if is_paged else document, uri)
    if manifest.format_version != FORMAT_VERSION or set(manifest.splits) != set(SPLITS):
        raise DataError("the shards have another format", where=uri, value=manifest.format_version, fix=SHARD_AGAIN)
    for name in SPLITS:
        check_schema(manifest.schema_of(name), uri)
    if not sha256 or storage.sha256_bytes(content) != sha256:
        _check_digest(uri, manifest)
    return manifest


def _open_pages(document: dict[str, Any], uri: str, cache: NodeCache | None) -> dict[str, Any]:
    """Return the document of a manifest with pages as one that lists its shards itself."""
    entry = documents.validate(PagesEntry, document.pop("pages", None), uri)
    if set(entry.num_shards) != set(SPLITS):
        raise DataError("the shards have another format", where=uri, value=list(entry.num_shards), fix=SHARD_AGAIN)
    shards, splits = PagedShards(uri, entry, cache, Shard.model_validate), {}
    for split in SPLITS:
        splits[split] = Split.model_construct(shards=shards[: entry.num_shards[split]])
        shards = shards[entry.num_shards[split] :]
    return document | {"schema_version": documents.SCHEMA_VERSION, "splits": splits}


def _check_digest(uri: str, manifest: Manifest) -> None:
    """Raise DataError unless the shards are those of the dataset digest: all pages are read."""
    shards = {name: manifest.splits[name].shards for name in SPLITS}
    schema, settings, own = manifest.sample_schema, manifest.task_settings, manifest.validation_schema
    try:
        expected = content_digest(schema, settings, shards, manifest.components, own)
    except ValueError as error:  # text that is not UTF-8, numbers that are not finite
        raise DataError(f"the manifest is damaged: {error}", where=uri, fix=SHARD_AGAIN) from error
    if manifest.dataset_digest != expected:
        raise DataError("the manifest does not match its own digest", where=uri, value=expected, fix=SHARD_AGAIN)


def has_pages(manifest: Manifest) -> bool:
    """Tell whether a manifest has so many shards that they stand in pages."""
    return sum(len(split.shards) for split in manifest.splits.values()) > MAX_PLAIN_SHARDS


def publish_manifest(uri: str, manifest: Manifest) -> None:
    """Publish a manifest; the pages of one with many shards come first, so that whoever sees it finds them."""
    document = manifest.to_dict()
    if has_pages(manifest):
        entry = publish_pages(uri, document.pop("splits"), manifest.adopted_folders)
        document |= {"schema_version": PAGED_VERSION, "pages": entry.to_dict()}
    storage.publish_json(uri, document)


def shard_uri(manifest_uri: str, shard: Shard) -> str:
    """Return the URI of a shard's tar."""
    return _build_uri(manifest_uri, shard, shard.name)


def index_uri(manifest_uri: str, shard: Shard) -> str:
    """Return the URI of a shard's index."""
    if shard.is_adopted:
        return storage.join(manifest_uri.rsplit("/", 1)[0], shard.index)
    return _build_uri(manifest_uri, shard, index_name(shard.name))


def blocks_name(index: str) -> str:
    """Return the file name of the table of digests that lies beside an index."""
    return index.removesuffix(".index.npy") + ".blocks"


def blocks_uri(manifest_uri: str, shard: Shard) -> str:
    """Return the URI of the table of digests of a shard."""
    folder, _, index = index_uri(manifest_uri, shard).rpartition("/")
    return storage.join(folder, blocks_name(index))


def choose_fix(shard: Shard) -> str:
    """Return what to do where a shard is missing or damaged."""
    return ADOPT_AGAIN if shard.is_adopted else SHARD_AGAIN


def is_adoptable(folder: str, name: str) -> bool:
    """Tell whether a manifest can name a shard of others."""
    return not _UNPRINTABLE.search(name) and not _NO_TEXT.search(folder) and not _climbs(name)


def _climbs(path: str) -> bool:
    return any(part in ("", ".", "..") for part in path.strip("/").split("/"))


def _build_uri(manifest_uri: str, shard: Shard, name: str) -> str:
    """Return the URI of a file of a shard: parts are two folders away, and stores know no `..`."""
    if shard.is_adopted:
        return storage.join(shard.folder, name)
    folder = manifest_uri.rsplit("/", 1)[0]
    if shard.folder:
        folder = storage.join(folder.rsplit("/", 1)[0], shard.folder.removeprefix("../"))
    return storage.join(folder, name)


def check_schema(schema: SampleSchema, where: str) -> None:
    """Refuse with a DataError what shards cannot hold: fields of strange names, of objects, of empty rows."""
    names = [field.name for field in schema.fields]
    suffixes = [suffix for field in schema.fields for suffix in field.suffixes]
    if not names or len(set(names)) < len(names):
        raise DataError("a sample schema needs fields of different names", where=where, value=names)
    if len(set(suffixes)) < len(suffixes):
        raise DataError("two fields have files of one extension", where=where, value=suffixes)
    for field in schema.fields:
        if not _FIELD_NAME.fullmatch(field.name):
            raise DataError(
                "a field's name is not of lower-case letters, digits and underscores",
                where=where,
                value=field.name,
            )
        (_check_encoded if field.is_encoded else _check_array)(field, where)


def _check_array(field: schemas.Field, where: str) -> None:
    shown = f"{field.dtype} {list(field.shape)}"
    if field.dtype not in DTYPES or not all(length >= 1 for length in field.shape) or field.extensions:
        raise DataError(f"field {field.name} has no fixed numeric format", where=where, value=shown)
    if row_bytes(field) > MAX_ROW_BYTES:
        raise DataError(f"a row of field {field.name} is larger than 2 GiB", where=where, value=shown, fix="cut it")


def _check_encoded(field: schemas.Field, where: str) -> None:
    if field.shape:
        raise DataError(f"field {field.name} is a file and has no shape", where=where, value=list(field.shape))
    if not field.extensions:
        raise DataError(f"field {field.name} is a file and needs its extensions", where=where, fix="e.g. ('jpg',)")
    for extension in field.extensions:
        if not _EXTENSION.fullmatch(extension):
            raise DataError("not an extension of lower-case letters and digits", where=where, value=extension)
        if extension.rsplit(".", 1)[-1] in schemas.PICKLES:
            raise DataError("reading such a file could run code", where=where, value=extension)


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return what `kftrain shards show` prints: plain data."""
    return {
        "dataset_digest": manifest.dataset_digest,
        "source": manifest.source,
        "task": manifest.task_kind,
        "fields": {f.name: _describe_field(f) for name in SPLITS for f in manifest.schema_of(name).fields},
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
        "components": {component.name: component.source for component in manifest.components},
    }


def _describe_field(field: schemas.Field) -> str:
    return f"files ({', '.join(field.extensions)})" if field.is_encoded else f"{field.dtype} {list(field.shape)}"


def row_bytes(field: schemas.Field) -> int:
    """Return the size in bytes of one row of a field of numbers."""
    return np.dtype(field.dtype).itemsize * math.prod(field.shape)
