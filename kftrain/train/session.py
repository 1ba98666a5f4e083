"""One attempt of a training on one process: what `rank.py` runs for the task `train`.

In order: verify the shards, find the checkpoint to go on from, claim the attempt, build and distribute the model, run
the loop, agree that all are done, export, and last of all write COMPLETE.json.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kftrain import attempts, storage, tracking
from kftrain.checkpoint import commit, export, load
from kftrain.checkpoint.save import CheckpointWriter, Identity
from kftrain.config import Config
from kftrain.contracts import Completion, RunPaths, read
from kftrain.data.dataset import ShardedDataset
from kftrain.data.loader import TrainLoader
from kftrain.data.manifest import Manifest, read_manifest, verify_shards
from kftrain.data.plan import BatchPlan, TrainingOrder
from kftrain.errors import KftrainError, LaunchError, error_from_dict
from kftrain.launch.spec import MLFLOW_RUN_ID_ENV
from kftrain.models import build_model
from kftrain.parallel import wrap
from kftrain.parallel.world import World, join_world
from kftrain.plugins import user_code
from kftrain.tasks import build_task
from kftrain.tasks.base import Task
from kftrain.train.loop import Loop
from kftrain.train.optimizer import build_optimizer
from kftrain.train.recorder import Recorder, say
from kftrain.train.signals import StopRequest
from kftrain.train.step import Stepper


def train(paths: RunPaths, config: Config, stop: StopRequest) -> None:
    """Trains to the last step and writes COMPLETE.json, or raises. Returns at once where that file is there already."""
    shards = storage.read_json(paths.shards)
    manifest_uri, identity = shards["manifest_uri"], config.training_identity(shards["dataset_digest"])
    training_digest = storage.digest_json(identity)
    if storage.exists(paths.complete) and read(Completion, paths.complete).training_digest == training_digest:
        say("already complete: nothing to do")
        return
    start = time.monotonic()
    with join_world(config.launch.timeout_seconds) as world:
        manifest = read_manifest(manifest_uri)
        _verify(manifest_uri, config, world)
        loaded = load.choose(paths, world, identity)
        first_step = loaded.manifest.step if loaded else 0
        attempt = world.from_main(attempts.claim(paths, first_step, world.size) if world.is_main else None)
        writer_identity = Identity(attempt, manifest.dataset_digest, training_digest, identity)
        writer = CheckpointWriter(paths, world, writer_identity, config.checkpoint.keep_last, first_step)
        task = build_task(config.task)
        stepper = _build(config, task, world)
        num_parameters = sum(parameter.numel() for parameter in stepper.model.parameters())
        history = loaded.history if loaded else []
        if world.is_main:
            say(_headline(config, manifest, num_parameters, world, attempt, first_step))
        tracker = _open_tracker(config, attempt) if world.is_main else None
        recorder = Recorder(history, tracker, config.train.steps)
        loader, validation = _data(config, manifest_uri, manifest, world)
        loop = Loop(config, world, stepper, loader, validation, writer, recorder, stop)
        try:
            loop.run(loop.resume(loaded))
        finally:
            writer.close()
            if tracker is not None:
                tracker.close(timeout_seconds=30.0)
        _require_agreement(world, config, recorder if world.is_main else None)
    # From here on the other processes are done: what follows needs no collective, however long it takes.
    if world.is_main:
        _complete(
            paths, config, manifest, task, attempt, world.size, num_parameters, recorder, time.monotonic() - start
        )


def _verify(manifest_uri: str, config: Config, world: World) -> None:
    """Every shard is checked once, by one process; all processes agree on the outcome."""
    try:
        verify_shards(manifest_uri, config.data.verify, (world.rank, world.size))
        problem = None
    except KftrainError as error:
        problem = error.to_dict()
    first = next((p for p in world.gather(problem) if p), None)
    if first is not None:
        raise error_from_dict(first)


def _build(config: Config, task: Task, world: World) -> Stepper:
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, task.model_arguments())
    parallel, precision = config.parallel, config.precision
    layout = wrap.Layout(
        strategy=parallel.strategy,
        shard=parallel.shard,
        replicate=parallel.replicate,
        reshard_after_forward=parallel.reshard_after_forward,
        compute=precision.compute,
        reduce=precision.reduce,
        checkpoint_blocks=config.train.activation_checkpointing == "blocks",
    )
    distributed = wrap.distribute(model, layout, world)
    optimizer = build_optimizer(distributed, config.optimizer)
    return Stepper(distributed, optimizer, task, layout, world, config.train.gradient_clip_norm)


def _data(config: Config, manifest_uri: str, manifest: Manifest, world: World) -> tuple[TrainLoader, ShardedDataset]:
    training = ShardedDataset.open(manifest_uri, "train")
    order = TrainingOrder(
        training.samples_per_shard, manifest.dataset_digest, config.run.seed, config.data.shuffle_window_shards
    )
    plan = BatchPlan(config.train.global_batch_size, world.size, config.train.micro_batch_size)
    loader = TrainLoader(training, order, plan, world.rank, config.data.prefetch_batches)
    return loader, ShardedDataset.open(manifest_uri, "validation")


def _open_tracker(config: Config, attempt: int) -> tracking.Tracker | None:
    mlflow_run_id = os.environ.get(MLFLOW_RUN_ID_ENV, "")
    if not mlflow_run_id:
        return None
    spool = Path(tempfile.mkdtemp(prefix="kftrain-spool-")) / f"attempt-{attempt}.jsonl"
    return tracking.open_tracker(config.tracking.uri, mlflow_run_id, spool)


def _headline(
    config: Config, manifest: Manifest, num_parameters: int, world: World, attempt: int, first_step: int
) -> str:
    where = f"{world.size} {'process' if world.size == 1 else 'processes'} on {world.device.type}"
    resumed = f", going on after step {first_step}" if first_step else ""
    how = f"{config.parallel.strategy}, {config.precision.compute}"
    return f"attempt {attempt}: {num_parameters:,} parameters, {how}, {where}{resumed}"


def _require_agreement(world: World, config: Config, recorder: Recorder | None) -> None:
    """All processes state the step that they reached; any other answer than the target is a failure of the job."""
    steps = world.gather(config.train.steps)
    if set(steps) != {config.train.steps}:
        raise LaunchError("the processes do not agree on the last step", value=steps)


def _complete(
    paths: RunPaths,
    config: Config,
    manifest: Manifest,
    task: Task,
    attempt: int,
    world_size: int,
    num_parameters: int,
    recorder: Recorder,
    seconds: float,
) -> None:
    newest = commit.committed(paths)[0]
    checkpoint_uri = storage.join(paths.checkpoints, str(newest))
    checkpoint, digest = commit.read_manifest(checkpoint_uri)
    uri, export_digest = export_model(paths, config, task, checkpoint_uri)
    completion = Completion(
        run_id=paths.run_id,
        step=checkpoint.step,
        samples_consumed=checkpoint.samples_consumed,
        attempt=attempt,
        world_size=world_size,
        checkpoint_uri=checkpoint_uri,
        checkpoint_digest=digest,
        export_uri=uri,
        export_digest=export_digest,
        dataset_digest=manifest.dataset_digest,
        training_digest=checkpoint.training_digest,
        num_parameters=num_parameters,
        metrics=_last_values(recorder.history),
        seconds=seconds,
    )
    attempts.require_held(paths, attempt)
    storage.publish_json(paths.complete, completion.to_dict())
    say(f"complete: step {completion.step}, exported to {uri}")


def export_model(paths: RunPaths, config: Config, task: Task, checkpoint_uri: str) -> tuple[str, str]:
    """Exports a committed checkpoint of a run; returns the export's URI and digest."""
    with user_code("task.model_arguments"):
        arguments = task.model_arguments()
    with torch.device("meta"):  # only its configuration is asked
        model = build_model(config.model, arguments)
    describe = getattr(model, "export_config", None)
    model_config: dict[str, Any] = (
        describe() if callable(describe) else {"kind": config.model.kind, **config.model.options()}
    )
    description = export.Description(
        model=config.model.model_dump(mode="json"), task=config.task.model_dump(mode="json"), model_arguments=arguments
    )
    return export.export_checkpoint(paths, checkpoint_uri, description, model_config)


def _last_values(history: list[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for point in history:
        values.update({name: float(value) for name, value in point.items() if name != "step"})
    return values
