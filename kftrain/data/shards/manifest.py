"""`manifest.json`: what a dataset's shards are, and whether they still are that.

    <root>/shards/<dataset digest>/manifest.json
                                   train-000000.tar        train-000000.index.npy
                                   validation-000000.tar   validation-000000.index.npy

Adopted shards stay where others have written them: the manifest says where that is, their indexes lie beside it.

The dataset digest is the sha256 of content alone: format version, sample schema, task settings (which say how
to read the bytes) and the digests of all shards and indexes. Neither the source's listing nor a time is part
of it, so equal input and settings give the equal digest on any machine; of two sources with equal content,
the manifest names the one that was sharded first.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kftrain.core import storage
from kftrain.data import schema as schemas
from kftrain.data.schema import SPLITS, SampleSchema
from kftrain.data.shards.npy_header import stored_dtype
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

MAX_COUNT = (1 << 53) - 1
"""Most bytes and samples of a shard: what every reader of JSON holds exactly."""

_FIELD_NAME = re.compile(r"[a-z0-9_]{1,40}")
_EXTENSION = re.compile(r"[a-z0-9_]{1,20}(\.[a-z0-9_]{1,20})*")
SHARD_AGAIN = "shard the data again: kftrain shard"
"""Fix for damaged shards."""

_DIGEST = r"^[0-9a-f]{64}$"

_NO_TEXT = re.compile(r"[\ud800-\udfff]")
"""Characters that Python makes of names that are not UTF-8."""
_UNPRINTABLE = re.compile(rf"[\x00-\x1f\x7f]|{_NO_TEXT.pattern}")
_OWN_NAME = re.compile(r"(train|validation)-\d{6,}\.tar")
_OWN_FOLDER = re.compile(r"(\.\./(parts/)?[0-9a-f]{64})?")
_ABSOLUTE = re.compile(r"/|[a-z0-9+.-]+://")
ADOPT_AGAIN = "adopt the shards again: kftrain shards adopt"
"""Fix where somebody has changed shards that are not ours."""


class Shard(BaseModel):
    """Tar of samples with its index."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[^\x00-\x1f\x7f]+\.[tT][aA][rR]$")
    """File name; of an adopted shard its path in `folder`."""
    bytes: int = Field(ge=0, le=MAX_COUNT)
    sha256: str = Field(pattern=_DIGEST)
    num_blocks: int = Field(ge=1, le=MAX_COUNT)
    num_samples: int = Field(ge=1, le=MAX_COUNT)
    index_sha256: str = Field(pattern=_DIGEST)
    folder: str = ""
    """Folder from the manifest's own one; empty: there. Of an adopted shard an absolute path or URI. Of an adopted one
    an absolute path or URI."""
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

    shards: list[Shard] = Field(min_length=1)

    @property
    def num_samples(self) -> int:
        """Number of rows of all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all shards; in the validation split each is an independent unit."""
        return sum(shard.num_blocks for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Size of all tars in bytes."""
        return sum(shard.bytes for shard in self.shards)


class Component(BaseModel):
    """Dataset of a mixture, by its place among the shards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    dataset_digest: str = Field(pattern=_DIGEST)
    num_shards: dict[str, int]
    """Number of shards of each split; they follow those of the component before."""


class Manifest(documents.Document):
    """Description of a dataset: its shards, its schema and their digest."""

    format_version: int = FORMAT_VERSION
    dataset_digest: str = Field(pattern=_DIGEST)
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

    def split_by_component(self) -> list[Manifest]:
        """Return the manifest of each dataset of a mixture, seen from where this one lies; else the whole."""
        if not self.components:
            return [self]
        manifests, starts = [], dict.fromkeys(SPLITS, 0)
        for component in self.components:
            stops = {split: starts[split] + component.num_shards[split] for split in SPLITS}
            splits = {split: Split(shards=self.splits[split].shards[starts[split] : stops[split]]) for split in SPLITS}
            manifests.append(self.model_copy(update={"splits": splits, "components": []}))
            starts = stops
        return manifests

    def schema_of(self, split: str) -> SampleSchema:
        """Return the fields of a split's samples."""
        return self.validation_schema if self.validation_schema and split == "validation" else self.sample_schema

    @property
    def is_adopted(self) -> bool:
        """True if the shards are those of others, read where they are."""
        return any(shard.is_adopted for split in self.splits.values() for shard in split.shards)


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
    splits: dict[str, list[Shard]],
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


def read_manifest(uri: str) -> Manifest:
    """Read the manifest at `uri`. Raises DataError where it is missing, damaged, edited or of another format."""
    manifest = documents.read(Manifest, uri)
    if manifest.format_version != FORMAT_VERSION or set(manifest.splits) != set(SPLITS):
        raise DataError("the shards have another format", where=uri, value=manifest.format_version, fix=SHARD_AGAIN)
    shards = {name: manifest.splits[name].shards for name in SPLITS}
    schema, settings, own = manifest.sample_schema, manifest.task_settings, manifest.validation_schema
    try:
        expected = content_digest(schema, settings, shards, manifest.components, own)
    except ValueError as error:
        raise DataError(f"the manifest is damaged: {error}", where=uri, fix=SHARD_AGAIN) from error
    for name in SPLITS:
        check_schema(manifest.schema_of(name), uri)
    if manifest.dataset_digest != expected:
        raise DataError("the manifest does not match its own digest", where=uri, value=expected, fix=SHARD_AGAIN)
    return manifest


def shard_uri(manifest_uri: str, shard: Shard) -> str:
    """Return the URI of a shard's tar."""
    return _build_uri(manifest_uri, shard, shard.name)


def index_uri(manifest_uri: str, shard: Shard) -> str:
    """Return the URI of a shard's index."""
    if shard.is_adopted:
        return storage.join(manifest_uri.rsplit("/", 1)[0], shard.index)
    return _build_uri(manifest_uri, shard, index_name(shard.name))


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
    return stored_dtype(field.dtype).itemsize * math.prod(field.shape)


@contextlib.contextmanager
def reading(uri: str, fix: str = SHARD_AGAIN) -> Iterator[None]:
    """Make what goes wrong while reading a shard or its index a DataError that names it.

    Storage that is away for now is a StorageError: another attempt may find it.
    """
    try:
        with storage.simplify_errors(uri):
            yield
    except FileNotFoundError as error:
        raise DataError("missing", where=uri, fix=fix) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=uri, fix="check the storage and its permissions") from error
