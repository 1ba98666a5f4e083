"""An evaluation job on one process: what `rank.py` runs for the task `evaluate`.

Scores the exports that `evaluation/request.json` names, each on the whole validation split, and writes one
`metrics.json` for each. A large model is spread over the processes as in its training (`layout.py`).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kftrain.checkpoint.export import EmptyExport, read_empty
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.data.conversion import find_conversion
from kftrain.data.dataset import ShardedDataset
from kftrain.data.expanded import ValidationRows, expand_rows
from kftrain.data.shards.manifest import Manifest, read_manifest
from kftrain.data.shards.verified import FirstUse, make_first_use
from kftrain.data.shards.verify import verify_shards
from kftrain.data.validation import open_validation
from kftrain.errors import CheckpointError, ConfigError, EvaluationError, StorageError, UserCodeError
from kftrain.evaluate import curves, examples
from kftrain.evaluate.layout import SpreadModel, spread_out
from kftrain.evaluate.performance import measure_performance
from kftrain.evaluate.score import Scores, Statistics, group_sums, score, share_of
from kftrain.parallel.world import World, join_world
from kftrain.process.liveness import MARGIN_SECONDS, Liveness
from kftrain.run import documents
from kftrain.run.documents import (
    Confusion,
    Evaluation,
    EvaluationRequest,
    EvaluationTarget,
    Example,
    Interval,
    Performance,
    Slice,
    Unmeasured,
    list_targets_to_score,
)
from kftrain.run.export import read_export_manifest
from kftrain.run.paths import RunPaths
from kftrain.statistics import bootstrap
from kftrain.statistics.bootstrap import Metrics
from kftrain.tasks import build_task
from kftrain.tasks.base import Task, TrainingTask
from kftrain.tasks.run_dataset import read_dataset
from kftrain.tasks.user_metrics import MetricsOfSums, metrics_of
from kftrain.trust import Trust, read_shards, require_places

METRICS = "metrics.json"
STATISTICS = "statistics.npz"
SLICES = "slices.npz"
PERFORMANCE = "performance.json"

CONFIDENCE = 0.95
"""Confidence of the intervals in `metrics.json`; the gate computes its own on the paired difference."""


@dataclass(frozen=True)
class _ScoredModel:
    """The results of a scored model on the first process: sums and numbers of rows by group, in the order of `keys`."""

    task: Task
    sums: Statistics
    num_rows: np.ndarray
    keys: list[str]
    units: np.ndarray
    """Number of each group's unit, see `Scores.units`."""
    metrics: MetricsOfSums
    examples: list[Example]
    tallies: Statistics
    performance: Performance | None


@dataclass(frozen=True)
class _Data:
    """A dataset whose validation split is open for reading."""

    manifest: Manifest
    dataset: ShardedDataset
    first_use: FirstUse


def evaluate(paths: RunPaths, config: Config) -> None:
    """Score every requested export that has no metrics yet, and publish its metrics. Collective."""
    request = documents.read(EvaluationRequest, paths.evaluation_request, EvaluationError)
    if all(
        storage.exists(storage.join(target.output_uri, METRICS)) for target in list_targets_to_score(paths, request)
    ):
        return  # a worker that was started again at the very end must not wait for peers that are done
    own_uri = read_shards(paths).manifest_uri
    torch.set_num_threads(config.evaluate.cpu_threads)
    with join_world(config.launch.timeout_seconds + MARGIN_SECONDS, config.launch.gpus_per_node) as world:
        uris = dict.fromkeys(target.manifest_uri or own_uri for target in request.targets)
        datasets = {uri: _open_split(uri, own_uri, paths, config, world) for uri in uris}
        with contextlib.closing(Liveness(lambda: world.gather_slowly(None), config.launch.timeout_seconds)) as liveness:
            for target in request.targets:
                exists = world.is_main and storage.exists(storage.join(target.output_uri, METRICS))
                data = datasets[target.manifest_uri or own_uri]
                print(f"export {target.export_digest[:12]}, shards {target.manifest_uri or own_uri}")
                scored = (
                    None
                    if world.from_main(exists)
                    else _score(target, paths, request, data.dataset, config, world, liveness)
                )
                world.agree(data.first_use.require_verified)
                if scored is not None:
                    digest = target.evaluation_digest or request.evaluation_digest
                    _publish(target, digest, data.manifest, data.dataset, config, scored)
                world.gather_slowly(None)  # the first process has the statistics to work through
    print("the evaluation has ended")


def _open_split(manifest_uri: str, own_uri: str, paths: RunPaths, config: Config, world: World) -> _Data:
    """Open a validation split, verified as far as `data.verify` asks for. Collective."""
    if manifest_uri != own_uri:
        trust, reference = Trust.of(config), config.evaluate.reference
        replace(trust, roots=(*trust.roots, reference) if reference else trust.roots).require_place(manifest_uri)
    is_own = manifest_uri == own_uri
    manifest = read_dataset(paths, config.data)[1] if is_own else read_manifest(manifest_uri)
    require_places(manifest, manifest_uri, config)
    if config.data.verify == "everything":
        world.agree(lambda: verify_shards(manifest_uri, manifest, (world.rank, world.size)))
    first_use = make_first_use(config.data, manifest.dataset_digest)
    conversion = find_conversion(manifest, build_task(config.task)) if manifest.is_adopted else None
    return _Data(manifest, open_validation(manifest_uri, manifest, config, first_use, conversion), first_use)


def _load(
    target: EvaluationTarget, paths: RunPaths, request: EvaluationRequest, config: Config, world: World
) -> EmptyExport | None:
    """Build the model to score, without weights; None, and a file that says why, if an optional one cannot be built.

    Collective.
    """
    loaded, problem, trust = None, "", Trust.of(config)
    try:
        trust.require_place(target.output_uri)
        loaded = read_empty(target.export_uri, target.export_digest, trust)
    except (ConfigError, CheckpointError, UserCodeError) as error:
        if target.required:
            raise
        if error.__cause__ is not None and storage.is_outage(error.__cause__):  # met by a user's code
            raise StorageError(error.what, where=error.where) from error
        problem = error.line
    if target.required:
        return loaded
    reason = next(filter(None, world.gather_slowly(problem)), "")
    _leave_out(target, paths, request, reason, world)
    return None if reason else loaded


def _spread_out(
    target: EvaluationTarget,
    paths: RunPaths,
    request: EvaluationRequest,
    empty: EmptyExport,
    config: Config,
    world: World,
) -> SpreadModel | None:
    """Load the weights into the model on all processes; None if an optional model is damaged. Collective."""
    try:
        return spread_out(empty, config, world)
    except (ConfigError, CheckpointError, UserCodeError) as error:  # the same on all processes
        if target.required:
            raise
        _leave_out(target, paths, request, error.line, world)
    return None


def _leave_out(
    target: EvaluationTarget, paths: RunPaths, request: EvaluationRequest, reason: str, world: World
) -> None:
    """Publish the reason why a model is not measured, on the first process and if there is one."""
    if reason and world.is_main:
        document = Unmeasured(
            evaluation_digest=request.evaluation_digest, export_digest=target.export_digest, reason=reason
        )
        storage.publish_json(paths.unmeasured, document.to_dict())


def _score(
    target: EvaluationTarget,
    paths: RunPaths,
    request: EvaluationRequest,
    dataset: ShardedDataset,
    config: Config,
    world: World,
    liveness: Liveness,
) -> _ScoredModel | None:
    """Load and score one export; return its results on the first process, None elsewhere or if it cannot be loaded.

    Collective. The model is freed at the end, before the next one is loaded.
    """
    empty = _load(target, paths, request, config, world)
    spread = None if empty is None else _spread_out(target, paths, request, empty, config, world)
    if empty is None or spread is None:
        return None
    task, settings = empty.task, config.evaluate
    with liveness.mark_resting():
        rows = expand_rows(dataset, task, world.gather_slowly, (world.rank, world.size))
    print(f"scores {share_of(rows.num_samples, settings.batch_size, spread.mesh)}")
    with liveness.mark_watched():
        scores = score(
            spread.model,
            task,
            rows,
            spread.mesh,
            settings.batch_size,
            on_batch=liveness.note_progress,
            with_tallies=True,
        )
    if scores is None:
        # Beside the first process (`_summarize`): the same forward passes in the same order, or it would wait for ever.
        if spread.is_shared:
            numbers = world.gather_slowly(None)[0]
            examples.show_examples(task, spread.model, rows, numbers, settings.batch_size, world.device)
            _performance(target, task, spread, rows, config)
        return None
    return _summarize(target, task, spread, scores, dataset, rows, config)


def _summarize(
    target: EvaluationTarget,
    task: Task,
    spread: SpreadModel,
    scores: Scores,
    dataset: ShardedDataset,
    rows: ValidationRows,
    config: Config,
) -> _ScoredModel:
    """Sum the scores by group and collect examples and performance, on the first process.

    Where the processes share the model, the others make the same forward passes beside it, in `_score`.
    """
    settings, world = config.evaluate, spread.mesh.world
    sums = group_sums(scores.statistics, scores.groups, dataset.num_groups)
    num_rows = np.bincount(scores.groups, minlength=dataset.num_groups)
    keys = dataset.group_keys()
    metrics = metrics_of(task, settings.metrics)
    worst_first = examples.losses(task, metrics, sums, config.registry.metric, config.registry.goal)
    chosen = examples.choose_groups(worst_first, settings.num_examples)
    if spread.is_shared:
        world.gather_slowly(examples.rows_of_groups(sorted({group for group, _ in chosen}), num_rows))
    shown = examples.collect(
        task,
        metrics,
        spread.model,
        rows,
        sums,
        num_rows,
        keys,
        chosen,
        batch_size=settings.batch_size,
        device=world.device,
    )
    cost = _performance(target, task, spread, rows, config)
    units = scores.units(dataset.num_groups)
    return _ScoredModel(task, sums, num_rows, keys, units, metrics, shown, scores.tallies, cost)


def _performance(
    target: EvaluationTarget, task: Task, spread: SpreadModel, rows: ValidationRows, config: Config
) -> Performance | None:
    """Measure time and memory of the model; None if not asked for. Collective where the processes share the model."""
    settings, world = config.evaluate, spread.mesh.world
    if not settings.num_latency_passes:
        return None
    files = read_export_manifest(target.export_uri, target.export_digest).files
    return measure_performance(
        spread.model,
        task,
        rows,
        settings.batch_size,
        settings.num_latency_passes,
        world.device,
        target.export_digest,
        sum(entry.bytes for entry in files.values()),
        world.from_main if spread.is_shared else bool,
    )


def _publish(
    target: EvaluationTarget,
    evaluation_digest: str,
    manifest: Manifest,
    dataset: ShardedDataset,
    config: Config,
    scored: _ScoredModel,
) -> None:
    """Compute the metrics of a scored model, and publish them with all files that belong to them."""
    content = pack_statistics(*of_units(scored.sums, scored.keys, scored.units))
    components = [key.partition("/")[0] for key in scored.keys] if manifest.components else []
    part_of = parts_of(scored.task, scored.sums, scored.keys, components)
    by_slice = sums_by_slice(scored.sums, scored.keys, scored.units, part_of)
    slices_content = pack(by_slice) if by_slice else b""
    metrics, slices = measure(
        scored.task,
        scored.sums,
        scored.num_rows,
        scored.keys,
        config.evaluate.num_bootstrap,
        scored.units,
        part_of.tolist(),
        scored.metrics,
    )
    confusion, tallies = _confusion(scored.task, scored.sums), scored.tallies
    histograms = curves.require_shape(tallies, "scores", len(confusion.labels) if confusion else 0, 2)
    reliability = curves.require_shape(tallies, "reliability", 3)
    calibration = None if reliability is None else curves.calibration_of(reliability)
    classes = curves.class_figures(confusion, histograms) if confusion else []
    evaluation = Evaluation(
        evaluation_digest=evaluation_digest,
        checkpoint_digest=target.checkpoint_digest,
        export_uri=target.export_uri,
        export_digest=target.export_digest,
        dataset_digest=manifest.dataset_digest,
        num_samples=int(scored.num_rows.sum()),
        num_groups=int(scored.units.max()) + 1,
        confidence=CONFIDENCE,
        metrics=metrics,
        slices=slices,
        baselines=manifest.baselines,
        confusion=confusion,
        figures=curves.whole_figures(classes, calibration),
        calibration=calibration,
        curves=curves.curves_of(confusion.labels, histograms) if confusion and histograms is not None else [],
        classes=classes,
        examples=scored.examples,
        statistics_sha256=storage.sha256_bytes(content),
        slices_sha256=storage.sha256_bytes(slices_content) if slices_content else "",
    )
    if scored.performance is not None:
        storage.publish_json(storage.join(target.output_uri, PERFORMANCE), scored.performance.to_dict())
    if slices_content:
        storage.publish(storage.join(target.output_uri, SLICES), slices_content)
    storage.publish(storage.join(target.output_uri, STATISTICS), content)
    # Last: a target with metrics is never scored again, so all its other files must be there by then.
    storage.publish_json(storage.join(target.output_uri, METRICS), evaluation.to_dict())


def of_units(sums: Statistics, keys: list[str], units: np.ndarray) -> tuple[Statistics, list[str]]:
    """Sum statistics by unit; return the sums and the key of each unit's first group."""
    num_units = int(units.max()) + 1
    _, first = np.unique(units, return_index=True)
    return group_sums(sums, units, num_units), [keys[group] for group in first]


def pack_statistics(grouped: Statistics, keys: list[str]) -> bytes:
    """Serialize `statistics.npz`: the sums per unit and the units' keys."""
    return pack({bootstrap.KEYS: np.array(keys), **grouped})


def pack(arrays: dict[str, Any]) -> bytes:
    """Serialize arrays as an npz file. Equal content gives equal bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _confusion(task: Task, grouped: Statistics) -> Confusion | None:
    with user_code("task.confusion"):
        confusion = task.confusion(grouped)
    if confusion is None:
        return None
    labels, matrix = confusion
    return Confusion(labels=labels, matrix=[[int(count) for count in row] for row in matrix])


def parts_of(task: TrainingTask, sums: Statistics, keys: list[str], names: Sequence[str] = ()) -> np.ndarray:
    """Return the name of each group's slice, `[groups]` str: `names` if given, else those of the task."""
    with user_code("task.slice_names"):
        part_of = np.array(names or task.slice_names(keys, sums))
    if len(part_of) != len(keys):
        raise EvaluationError(f"task.slice_names must name each of {len(keys)} groups", value=len(part_of))
    return part_of


def sums_by_slice(
    sums: Statistics, keys: list[str], units: np.ndarray, part_of: np.ndarray
) -> dict[str, np.ndarray] | None:
    """Sum the statistics by unit within each slice, with the key of the unit's first group, for `slices.npz`.

    Returns None where all groups are in one slice.
    """
    names, codes = np.unique(part_of, return_inverse=True)
    if len(names) < 2:
        return None
    pairs, rows = np.unique(np.stack([codes, units], axis=1), axis=0, return_inverse=True)
    _, first = np.unique(units, return_index=True)
    return {
        bootstrap.KEYS: np.array([keys[first[unit]] for unit in pairs[:, 1]]),
        bootstrap.SLICES: pairs[:, 0].astype(np.int64),
        bootstrap.SLICE_NAMES: names,
        **group_sums(sums, rows.ravel(), len(pairs)),
    }


def measure(
    task: TrainingTask,
    sums: Statistics,
    num_rows: np.ndarray,
    keys: list[str],
    num_bootstrap: int,
    units: np.ndarray | None = None,
    names: Sequence[str] = (),
    metrics: Metrics | None = None,
) -> tuple[dict[str, Interval], dict[str, Slice]]:
    """Compute metrics with intervals over all groups and over each slice; no slices where all groups have one name.

    `sums` and `num_rows` are those of each group, `[groups]`; `units`: number of the unit that each group belongs to,
    where the bootstrap resamples several groups as one; `names`: slice of each group, where the task does not say it;
    `metrics`: where there are more than the task's. A metric that a slice does not determine (a rate of nothing) is
    left out of that slice.
    """
    part_of = parts_of(task, sums, keys, names)
    named = part_of.tolist() if len(set(part_of)) > 1 else None
    whole, parts = bootstrap.sliced_intervals(metrics or task.metrics, sums, named, num_bootstrap, CONFIDENCE, 0, units)
    slices = {
        str(name): Slice(
            num_samples=int(num_rows[part_of == name].sum()),
            metrics={metric: interval.value for metric, interval in metrics.items()},
            intervals=metrics,
        )
        for name, metrics in parts.items()
    }
    return whole, slices
