"""`shards.json`: which shards a run trains on."""

from __future__ import annotations

import contextlib

from kftrain import storage
from kftrain.config import Config
from kftrain.data.schema import SampleSchema
from kftrain.data.shards.manifest import MANIFEST_NAME, Manifest, check_listing, read_manifest
from kftrain.errors import DataError
from kftrain.plugins import is_plugin, user_code
from kftrain.run.documents import RunShards
from kftrain.run.paths import RunPaths
from kftrain.tasks import build_task
from kftrain.trust import read_shards as read_shards


def read_dataset(paths: RunPaths) -> tuple[RunShards, Manifest]:
    """The dataset of a run with its manifest. Raises DataError where one of them is missing or damaged."""
    shards = read_shards(paths)
    return shards, read_manifest(shards.manifest_uri)


def find_manifest(uri: str) -> str:
    """The manifest of a dataset that is named by it, by its folder, or by a run that has it."""
    absolute = storage.absolute(uri)
    if absolute.endswith("/" + MANIFEST_NAME):
        return absolute
    paths = RunPaths(absolute)
    return read_shards(paths).manifest_uri if storage.exists(paths.shards) else storage.join(absolute, MANIFEST_NAME)


def require_usable(shards: RunShards, manifest: Manifest, config: Config) -> None:
    """Raises DataError where files of a dataset are gone, or it does not hold what the task reads.

    Before a job is launched: no GPU has to wait for that.
    """
    task = build_task(config.task)
    with user_code("task.schema") if is_plugin(config.task.kind) else contextlib.nullcontext():
        wanted = task.sample_schema()
    if storage.dump_json(wanted.to_dict()) != storage.dump_json(manifest.sample_schema.to_dict()):
        raise DataError(
            f"the shards do not hold what the task reads, {_shown(wanted)}",
            where=shards.manifest_uri,
            value=_shown(manifest.sample_schema),
            fix="run the shard step again",
        )
    check_listing(shards.manifest_uri, manifest)


def _shown(schema: SampleSchema) -> str:
    return ", ".join(f"{field.name}: {field.dtype} {list(field.shape)}" for field in schema.fields)
