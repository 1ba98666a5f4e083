"""`data.shards: adopt`: the shards of others become a dataset where they are.

    <root>/shards/adopted/<digest of dataset and place>/manifest.json
                                                        train-000000.index.npy   validation-000000.index.npy   …
                                                        train-000000.blocks      validation-000000.blocks      …

    1. Each shard is read once, several at a time: its members by their headers, its digest. Its table goes to disk.
    2. The extensions of all of them say which fields there are. A sample that lacks one is refused, or left out.
    3. For each shard and split an index says which samples there are, and where their files lie. Beside them, last, the
       manifest names the shards with their digests.

The dataset digest is that of content, wherever it lies; the folder's name also holds the place, for the manifest does.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.data.file_content import HELD_OUT_NAMES, IMAGE_SUFFIXES, choose_held_out_name
from kftrain.data.schema import BYTES, SPLITS, Field, Record, SampleSchema
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards import tar_samples, verify
from kftrain.data.shards.manifest import MANIFEST_NAME, Manifest, Shard, Split, check_schema
from kftrain.data.shards.npy_header import encode_npy
from kftrain.data.shards.staging import publish_folder, staging_folder
from kftrain.errors import DataError
from kftrain.process.machine import num_cpus
from kftrain.sharding.adopted.scan import ABSENT, Scanned, scan
from kftrain.sharding.parts import findings
from kftrain.sharding.parts.baselines import measure_baselines
from kftrain.sharding.parts.document import MAX_NAMED, Named
from kftrain.sharding.parts.encoder import Encoding
from kftrain.sharding.sources import resolve_source
from kftrain.sharding.sources.listing import SourceFile, digest_listing
from kftrain.sharding.sources.webdataset import WebDatasetSource, source_folder

if TYPE_CHECKING:
    from kftrain.tasks.base import EncodingTask

MAX_THREADS = 8
"""Shards that are read at a time: hashing runs beside the interpreter, walking through headers does not."""


@dataclass(frozen=True)
class Adopted:
    """Dataset of others' shards, and whether it was there before."""

    manifest_uri: str
    manifest: Manifest
    reused: bool


def adopt(config: Config, task: EncodingTask | None, progress: Progress) -> Adopted:
    """Make the dataset of the shards that `data.source` names, or find it; nothing is written beside them.

    Nothing is written beside them.

    `task`: what will read them; None: nobody in particular. Raises DataError and ConfigError.
    """
    adopting = _Adopting(config, task, progress)
    pointer = storage.join(config.run.storage_root, "shards", "by-source", f"{adopting.source_digest()}.json")
    state = adopting.state
    adopted = None if config.data.rehash else _find(config.run.storage_root, pointer, state)
    if adopted is not None:
        progress(f"the shards are unchanged: using {adopted.manifest_uri}")
        return adopted
    uri, manifest = adopting.run()
    manifest_path = uri.removeprefix(config.run.storage_root.rstrip("/") + "/")
    digest = manifest.dataset_digest
    storage.publish_json(pointer, {"dataset_digest": digest, "manifest_uri": manifest_path, "state": state})
    return Adopted(uri, manifest, reused=False)


def _find(root: str, pointer: str, state: str) -> Adopted | None:
    """Find what was made of shards of these names, sizes and times before, if it is still there."""
    try:
        target = storage.read_json_if_exists(pointer)
        if target is None or ("state" in target and target["state"] != state):
            return None
        uri = storage.join(root, target["manifest_uri"])
        manifest = manifests.read_manifest(uri)
        verify.check_listing(uri, manifest)
    except (DataError, ValueError, KeyError, TypeError):  # not where storage is away
        return None
    return Adopted(uri, manifest, reused=True)


class _Adopting:
    """Adoption of shards, from the listing to the published manifest."""

    def __init__(self, config: Config, task: EncodingTask | None, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._folder = source_folder(config.data.source)
        self._files, self._listing_digest = self._list()
        self._encoding = None if task is None else Encoding.of(config.data, config.task.kind, task)
        self._settings = {} if self._encoding is None else self._encoding.settings

    def source_digest(self) -> str:
        """Return the digest of all that decides the dataset, as far as it is known without reading the shards."""
        data = self._config.data
        schemas = None if self._encoding is None else self._encoding.dump_schemas()
        return storage.digest_json(
            {
                "adopt": manifests.FORMAT_VERSION,
                "folder": self._folder,
                "listing": self._listing_digest,
                "fields": {name: list(of) for name, of in data.fields.items()},
                "max_incomplete_samples": data.max_incomplete_samples,
                "validation_fraction": data.validation_fraction,
                "task": {"kind": self._config.task.kind, "settings": self._settings, "schemas": schemas},
            }
        )

    def run(self) -> tuple[str, Manifest]:
        """Read all shards and publish their manifest; return its URI and its content."""
        root = storage.join(self._config.run.storage_root, "shards")
        self._progress(f"reading the headers of {len(self._files):,} shards of {self._config.data.source}")
        with staging_folder(root) as content:
            tables = content.parent / "tables"
            tables.mkdir()
            scans = list(self._scan_shards(tables))
            manifest = self._build_manifest(content, scans)
            if self._list()[1] != self._listing_digest:
                raise DataError(
                    "the shards changed while they were read",
                    where=self._config.data.source,
                    fix="run again when nobody writes to them",
                )
            place = storage.digest_json([manifest.dataset_digest, self._folder, [file.name for file in self._files]])
            folder = storage.join(root, "adopted", place)
            manifests.publish_manifest(str(content / MANIFEST_NAME), manifest)
            if self._encoding is not None:  # that the task can read the samples is seen here
                measured = measure_baselines(self._encoding, str(content / MANIFEST_NAME), manifest)
                manifest = manifest.model_copy(update={"baselines": measured})
                manifests.publish_manifest(str(content / MANIFEST_NAME), manifest)
            publish_folder(content, folder, MANIFEST_NAME, verify.has_its_shards)
        self._progress(f"adopted: {folder}")
        uri = storage.join(folder, MANIFEST_NAME)
        return uri, manifests.read_manifest(uri)

    def _list(self) -> tuple[list[SourceFile], str]:
        source = resolve_source.resolve(self._config.data)
        if not isinstance(source, WebDatasetSource):
            raise DataError(
                "only WebDataset shards (*.tar) can be adopted",
                where="data.source",
                value=self._config.data.source,
                fix="set data.shards=write",
            )
        files = source.entries()
        for file in files:
            if not manifests.is_adoptable(self._folder, file.name):
                what = "the name of a shard holds control characters, or is not UTF-8"
                raise DataError(what, where=self._folder, value=file.name, fix="rename it")
        digest, self.state = digest_listing(source.listing())
        return files, digest

    def _scan_shards(self, tables: Path) -> Iterator[Scanned]:
        """Scan each shard that is in a split."""
        named = tell_splits([file.name for file in self._files], self._config.data.source)
        wanted = [file for file in self._files if named is None or named[file.name]]
        chosen = self._config.data.fields
        extensions = frozenset(itertools.chain.from_iterable(chosen.values())) if chosen else None
        with ThreadPoolExecutor(min(MAX_THREADS, num_cpus(), len(wanted)), thread_name_prefix="adopt") as threads:
            scans = [
                threads.submit(scan, file, tables / f"{number}.npy", extensions, self._choose_split_test(file, named))
                for number, file in enumerate(wanted)
            ]
            try:
                yield from (pending.result() for pending in scans)
            finally:
                threads.shutdown(cancel_futures=True)

    def _choose_split_test(self, file: SourceFile, named: dict[str, str] | None) -> Callable[[str], bool]:
        if named is not None:
            is_held_out = named[file.name] == "validation"
            return lambda key: is_held_out
        fraction = self._config.data.validation_fraction
        return lambda key: resolve_source.choose_split(Record(f"{file.name}:{key}", {}), fraction) == "validation"

    def _build_manifest(self, folder: Path, scans: list[Scanned]) -> Manifest:
        extensions = set(itertools.chain.from_iterable(scanned.extensions for scanned in scans))
        if not extensions:
            where, fix = self._config.data.source, "name others in data.source, or what they hold in data.fields"
            raise DataError("the shards hold no samples", where=where, fix=fix)
        schema = build_schema(extensions, self._config.data.fields, self._config.data.source)
        shards, incomplete, empty = self._write_indexes(folder, scans, schema)
        for split in SPLITS:
            if not shards[split]:
                raise resolve_source.make_empty_split_error(split, self._config.data)
        named_by_kind = {"incomplete, left out": incomplete, "empty": empty}
        noticed = {kind: scanned.model_dump() for kind, scanned in named_by_kind.items() if scanned.count}
        for line in findings.describe_findings(noticed):
            self._progress(f"found {line}")
        return Manifest(
            dataset_digest=manifests.content_digest(schema, self._settings, shards),
            sample_schema=schema,
            task_kind="" if self._encoding is None else self._config.task.kind,
            task_settings=self._settings,
            splits={split: Split(shards=shards[split]) for split in SPLITS},
            source=self._config.data.source,
            source_listing_digest=self._listing_digest,
            baselines={},
            findings=noticed,
        )

    def _write_indexes(
        self, folder: Path, scans: list[Scanned], schema: SampleSchema
    ) -> tuple[dict[str, list[Shard]], Named, Named]:
        """Write the indexes; return the shards of each split, samples that lack a file, and files of no bytes."""
        shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
        incomplete, empty = Named(), Named()
        for scanned in scans:
            held_out, index = _build_index(scanned, schema)
            absent = (index[:, 1::2] == ABSENT).any(axis=1)
            _add_samples(incomplete, scanned, absent)
            if incomplete.count > self._config.data.max_incomplete_samples:
                raise _make_incomplete_error(scanned, index, schema, self._config.data.max_incomplete_samples)
            _add_samples(empty, scanned, (index[:, 2::2] == 0).any(axis=1) & ~absent)
            for split, is_split in zip(SPLITS, (~held_out, held_out), strict=True):
                if (chosen := index[is_split & ~absent]).size:
                    shards[split].append(
                        self._write_shard_index(folder, f"{split}-{len(shards[split]):06d}", scanned, chosen)
                    )
        return shards, incomplete, empty

    def _write_shard_index(self, folder: Path, name: str, scanned: Scanned, index: np.ndarray) -> Shard:
        content, blocks = encode_npy(index), scanned.blocks.read_bytes()
        (folder / f"{name}.index.npy").write_bytes(content)
        (folder / f"{name}.blocks").write_bytes(blocks)
        return Shard(
            name=scanned.file.name,
            bytes=scanned.file.size_bytes,
            sha256=scanned.sha256,
            num_blocks=len(index),
            num_samples=len(index),
            index_sha256=hashlib.sha256(content).hexdigest(),
            blocks_sha256=hashlib.sha256(blocks).hexdigest(),
            folder=self._folder,
            index=f"{name}.index.npy",
        )


def _add_samples(named: Named, scanned: Scanned, is_one: np.ndarray) -> None:
    """Add samples of one shard, told by a flag for each."""
    numbers = np.flatnonzero(is_one).tolist()
    named.add(len(numbers), read_sample_keys(scanned, numbers[: MAX_NAMED - len(named.first)]))


def read_sample_keys(scanned: Scanned, numbers: list[int]) -> list[str]:
    """Read the keys of samples of a shard, with its name. Reads its headers again."""
    if not numbers:
        return []
    with storage.open_read(scanned.file.uri) as stream:
        walk = itertools.islice(tar_samples.group_members(stream, scanned.file.uri), 1 + max(numbers))
        return [f"{scanned.file.name}:{key}" for number, (key, _) in enumerate(walk) if number in numbers]


def _build_index(scanned: Scanned, schema: SampleSchema) -> tuple[np.ndarray, np.ndarray]:
    """Tell for each sample whether it is held out, and build the index of all; `ABSENT` where one lacks a file."""
    table = np.load(scanned.table)
    index = np.zeros((len(table), 1 + 2 * len(schema.fields)), np.int64)
    index[:, 0], index[:, 1::2] = 1, ABSENT
    for number, field in enumerate(schema.fields):
        places = index[:, 1 + 2 * number : 3 + 2 * number]
        for column, extension in enumerate(scanned.extensions):
            if extension in field.extensions:
                spans = table[:, 1 + 2 * column : 3 + 2 * column]
                present = spans[:, 0] != ABSENT
                if (twice := np.flatnonzero(present & (places[:, 0] != ABSENT))).size:
                    raise DataError(
                        f"two members give the field '{field.name}'",
                        where=read_sample_keys(scanned, twice[:1].tolist())[0],
                        value=list(field.extensions),
                        fix="say in data.fields which field has which extensions",
                    )
                places[present] = spans[present]
    return table[:, 0] == 1, index


def _make_incomplete_error(scanned: Scanned, index: np.ndarray, schema: SampleSchema, budget: int) -> DataError:
    number = int(np.flatnonzero((index[:, 1::2] == ABSENT).any(axis=1))[0])
    lacks = [field for field, start in zip(schema.fields, index[number, 1::2].tolist(), strict=True) if start == ABSENT]
    limit = f"; of others {budget:,} may be left out" if budget else ""
    return DataError(
        f"the sample has no .{' or .'.join(lacks[0].extensions)} for the field '{lacks[0].name}'{limit}",
        where=read_sample_keys(scanned, [number])[0],
        fix="complete it, raise data.max_incomplete_samples, or name the fields that you want in data.fields",
    )


IMAGE_EXTENSIONS = tuple(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)

_NAMES = {**dict.fromkeys(IMAGE_EXTENSIONS, "image"), "txt": "text", "text": "text", "cls": "label"}


def name_field(extension: str) -> str:
    """Name the field that a member gives where nobody says another: as the records of such a shard have it."""
    if extension in _NAMES:
        return _NAMES[extension]
    return (extension.removesuffix(".npy") if extension != "npy" else extension).replace(".", "_")


def build_schema(extensions: Iterable[str], named: Mapping[str, Sequence[str]], where: str) -> SampleSchema:
    """Build the schema: a field for each name in `named`, or for each kind of member where none is named.

    Raises DataError for what no field can be.
    """
    groups: dict[str, list[str]] = {name: list(of) for name, of in named.items()}
    for extension in sorted(set(extensions)) if not named else ():
        groups.setdefault(name_field(extension), []).append(extension)
    schema = SampleSchema(tuple(Field(name, BYTES, (), tuple(groups[name])) for name in sorted(groups)))
    check_schema(schema, where)
    return schema


_TRAIN = "train"


def tell_splits(names: list[str], where: str) -> dict[str, str] | None:
    """Tell each shard's split by its name: `train`, `validation`, or '' for none; return None where names do not tell.

    They tell where some say `train` and some `validation`, `val` or `test`, in a folder's name or in their own, as
    `imagenet-train-000000.tar`. Of the latter the first that is there is our validation split, as in folders of images.
    Raises DataError for a shard that says nothing then.
    """
    words = {name: _find_split_word(name) for name in names}
    held_out = choose_held_out_name(words.values())
    if held_out is None or _TRAIN not in words.values():
        return None
    for name, word in words.items():
        if not word:
            raise DataError(
                "the name of the shard does not say which split it is in, as those of others do",
                where=where,
                value=name,
                fix=f"put it below {_TRAIN} or {held_out}, or adopt only the shards of one kind",
            )
    return {name: {_TRAIN: "train", held_out: "validation"}.get(word, "") for name, word in words.items()}


def _find_split_word(name: str) -> str:
    """Return the word of the first part of a path that says only one split; '' where none does."""
    for part in name.lower().split("/"):
        words = {word for word in re.split(r"[^a-z]+", part) if word in (_TRAIN, *HELD_OUT_NAMES)}
        if len(words) == 1:
            return words.pop()
    return ""
