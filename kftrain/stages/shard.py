"""The first stage: opens the run, makes the cheap checks, and writes the shards of its dataset."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kftrain import launch, reports
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress, to_log
from kftrain.data import validation
from kftrain.data.shards import manifest
from kftrain.data.shards.manifest import Manifest
from kftrain.errors import DataError, EmptyWindowError, OtherTrainingError
from kftrain.process import channel
from kftrain.registry import initial_weights
from kftrain.run.config import is_opened
from kftrain.run.documents import RunShards
from kftrain.run.drift import Drift
from kftrain.run.paths import RunPaths
from kftrain.run.script import with_script_digest
from kftrain.run.watermark import WindowFiles
from kftrain.sharding import dataset_drift, mixing
from kftrain.sharding.unchanged import require_unchanged
from kftrain.stages import failure, firing, preflight, resolve, windows
from kftrain.stages.firing import Begun
from kftrain.stages.layouts import with_layout
from kftrain.stages.outcome import Outcome
from kftrain.stages.resolve import OpenedRun
from kftrain.tasks import build_task, build_task_of
from kftrain.tasks.overview import write_overview
from kftrain.tasks.run_dataset import num_training_samples, read_dataset
from kftrain.tasks.user_metrics import with_goal
from kftrain.trust import read_shards


def shard_from_pipeline(
    text: str,
    knobs: Mapping[str, str | int | float],
    resume_run: str,
    job_id: str,
    progress: Progress = to_log,
    values: Mapping[str, Any] | None = None,
    created: str = "",
) -> Outcome:
    """Run `shard` for a pipeline run: on a new training run named after `job_id`, or on the one to resume.

    `text`, `values` and `knobs` are the pipeline's parameters; `created`: time at which the pipeline run was created.
    Settings that the steps after this one cannot use are refused here, whoever has started the pipeline.
    """
    with failure.announce_failure("shard", progress):
        config, resumed = resolve.resolve_run(text, knobs, resume_run, values=values)
        preflight.require_from_here(config)
        run_id = resolve.make_run_id(resumed, job_id, config.run.name)
        paths = RunPaths.of(config.run.storage_root, run_id)
        begun = firing.begin(config, paths, job_id, created, bool(resumed), progress)
    return shard(begun.config, run_id, bool(resumed), progress, job_id, begun)


def shard(
    config: Config,
    run_id: str,
    must_exist: bool = False,
    progress: Progress = to_log,
    job_id: str = "",
    begun: Begun | None = None,
) -> Outcome:
    """Open the run `run_id` and write the shards of its dataset, unless they exist.

    A run that exists is opened last, so that a refusal leaves it as it was: neither its configuration nor its error
    nor its MLflow run is touched; only the heartbeat of a scheduled run goes on. A new run is opened first, so that a
    failure is reported in its folder.

    `must_exist`: refuse a new run; `job_id`: Kubeflow's id of the pipeline run that opens it, empty at a shell;
    `begun`: the run as its schedule has begun it; None: it belongs to none.

    Raises ConfigError, DataError, OtherTrainingError (the run is another training) or TrackingError.
    """
    paths = RunPaths.of(config.run.storage_root, run_id)
    with failure.announce_failure("shard", progress):
        preflight.check_credentials(config)
        preflight.check_writable(config)
        begun = begun or Begun(config)
        config, table = with_layout(config)
        for line in table:
            progress(line)
        with failure.keep_heartbeat(paths, config) if is_opened(paths) else contextlib.nullcontext():
            config = resolve.with_order(config, paths)
            if begun.skipped is None:
                config = windows.with_replay(config, paths, progress)
                config = initial_weights.with_initial_weights(config, paths, progress)
            config = with_script_digest(config)
            run = resolve.open_run(config, run_id, must_exist)
            is_old = run.previous is not None and not (job_id and resolve.is_opened_by(paths, job_id))
            prepared = _prepare(run, progress) if is_old and begun.skipped is None else None
            resolve.keep_run(prepared.run if prepared else run, job_id)
    if not channel.tell(channel.RUN, paths.uri):
        progress(f"run {paths.uri}")
    with failure.report_failure("shard", paths, config, progress):
        return _skip_or_open(run, begun, prepared, job_id, progress)


@dataclass(frozen=True)
class Prepared:
    """A dataset that fits its run, before anything is written into the run's folder."""

    run: OpenedRun
    shards: RunShards
    manifest: Manifest
    reused: bool
    seconds: float
    overview: Any
    """Some of the dataset's samples, for reports."""
    drift: Drift | None
    """Drift since the dataset before; None: it was not measured."""
    files: WindowFiles | None
    """Files that no run before has read; None: they are noted already, or the window follows no other."""


def _prepare(run: OpenedRun, progress: Progress) -> Prepared:
    """Make the cheap checks and write the shards; write nothing into the run's folder."""
    config, paths, start, files = run.config, run.paths, time.monotonic(), None
    preflight.check_run(config)
    config = with_goal(config, is_kept=run.is_resumed or bool(config.schedule.name))
    run = replace(run, config=config)
    for line in preflight.describe_oddities(config):
        progress(line)
    existing = _find_own_shards(run, progress)
    if existing is None:
        result = mixing.shard_mixture(config, build_task(config.task), progress, partial(launch.run_sharding, paths))
        storage.remove(paths.sharding)  # all parts are found by their inputs now
        found_whole = storage.sha256_file(result.manifest_uri) if manifest.has_pages(result.manifest) else ""
        shards = RunShards(
            manifest_uri=result.manifest_uri, dataset_digest=result.dataset_digest, manifest_sha256=found_whole
        )
        described, reused = result.manifest, result.reused
        _require_same_dataset(paths, shards)
        files = windows.find_new_files(config.data.window, result.listings, progress)
    else:
        (shards, described), reused = existing, True
    task = build_task_of(config.task, shards.manifest_uri, described.task_settings)
    preflight.check_samples(config, num_training_samples(described, task))
    if not resolve.has_trained(paths):
        initial_weights.require_fit(config, task)
    validation.require_decodable(config, task, shards.manifest_uri, described, progress)
    overview = write_overview(task, shards.manifest_uri, described)
    measured = dataset_drift.measure_drift(config, shards.manifest_uri, described, task, progress)
    return Prepared(run, shards, described, reused, time.monotonic() - start, overview, measured, files)


def _skip_or_open(run: OpenedRun, begun: Begun, prepared: Prepared | None, job_id: str, progress: Progress) -> Outcome:
    skipped = begun.skipped
    try:
        prepared = prepared or (_prepare(run, progress) if skipped is None else None)
    except EmptyWindowError as error:
        skipped = firing.skip_empty_window(begun, error, progress)
    if skipped is None and prepared is not None:
        skipped = firing.skip_unchanged(begun, run.config, run.paths, prepared.shards.dataset_digest, job_id, progress)
    if skipped is not None:
        return firing.leave_skipped(run.paths, begun, skipped, job_id, progress)
    assert prepared is not None
    resolve.keep_run(prepared.run, job_id)
    storage.remove(run.paths.skipped)  # of a run that somebody goes on with
    return _write_dataset(run.paths, prepared, progress)


def _write_dataset(paths: RunPaths, prepared: Prepared, progress: Progress) -> Outcome:
    """Write the documents of the dataset into the run's folder and return the outcome."""
    shards, described = prepared.shards, prepared.manifest
    if prepared.files is not None:  # first: a run that has shards has these
        storage.publish_json(paths.window_files, prepared.files.to_dict())
    storage.publish_json(paths.shards, shards.to_dict())
    if prepared.drift is not None:
        storage.publish_json(paths.drift, prepared.drift.to_dict())
    summary = _summarize(paths, shards, described, prepared.reused)
    progress(summary["result"])
    section = reports.describe_shards(described.to_dict(), prepared.overview, prepared.drift)
    return Outcome(
        run_uri=paths.uri,
        summary=summary,
        metrics=_count_metrics(described, prepared.seconds) | (prepared.drift.metrics if prepared.drift else {}),
        html=reports.render_section(section, paths.run_id),
        markdown=reports.render_markdown(section),
    )


def _find_own_shards(run: OpenedRun, progress: Progress) -> tuple[RunShards, Manifest] | None:
    """Return the run's own shards if its data settings are unchanged, even if the source has grown meanwhile."""
    before, now = run.previous, run.config
    # No dataset follows from the others, and they change: a release before had other defaults of some.
    others = {name for name, effect in now.data.effects().items() if effect.counted_as in ("", "order")}
    as_now = {name: value for name, value in now.data if name in others}
    is_same = before and (before.data.model_copy(update=as_now), before.task) == (now.data, now.task)
    if not is_same or not storage.exists(run.paths.shards):
        return None
    try:
        shards, described = read_dataset(run.paths)
        build_task_of(now.task, shards.manifest_uri, described.task_settings)
        require_unchanged(shards.manifest_uri, described, now.data.rehash, progress)
        return shards, described
    except DataError:  # damaged or deleted: sharding writes the very same again, or says why it cannot
        return None


def _require_same_dataset(paths: RunPaths, shards: RunShards) -> None:
    try:
        before = read_shards(paths).dataset_digest
    except DataError:  # unknown or damaged: checkpoints refuse another dataset
        return
    if before != shards.dataset_digest and resolve.has_trained(paths):
        what = f"this run is another training: dataset {before} -> {shards.dataset_digest}"
        raise OtherTrainingError(what, where=paths.uri, fix="start a new run for the new data")


def _summarize(paths: RunPaths, shards: RunShards, described: Manifest, reused: bool) -> dict[str, Any]:
    how = "already there" if reused else "adopted" if described.is_adopted else "written"
    return {
        "result": f"shards {how}: {manifest.describe_counts(described)}",
        "run_uri": paths.uri,
        "run_id": paths.run_id,
        "manifest_uri": shards.manifest_uri,
        **manifest.describe(described),
    }


def _count_metrics(described: Manifest, seconds: float) -> dict[str, float]:
    metrics = {"seconds": seconds}
    for name, split in described.splits.items():
        metrics |= {
            f"{name}_samples": split.num_samples,
            f"{name}_shards": len(split.shards),
            f"{name}_bytes": split.num_bytes,
        }
    return metrics
