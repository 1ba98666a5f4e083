"""Reads the dataset of a run from its `shards.json`, and checks that the run's task can use it."""

from __future__ import annotations

import contextlib

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.plugins import is_plugin, user_code
from kftrain.data.conversion import find_conversion
from kftrain.data.schema import SPLITS, SampleSchema
from kftrain.data.settings import DataConfig
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.manifest import MANIFEST_NAME, Manifest, read_manifest
from kftrain.data.shards.verify import check_listing
from kftrain.data.windows import count_windows, is_stream
from kftrain.errors import DataError
from kftrain.run.documents import RunShards
from kftrain.run.paths import RunPaths
from kftrain.tasks import Task, build_task_of
from kftrain.trust import read_shards, require_places


def read_dataset(paths: RunPaths, data: DataConfig | None = None) -> tuple[RunShards, Manifest]:
    """Read the dataset of a run with its manifest. Raises DataError if one of them is missing or damaged.

    `data`: its settings, for a process of a job; those of a node ask a store once for the manifest.
    """
    shards = read_shards(paths)
    uri, digest = shards.manifest_uri, shards.dataset_digest
    cache = NodeCache.of_node(data.cache_dir, data.cache_bytes) if data and not storage.is_local(uri) else None
    manifest = read_manifest(uri, cache, shards.manifest_sha256)
    if manifest.dataset_digest != digest:
        fix = "restore the manifest, or run the shard step again"
        raise DataError("the manifest is that of another dataset", where=uri, value=manifest.dataset_digest, fix=fix)
    return shards, manifest


def find_manifest(uri: str) -> str:
    """Return the URI of the manifest of a dataset, named by its manifest, its folder, or the folder of a run."""
    absolute = storage.absolute(uri)
    if absolute.endswith("/" + MANIFEST_NAME):
        return absolute
    paths = RunPaths(absolute)
    return read_shards(paths).manifest_uri if storage.exists(paths.shards) else storage.join(absolute, MANIFEST_NAME)


def require_usable(shards: RunShards, manifest: Manifest, config: Config) -> None:
    """Raise DataError if files of a dataset are gone, or if it does not hold the fields that the task reads.

    Called before a job is launched: no GPU has to wait for that.
    """
    require_places(manifest, shards.manifest_uri, config)
    task = build_task_of(config.task, shards.manifest_uri, manifest.task_settings)
    with user_code("task.schema") if is_plugin(config.task.kind) else contextlib.nullcontext():
        wanted, grouped = ({split: task.sample_schema(split, has) for split in SPLITS} for has in (False, True))
        conversion = find_conversion(manifest, task)
    schemas = {split: manifest.schema_of(split) for split in SPLITS}
    if conversion is None and schemas not in (wanted, grouped):
        raise DataError(
            f"the shards do not hold what the task reads, {_format_fields(wanted)}",
            where=shards.manifest_uri,
            value=_format_fields(schemas),
            fix="run the shard step again",
        )
    check_listing(shards.manifest_uri, manifest)


def num_training_samples(manifest: Manifest, task: Task) -> int:
    """Return the number of samples in an epoch of training: those of the split, or the windows of a token stream."""
    split, window = manifest.splits["train"], task.window
    return (
        count_windows(split.num_samples, window) if window and is_stream(manifest.sample_schema) else split.num_samples
    )


def _format_fields(schemas: dict[str, SampleSchema]) -> str:
    fields = dict.fromkeys(field for schema in schemas.values() for field in schema.fields)
    return ", ".join(f"{field.name}: {field.dtype} {list(field.shape)}" for field in fields)
