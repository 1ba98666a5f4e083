"""Turns a source into shards: once, reproducibly, and safely against being killed at any point.

    1. The listing of the source and all settings make the source digest. If `by-source/<it>.json` points to shards
       that still are what their manifest says, nothing is left to do.
    2. Otherwise each split is read from the source, encoded by the task and written aside (shardwriter.py). The
       source is read once per split and once for the baselines: memory holds one record and one block at a time.
    3. The manifest is written last, the folder is published under its dataset digest (staging.py), then the pointer.

The pointer comes after what it points to: a kill in between costs another sharding, with the same bytes and digest.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kftrain import plugins, storage
from kftrain.config import Config
from kftrain.data.clusters import Clusters, cluster_of
from kftrain.data.schema import SPLITS, Block, Record, Source
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards.manifest import MANIFEST_NAME, Manifest, Shard, Split
from kftrain.data.shards.staging import publish_folder, staging_folder
from kftrain.data.shards.writer import SplitWriter
from kftrain.data.sources import resolve_source
from kftrain.errors import DataError, KftrainError

if TYPE_CHECKING:
    from kftrain.tasks.base import Task

Progress = Callable[[str], None]

_OTHER = {"train": "lower", "validation": "raise"}


@dataclass(frozen=True)
class ShardingResult:
    """The shards of a configuration."""

    manifest_uri: str
    dataset_digest: str
    reused: bool
    """Whether unchanged shards were found."""
    manifest: Manifest
    seconds: float


def shard_dataset(config: Config, task: Task, progress: Progress) -> ShardingResult:
    """The shards of the configuration's source under its task: found, or written now. `progress` gets lines to show.

    Raises DataError (bad, empty or changing source), ConfigError (no such source), UserCodeError or RetryableError (the
    disk is full).
    """
    start = time.monotonic()
    sharding = _Sharding(config, task, resolve_source.resolve(config.data), progress)
    pointer = storage.join(config.run.storage_root, "shards", "by-source", f"{sharding.source_digest()}.json")
    manifest = _find(config.run.storage_root, pointer, progress)
    reused = manifest is not None
    if manifest is None:
        with storage.telling_full_disk(storage.join(config.run.storage_root, "shards")):
            manifest = sharding.run()
            digest = manifest.dataset_digest
            storage.publish_json(pointer, {"dataset_digest": digest, "manifest_uri": _below_root(digest)})
    uri = storage.join(config.run.storage_root, _below_root(manifest.dataset_digest))
    return ShardingResult(uri, manifest.dataset_digest, reused, manifest, time.monotonic() - start)


def _below_root(dataset_digest: str) -> str:
    return f"shards/{dataset_digest}/{MANIFEST_NAME}"


def _find(root: str, pointer: str, progress: Progress) -> Manifest | None:
    """The manifest that the pointer leads to, if all its shards are there and unchanged."""
    try:
        found = storage.read_json_if_exists(pointer)
        if found is None:
            return None
        uri = storage.join(root, _below_root(found["dataset_digest"]))
        manifests.verify_shards(uri)
        manifest = manifests.read_manifest(uri)
    except (KftrainError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, KftrainError) and error.retryable:  # storage is away: the shards may be as they were
            raise
        progress(f"the shards of this source cannot be used again ({error}); sharding again")
        return None
    progress(f"the source is unchanged: using the shards at {uri.rsplit('/', 1)[0]}")
    return manifest


class _Sharding:
    """One sharding, from the source to the published manifest."""

    def __init__(self, config: Config, task: Task, source: Source, progress: Progress) -> None:
        self._config = config
        self._task = task
        self._source = source
        self._progress = progress
        self._listing_digest = storage.digest_json(source.listing())
        with self._task_code():
            self._schema = task.sample_schema()
            self._settings = json.loads(storage.dump_json(task.settings()))
        manifests.check_schema(self._schema, "task.schema()")

    def source_digest(self) -> str:
        """Digest of all that decides the shards, as far as it is known without reading the source."""
        data, task = self._config.data, self._config.task
        return storage.digest_json(
            {
                "format_version": manifests.FORMAT_VERSION,
                "source": data.source,
                "listing": self._listing_digest,
                "text_field": data.text_field,
                "shard_size_bytes": data.shard_size_bytes,
                "validation_fraction": data.validation_fraction,
                "task": {"kind": task.kind, "settings": self._settings, "schema": self._schema.to_dict()},
            }
        )

    def run(self) -> Manifest:
        """Reads, encodes, writes and publishes; the manifest that is then in the store."""
        root = self._config.run.storage_root
        self._progress(f"sharding {self._config.data.source}")
        with staging_folder(storage.join(root, "shards")) as folder:
            splits = {split: self._write_split(folder, split) for split in SPLITS}
            manifest = self._manifest(splits, self._baselines())
            self._refuse_changed_source()
            storage.publish_json(str(folder / MANIFEST_NAME), manifest.to_dict())
            uri = storage.join(root, _below_root(manifest.dataset_digest))
            publish_folder(folder, uri.rsplit("/", 1)[0], MANIFEST_NAME, _is_good)
        self._progress(f"shards written to {uri.rsplit('/', 1)[0]}")
        return manifests.read_manifest(uri)

    def _write_split(self, folder: Path, split: str) -> list[Shard]:
        with SplitWriter(folder, split, self._schema, self._config.data.shard_size_bytes) as writer:
            announced = 0
            for block in self._blocks(split):
                writer.write(block)
                if len(writer.shards) > announced:
                    announced = len(writer.shards)
                    self._progress(_line(writer.shards[-1]))
            shards = writer.finish()
        self._check_split(folder, split, writer)
        for shard in shards[announced:]:
            self._progress(_line(shard))
        return shards

    def _check_split(self, folder: Path, split: str, writer: SplitWriter) -> None:
        if not writer.shards:
            raise DataError(
                f"no samples for the {split} split",
                where=self._config.data.source,
                value=self._config.data.validation_fraction,
                fix=f"add data, or {_OTHER[split]} data.validation_fraction",
            )
        if writer.may_have_duplicate_keys():
            paths = [str(folder / shard.name) for shard in writer.shards]
            manifests.refuse_duplicate_keys(paths, self._schema, fix="give each record its own key")

    def _blocks(self, split: str) -> Iterator[Block]:
        with self._task_code():
            records = self._records(split)
            clusters = Clusters(self._task, split) if self._task.names_clusters else None
            blocks = iter(self._task.encode(clusters.noted(records) if clusters else records, split))
        while True:
            with self._task_code():
                block = next(blocks, None)
            if block is None:
                return
            yield clusters.added_to(block) if clusters else block

    def _records(self, split: str) -> Iterator[Record]:
        fraction = self._config.data.validation_fraction
        for record in self._source.records():
            name = cluster_of(self._task, record) if self._task.names_clusters else ""
            if resolve_source.split_of(record, fraction, name) == split:
                yield record

    def _baselines(self) -> dict[str, dict[str, float]]:
        with self._task_code():
            found = self._task.baselines(self._records("validation"))
        baselines = {metric: {name: float(value) for name, value in of.items()} for metric, of in found.items()}
        if not all(math.isfinite(value) for of in baselines.values() for value in of.values()):
            raise DataError("a baseline is not finite", where="task.baselines()", value=baselines)
        return baselines

    def _task_code(self) -> contextlib.AbstractContextManager[None]:
        return plugins.user_code("task") if plugins.is_plugin(self._config.task.kind) else contextlib.nullcontext()

    def _refuse_changed_source(self) -> None:
        if storage.digest_json(self._source.listing()) != self._listing_digest:
            raise DataError(
                "the source changed while it was read, or does not give the same records twice",
                where=self._config.data.source,
                fix="run again when nobody writes to it",
            )

    def _manifest(self, splits: dict[str, list[Shard]], baselines: dict[str, dict[str, float]]) -> Manifest:
        return Manifest(
            dataset_digest=manifests.content_digest(self._schema, self._settings, splits),
            sample_schema=self._schema,
            task_kind=self._config.task.kind,
            task_settings=self._settings,
            splits={name: Split(shards=shards) for name, shards in splits.items()},
            source=self._config.data.source,
            source_listing_digest=self._listing_digest,
            baselines=baselines,
        )


def _line(shard: Shard) -> str:
    return f"{shard.name}: {shard.num_samples:,} samples, {shard.bytes:,} bytes"


def _is_good(folder_uri: str) -> bool:
    try:
        manifests.verify_shards(storage.join(folder_uri, MANIFEST_NAME))
    except DataError:
        return False
    return True
