"""Mixtures: each dataset is sharded by itself, and a manifest lists the shards of all, one after another.

Nothing is copied. What reads a dataset reads such a one like any other: in stored order the first component comes
first, in each split. So validation is that of all components, each with as much weight as it has validation samples,
and metrics are shown by component, too. Only the order of training knows weights. What was found and counted while
writing stands in the components' own manifests.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.data.assets import ASSETS
from kftrain.data.schema import SPLITS
from kftrain.data.settings import DataConfig
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards.manifest import Component, Manifest, Shard, Split
from kftrain.errors import DataError, EmptyWindowError
from kftrain.sharding.parts.baselines import measure_baselines
from kftrain.sharding.parts.encoder import Encoding
from kftrain.sharding.shard_dataset import RunJob, ShardingResult, manifest_path, shard_dataset
from kftrain.sharding.sources import resolve_source
from kftrain.sharding.sources.windowed import TIMES_FOLDER

if TYPE_CHECKING:
    from kftrain.tasks.base import EncodingTask

_EQUAL = ("sample_schema", "validation_schema")
"""Fields that the manifests of a mixture have in common."""


def shard_mixture(
    config: Config, task: EncodingTask, progress: Progress, run_job: RunJob | None = None
) -> ShardingResult:
    """Shard the configuration's source, or each of its mixture, or find the shards unchanged.

    Raises as `shard_dataset`.
    """
    if not config.data.components:
        return shard_dataset(config, task, progress, run_job)
    start = time.monotonic()
    results: dict[str, ShardingResult] = {}
    for component in config.data.components:
        component_config = config.model_copy(update={"data": config.data.of_component(component)})
        report = functools.partial(_report_for, progress, component.name)
        results[component.name] = shard_dataset(component_config, task, report, run_job)
    manifest = mix_manifests({name: result.manifest for name, result in results.items()})
    uri = storage.join(config.run.storage_root, manifest_path(manifest.dataset_digest))
    existing = _read_same(uri, manifest)
    if existing is None:
        encoding = Encoding.of(config.data, config.task.kind, task)
        manifest = manifest.model_copy(update={"baselines": measure_baselines(encoding, uri, manifest)})
        manifests.publish_manifest(uri, manifest)
    manifest = existing or manifest
    reused = all(result.reused for result in results.values())
    listings = {source: listing for result in results.values() for source, listing in result.listings.items()}
    return ShardingResult(uri, manifest.dataset_digest, reused, manifest, time.monotonic() - start, listings)


def _read_same(uri: str, mixed: Manifest) -> Manifest | None:
    """Read the manifest of a mixture if it is this one but for its baselines; None if it is not."""
    try:
        manifest = manifests.read_manifest(uri)
        return manifest if manifest.to_dict() | {"baselines": {}} == mixed.to_dict() else None
    except DataError:
        return None


def is_window_empty(data: DataConfig, storage_root: str) -> bool:
    """Tell whether nothing of a source lies in its window.

    Raises DataError and ConfigError for what sharding refuses, too.

    For a window by column the source is read, where it is not known yet when its records are of.
    """
    try:
        times_uri = storage.join(storage_root, "shards", TIMES_FOLDER)
        source = resolve_source.open_kind(resolve_source.source_kind(data), data, times_uri)
        source.parts(data.part_size_bytes) if data.window.by == "column" else source.listing()
    except EmptyWindowError:
        return True
    return False


def mix_manifests(components: dict[str, Manifest]) -> Manifest:
    """Build the manifest of all components, by their names; it lies in a folder beside theirs.

    Raises DataError where they do not hold the same fields.
    """
    (first_name, first), *others = components.items()
    for name, other in others:
        is_alike = all(getattr(other, name) == getattr(first, name) for name in _EQUAL)
        if not is_alike or other.task_settings.get(ASSETS) != first.task_settings.get(ASSETS):
            raise DataError(
                f"the components {first_name} and {name} of a mixture do not hold the same fields",
                where="data.mixture",
                value=[_describe_fields(first), _describe_fields(other)],
                fix="shard both with one task and one release",
            )
    listed = [
        Component(
            name=name,
            source=manifest.source,
            dataset_digest=manifest.dataset_digest,
            num_shards={split: len(manifest.splits[split].shards) for split in SPLITS},
        )
        for name, manifest in components.items()
    ]
    splits = {
        split: [shard for manifest in components.values() for shard in _relocate_shards(manifest, split)]
        for split in SPLITS
    }
    return Manifest(
        dataset_digest=manifests.content_digest(
            first.sample_schema, first.task_settings, splits, listed, first.validation_schema
        ),
        sample_schema=first.sample_schema,
        validation_schema=first.validation_schema,
        task_kind=first.task_kind,
        task_settings=first.task_settings,
        splits={name: Split(shards=shards) for name, shards in splits.items()},
        source=f"mixture of {', '.join(components)}",
        source_listing_digest=storage.digest_json([manifest.source_listing_digest for manifest in components.values()]),
        baselines={},
        components=listed,
    )


def _relocate_shards(manifest: Manifest, split: str) -> list[Shard]:
    """Return the shards of a dataset as a manifest in a folder beside its own names them."""
    own = f"../{manifest.dataset_digest}"
    return [shard.model_copy(update={"folder": shard.folder or own}) for shard in manifest.splits[split].shards]


def _describe_fields(manifest: Manifest) -> str:
    fields = ", ".join(f"{field.name}: {field.dtype} {list(field.shape)}" for field in manifest.sample_schema.fields)
    return f"format {manifest.format_version}, {fields}"


def _report_for(progress: Progress, name: str, line: str) -> None:
    progress(f"{name}: {line}")
