"""One attempt of a training on one process: what `rank.py` runs for the task `train`.

In order: see that all shards are there, claim the attempt, find the checkpoint to go on from, build and distribute the
model, run the loop, agree that all are done, export, and last of all write COMPLETE.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from kftrain import tracking
from kftrain.checkpoint import load, reader
from kftrain.checkpoint.save import CheckpointWriter, Identity
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.data.loader import MicroBatch, TrainLoader
from kftrain.data.order import BatchPlan
from kftrain.data.shards.cache import first_use_of
from kftrain.data.shards.verify import verify_before_start
from kftrain.errors import (
    FIRST_RETRYABLE_CODE,
    ConfigError,
    KftrainError,
    LaunchError,
    UserCodeError,
    error_from_dict,
)
from kftrain.launch.spec import MLFLOW_RUN_ID_ENV
from kftrain.models.modes import begin_training
from kftrain.parallel import blocks, buffers
from kftrain.parallel.batch_norm import GlobalBatchNorms
from kftrain.parallel.formats import DTYPES
from kftrain.parallel.initialize import Drawn, Weights
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.tensor import SplitTensors
from kftrain.parallel.topology import describe_axes_across_nodes
from kftrain.parallel.transforms import distribute, resolve_strategy, strategy_of
from kftrain.parallel.world import World, join_world
from kftrain.process.liveness import MARGIN_SECONDS, Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.run import attempts, commit
from kftrain.run.commit import CheckpointManifest
from kftrain.run.completion import find_completion
from kftrain.run.paths import RunPaths
from kftrain.tasks import build_task
from kftrain.tasks.base import Task
from kftrain.tasks.logits import task_reads_parts
from kftrain.train import completing, probe, probe_split
from kftrain.train.completing import Described, Finished, describe_export, model_arguments
from kftrain.train.initial import initial_weights
from kftrain.train.loop import Loop
from kftrain.train.model import build_empty
from kftrain.train.optimizer import build_optimizer, freeze
from kftrain.train.probe import Lender
from kftrain.train.reading import Training, batch_plan_of, new_loader, read_training, validation_rows
from kftrain.train.recorder import Recorder
from kftrain.train.spmd import SpmdEngine
from kftrain.train.step import Carrier, terms_of
from kftrain.worker.error_report import leave

T = TypeVar("T")

SPOOL_NAME = "unsent-metrics.jsonl"

TRACKER_TIMEOUT_SECONDS = 30.0
"""How long the end of a training that failed for good waits for MLflow to take the last points."""

TRACKER_GRACE_SECONDS = 0.0
"""How long any other attempt does: the next one, or the train stage, records what is missing."""


MAX_LOOKS = 8
"""Of how many processes the first one looks at the rows, where it alone has the weights."""


def train(paths: RunPaths, config: Config, stop: StopRequest) -> None:
    """Trains to the last step and writes COMPLETE.json, or raises.

    Returns at once where that file and the export are there already. Where only the export is gone, no step is taken.
    """
    start = time.monotonic()
    training = read_training(paths, config)
    if find_completion(paths, config) is not None:
        to_log("already complete: nothing to do")
        return
    timeout_seconds = config.launch.timeout_seconds + MARGIN_SECONDS
    with (
        join_world(timeout_seconds, config.launch.gpus_per_node) as world,
        tempfile.TemporaryDirectory(prefix="kftrain-") as scratch,
    ):
        finished = _attempt(training, world, stop, Path(scratch))
    # From here on the other processes are done: what follows needs no collective, however long it takes.
    if world.is_main:
        completing.complete(training, finished, time.monotonic() - start)


def _attempt(training: Training, world: World, stop: StopRequest, scratch: Path) -> Finished:
    """Claims, verifies, trains to the last step. Collective."""
    paths, config = training.paths, training.config
    load.refuse_another_training(paths, world, training.identity)
    # Claimed before a checkpoint is chosen: the attempt before is fenced, but for what it is publishing at this moment.
    # Claimed before the data is verified: the claim tells the launcher that all have met, and that takes long.
    attempt = world.from_main(_claim(paths, world.size) if world.is_main else None)
    if world.is_main:
        to_log(f"verifying the shards of {training.manifest_uri}")
    _verify(training, world)
    loaded = load.choose(paths, world, training.identity)
    first_step = loaded.manifest.step if loaded else 0
    mesh = Mesh(config.parallel.shape(world.size), world)
    first_use = first_use_of(config.data, training.manifest.dataset_digest)
    training = dataclasses.replace(training, uses=first_use)
    count, carrier = functools.partial(terms_of, training.task), Carrier.to(world.device, training.task)
    loader = new_loader(training, mesh.num_data_ranks, mesh.data_rank, count, carrier.send)
    validation = validation_rows(training, world.gather_slowly, (world.rank, world.size))
    liveness = Liveness(lambda: world.gather_slowly(None), config.launch.timeout_seconds)
    with liveness.watched():
        engine, described = build(config, training.task, loader, mesh, loaded.manifest if loaded else None)
    num_parameters = sum(parameter.numel() for parameter in engine.model.parameters())
    if world.is_main:
        to_log(_headline(config, num_parameters, world, attempt, first_step))
    identity = Identity(
        attempt,
        training.manifest.dataset_digest,
        training.digest,
        training.identity,
        engine.state.versions,
        samples_together(engine.norms, batch_plan_of(config, mesh.num_data_ranks)),
    )
    saving = config.checkpoint
    writer = CheckpointWriter(
        paths, world, identity, saving.keep_last, first_step, saving.timeout_seconds, first_use.so_far
    )
    tracker = _open_tracker(paths, config, scratch) if world.is_main else None
    num_quick = config.evaluate.max_interval_samples
    part = num_quick if validation.num_samples > num_quick else 0
    recorder = Recorder(loaded.history if loaded else [], tracker, config.train.steps, part)
    loop = Loop(config, world, engine, loader, validation, writer, recorder, stop, liveness)
    grace_seconds = TRACKER_GRACE_SECONDS
    try:
        last_step = loop.run(loop.resume(loaded))
    except Exception as error:
        known, _ = leave(error)  # first: the save in flight may take long, and others wait meanwhile
        if known is None or known.exit_code < FIRST_RETRYABLE_CODE:
            grace_seconds = TRACKER_TIMEOUT_SECONDS
        raise
    finally:
        liveness.close()
        writer.close()
        loader.close()
        if tracker is not None:
            tracker.close(timeout_seconds=grace_seconds)
    best = loop.best
    _require_agreement(world, last_step, writer.committed_step, last_step if best.is_enough else config.train.steps)
    return Finished(attempt, world.size, num_parameters, recorder.history, described, last_step, best.selection)


def _claim(paths: RunPaths, world_size: int) -> int:
    """Takes the run; the error of the attempt before is no longer the run's."""
    storage.remove(paths.error)
    return attempts.claim(paths, commit.last_step(paths), world_size)


def _verify(training: Training, world: World) -> None:
    """What can be checked before the first step; all processes agree on the outcome."""
    level = training.config.data.verify
    world.agree(lambda: verify_before_start(training.manifest_uri, training.manifest, level, world.rank, world.size))


def build(
    config: Config, task: Task, loader: TrainLoader, mesh: Mesh, before: CheckpointManifest | None = None
) -> tuple[SpmdEngine, Described]:
    """The model, distributed, with all that a step needs; refused here is what cannot be trained or exported.

    `before`: of the checkpoint that is loaded into it; without one it has the weights that the run starts with.

    Collective. Raises ConfigError and UserCodeError.
    """
    world = mesh.world
    arguments = model_arguments(task)
    model, weights = build_empty(config.model, arguments, world, config.run.seed)
    reader.require_readable(model)
    start = initial_weights(model, weights, config, world) if before is None else weights
    described = describe_export(model, config, task, arguments)
    freeze(model, config.optimizer.groups)
    kept = begin_training(model)
    if kept and world.is_main:
        to_log(f"stay in evaluation mode, as they were built: {', '.join(kept)}")
    combined = buffers.CombinedBuffers(model, world)
    norms = GlobalBatchNorms(model, mesh)
    names, calls = _probe(model, weights, config, task.assets(), loader, mesh, norms.buffer_names)
    recompute = config.train.activation_checkpointing == "blocks"
    plan = batch_plan_of(config, mesh.num_data_ranks)
    half, reads_parts = config.precision.compute == "bf16", task_reads_parts(task)
    parallel, said = resolve_strategy(config.parallel, model, mesh, plan.num_micro_batches, half)
    if said and world.is_main:
        to_log(said)
    for line in describe_axes_across_nodes(mesh.shape, world.places) if world.is_main else []:
        to_log(f"warning: {line}")
    require_same_samples(before.batch_norm_samples if before else None, norms, plan)
    norms.connect(plan.num_micro_batches, recompute)
    strategy = strategy_of(parallel, config.precision, recompute, mesh.shape, reads_parts)
    distributed = distribute(model, strategy, mesh, names)
    del weights  # whoever has built a whole model that is not used lets go of it
    start.fill(model, on_host=parallel.offload)
    optimizer = build_optimizer(model, config.optimizer, names, DTYPES[config.precision.compute], distributed.team)
    limit = config.train.gradient_clip_norm
    return SpmdEngine(distributed, optimizer, task, calls, limit, combined, norms), described


def _probe(
    model: nn.Module,
    weights: Weights,
    config: Config,
    assets: Mapping[str, bytes],
    loader: TrainLoader,
    mesh: Mesh,
    kept_equal: Collection[str],
) -> tuple[list[str], blocks.Calls]:
    """The names of the model's blocks, and the calls of one loss. The task is another one than that of the training.

    `kept_equal`: buffers that differ in the probe, where each process is by itself, and will not.
    """
    world = mesh.world
    found, task = blocks.candidates(model), build_task(config.task)
    if assets:
        task.restore(assets)
    units = list(found.names) if found.declared and isinstance(weights, Drawn) else []
    with contextlib.closing(loader.steps(0, 1)) as steps:
        micro = probe.first_rows(next(steps).micro_batches[0])

    is_sharded = mesh.shape.tensor > 1 or (world.size > 1 and config.parallel.stage != "ddp")
    num_chances = probe.NUM_CHANCES if is_sharded and found.names else 1

    def look(rows: MicroBatch, rank: int) -> probe.Seen:
        seed, lender = (config.run.seed, rank), Lender(weights, units)
        try:
            return probe.look(model, task, rows, found.names, world.device, seed, lender, num_chances)
        except UserCodeError:
            if not units:
                raise
        units.clear()  # all weights at once: where that helps, it is a block whose forward is not called
        return look(rows, rank)

    def rehearse(rows: MicroBatch, rank: int) -> None:
        seed, lender = (config.run.seed, rank), Lender(weights, units)
        probe.rehearse(model, task, rows, names, world.device, seed, dtype, lender)

    seen = _of_all_rows(mesh, weights, micro, look)
    if any(each.draws for each in seen):
        loader.send_nothing()
    calls = [each for process in seen for each in process.calls]
    names = blocks.choose(found, calls if is_sharded else calls[:1])
    probe.require_equal_buffers(seen, {*buffers.declared(model), *kept_equal})
    dtype = DTYPES[config.precision.compute]
    if dtype != torch.float32:
        _of_all_rows(mesh, weights, micro, rehearse)
    if mesh.shape.tensor > 1:
        splitting = SplitTensors(config.parallel.sequence_parallel, task_reads_parts(task))
        probe_split.require_same_as_whole(model, task, micro, mesh, splitting, names, units, config.run.seed)
    return names, [name for name in calls[0] if name in {blocks.ROOT, *names}]


def _of_all_rows(mesh: Mesh, weights: Weights, micro: MicroBatch, look: Callable[[MicroBatch, int], T]) -> list[T]:
    """What the processes see in their rows; the one that alone has the weights looks at the rows of some others, too.

    Collective.
    """
    world = mesh.world
    if isinstance(weights, Drawn):
        return _on_all(world, lambda: look(micro, mesh.data_rank))
    rows = _on_all(world, lambda: micro)[:: -(-world.size // MAX_LOOKS)]
    return _on_all(world, lambda: [look(each, rank) for rank, each in enumerate(rows)] if weights.is_here else [])[0]


def _on_all(world: World, work: Callable[[], T]) -> list[T]:
    """What the work returns on each process; the first error of any of them is raised on all. Collective."""
    try:
        answer, problem = work(), None
    except KftrainError as error:
        answer, problem = None, error.to_dict()
    answers = world.gather((answer, problem))
    first = next((problem for _, problem in answers if problem), None)
    if first is not None:
        raise error_from_dict(first)
    return [answer for answer, _ in answers]


def _open_tracker(paths: RunPaths, config: Config, scratch: Path) -> tracking.Tracker | None:
    """A tracker whose spool lies in the run's folder where that is local: the next attempt sends what is left in it."""
    mlflow_run_id = os.environ.get(MLFLOW_RUN_ID_ENV, "")
    if not mlflow_run_id:
        return None
    folder = storage.local_path(paths.uri) if storage.is_local(paths.uri) else scratch
    return tracking.open_tracker(config.tracking.uri, mlflow_run_id, folder / SPOOL_NAME)


def _headline(config: Config, num_parameters: int, world: World, attempt: int, first_step: int) -> str:
    where = f"{world.size} {'process' if world.size == 1 else 'processes'} on {world.device.type}"
    resumed = f", going on after step {first_step}" if first_step else ""
    how = f"{config.parallel.strategy}, {config.precision.compute}"
    return f"attempt {attempt}: {num_parameters:,} parameters, {how}, {where}{resumed}"


def _require_agreement(world: World, last_step: int, committed_step: int, target_step: int) -> None:
    """All processes state what they reached and saw committed; any other answer than the target fails the job."""
    answers = world.gather((last_step, committed_step))
    if set(answers) != {(target_step, target_step)}:
        raise LaunchError(f"the processes did not all reach and commit step {target_step}", value=answers)


def samples_together(norms: GlobalBatchNorms | None, plan: BatchPlan) -> int | None:
    """How many samples share statistics; None where the model has none."""
    if norms is None or not norms.are_trained:
        return None
    return plan.global_batch_size if plan.num_micro_batches == 1 else plan.micro_batch_rows


def require_same_samples(before: int | None, norms: GlobalBatchNorms, plan: BatchPlan) -> None:
    """Raises ConfigError where a run would go on with other samples together. `before`: of its last checkpoint.

    None: that does not say it, or its model had no such statistics.
    """
    now = samples_together(norms, plan)
    if before is None or now is None or (before == now and 1 in (plan.num_micro_batches, plan.num_ranks)):
        return
    whole = before == plan.global_batch_size
    processes = "" if whole else "one process and "
    raise ConfigError(
        f"the batch norms of this run take {before} samples at a time, and must not go on with others",
        where="train.micro_batch_size",
        value=f"{plan.micro_batch_rows} samples on each of {plan.num_ranks} processes",
        fix=f"go on with {processes}train.micro_batch_size={0 if whole else before}, or start a new run",
    )
