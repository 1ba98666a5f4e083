"""The first stage: opens the run, checks what can be checked cheaply, and writes the shards of its dataset."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kftrain import report, storage
from kftrain.config import Config
from kftrain.contracts import RunPaths
from kftrain.data import manifest, sharding
from kftrain.data.manifest import Manifest
from kftrain.errors import DataError, OtherTrainingError
from kftrain.progress import RUN_LINE, Progress, to_log
from kftrain.stages import failure, preflight, resolve
from kftrain.stages.dataset import RunShards, read_dataset
from kftrain.stages.outcome import Outcome
from kftrain.stages.resolve import OpenedRun
from kftrain.tasks import build_task


def shard_from_pipeline(
    text: str,
    knobs: Mapping[str, str | int | float],
    resume_run: str,
    job_id: str,
    progress: Progress = to_log,
) -> Outcome:
    """Shards for a pipeline run: a new training run named after `job_id`, or the one to resume."""
    with failure.announced("shard", progress):
        config, resumed = resolve.resolve_run(text, knobs, resume_run)
        run_id = resolve.make_run_id(resumed, job_id, config.run.name)
    return shard(config, run_id, must_exist=bool(resumed), progress=progress)


def shard(config: Config, run_id: str, must_exist: bool = False, progress: Progress = to_log) -> Outcome:
    """Opens the run `run_id` and writes the shards of its dataset, unless they exist.

    Raises ConfigError, DataError, OtherTrainingError (the run is another training) or TrackingError.
    """
    paths = RunPaths.of(config.run.storage_root, run_id)
    with failure.announced("shard", progress):
        preflight.check_writable(config)
        run = resolve.open_run(config, run_id, must_exist)
    progress(RUN_LINE + paths.uri)
    with failure.reported("shard", paths, config, progress):
        preflight.check(config)
        return _shard(run, progress)


def _shard(run: OpenedRun, progress: Progress) -> Outcome:
    config, paths, start = run.config, run.paths, time.monotonic()
    found = _own_shards(run)
    if found is None:
        result = sharding.shard_dataset(config, build_task(config.task), progress)
        shards = RunShards(manifest_uri=result.manifest_uri, dataset_digest=result.dataset_digest)
        described, reused = result.manifest, result.reused
        _require_same_dataset(paths, shards)
    else:
        (shards, described), reused = found, True
    preflight.check_samples(config, described.splits["train"].num_samples)
    storage.publish_json(paths.shards, shards.to_dict())
    seconds = time.monotonic() - start
    summary = _summary(paths, shards, described, reused)
    progress(summary["result"])
    return Outcome(
        run_uri=paths.uri,
        summary=summary,
        metrics=_metrics(described, seconds),
        markdown=report.shards_markdown(described.to_dict()),
    )


def _own_shards(run: OpenedRun) -> tuple[RunShards, Manifest] | None:
    """The run's own shards, if its data settings are still the same: a source may grow while a run is down."""
    before, now = run.previous, run.config
    if before is None or (before.data, before.task) != (now.data, now.task) or not storage.exists(run.paths.shards):
        return None
    try:
        return read_dataset(run.paths)
    except DataError:  # damaged or deleted: sharding writes the very same again, or says why it cannot
        return None


def _require_same_dataset(paths: RunPaths, shards: RunShards) -> None:
    before = storage.read_json_if_exists(paths.shards)
    if before is not None and before.get("dataset_digest") != shards.dataset_digest and resolve.has_trained(paths):
        raise OtherTrainingError(
            f"this run is another training: dataset {before.get('dataset_digest')} -> {shards.dataset_digest}",
            where=paths.uri,
            fix="start a new run for the new data",
        )


def _summary(paths: RunPaths, shards: RunShards, described: Manifest, reused: bool) -> dict[str, Any]:
    counts = {name: split.num_samples for name, split in described.splits.items()}
    how = "already there" if reused else "written"
    return {
        "result": f"shards {how}: {counts['train']:,} samples for training, {counts['validation']:,} for validation",
        "run_uri": paths.uri,
        "run_id": paths.run_id,
        "manifest_uri": shards.manifest_uri,
        **manifest.describe(described),
    }


def _metrics(described: Manifest, seconds: float) -> dict[str, float]:
    metrics = {"seconds": seconds}
    for name, split in described.splits.items():
        metrics |= {
            f"{name}_samples": split.num_samples,
            f"{name}_shards": len(split.shards),
            f"{name}_bytes": split.num_bytes,
        }
    return metrics
