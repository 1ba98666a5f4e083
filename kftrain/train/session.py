"""Runs one attempt of a training on one process: what `rank.py` runs for the task `train`.

The phases stand here in their order: claim the attempt, verify the data, choose the checkpoint, build the engine, take
the steps, complete. Each is collective but the last, which the first process does alone.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kftrain import tracking
from kftrain.checkpoint import load
from kftrain.checkpoint.save import CheckpointWriter, Identity
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.data.expanded import ValidationRows
from kftrain.data.loader import TrainLoader
from kftrain.data.shards.verified import FirstUse, make_first_use
from kftrain.data.shards.verify import verify_shards
from kftrain.errors import FIRST_RETRYABLE_CODE, LaunchError
from kftrain.launch.spec import MLFLOW_RUN_ID_ENV
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.world import World, join_world
from kftrain.process.liveness import MARGIN_SECONDS, Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.run import attempts, commit
from kftrain.run.commit import CheckpointManifest
from kftrain.run.completion import find_completion
from kftrain.run.paths import RunPaths
from kftrain.tasks.base import Task
from kftrain.train import completing, engines
from kftrain.train.completing import ExportDescription, Finished
from kftrain.train.engine import Engine
from kftrain.train.loop import Loop
from kftrain.train.micro_batch import resolve_micro_batch
from kftrain.train.numerics import set_numerics
from kftrain.train.reading import Training, open_loader, open_validation_rows, read_training
from kftrain.train.recorder import Recorder
from kftrain.train.script_session import ScriptSession
from kftrain.train.step import Carrier, count_loss_terms
from kftrain.worker.error_report import leave_error

SPOOL_NAME = "unsent-metrics.jsonl"

TRACKER_TIMEOUT_SECONDS = 30.0
"""Longest time that the end of a training that failed for good waits for MLflow to take the last points."""

TRACKER_GRACE_SECONDS = 0.0
"""Longest time that any other attempt waits: the next one, or the train stage, records what is missing."""


def train(paths: RunPaths, config: Config, stop: StopRequest) -> None:
    """Train to the last step and write COMPLETE.json, or raise.

    Returns at once where that file and the export are there already. Where only the export is gone, no step is taken.
    """
    start = time.monotonic()
    training = read_training(paths, config)
    # Asked before the processes meet: one that is started again at the very end would wait for others that are done.
    if find_completion(paths, config) is not None:
        to_log("already complete: nothing to do")
        return
    if config.train.command:
        _train_by_script(training, stop)
        return
    timeout_seconds = config.launch.timeout_seconds + MARGIN_SECONDS
    with (
        join_world(timeout_seconds, config.launch.gpus_per_node) as world,
        tempfile.TemporaryDirectory(prefix="kftrain-") as scratch,
    ):
        finished = run_attempt(training, world, stop, Path(scratch))
    # From here on the other processes are done: what follows needs no collective, however long it takes.
    if world.is_main:
        completing.complete(training, finished, time.monotonic() - start)


def run_attempt(training: Training, world: World, stop: StopRequest, scratch: Path) -> Finished:
    """Run one attempt from its claim to the last step, committed on all processes. Collective."""
    attempt = _claim_attempt(training, world)
    _verify_data(training, world)
    loaded = load.choose_checkpoint(training.paths, world, training.identity)
    setup = _set_up(training, world, loaded)
    if world.is_main:
        to_log(_describe_attempt(setup, world, attempt, loaded))
    return _take_steps(setup, world, attempt, loaded, stop, scratch)


def _train_by_script(training: Training, stop: StopRequest) -> None:
    """Run the script of `train.command` in the place of an attempt of ours, from the same claim and checkpoint."""
    config = training.config
    with join_world(config.launch.timeout_seconds + MARGIN_SECONDS, config.launch.gpus_per_node) as world:
        attempt = _claim_attempt(training, world)
        _verify_data(training, world)
        loaded = load.choose_checkpoint(training.paths, world, training.identity)
        session = ScriptSession(training, stop, world, attempt, loaded)
    # From here on the script says which process groups there are; they meet in the store that rank 0 keeps open.
    session.run(_open_tracker(training.paths, config, session.folder) if session.is_main else None)


def _claim_attempt(training: Training, world: World) -> int:
    """Take the run for this attempt; return the attempt's number. Collective. Raises CheckpointError for another's."""
    # Claimed before a checkpoint is chosen: the attempt before is fenced, but for what it is publishing at this moment.
    # Claimed before the data is verified: the claim tells the launcher that all have met, and that takes long.
    paths = training.paths
    load.refuse_another_training(paths, world, training.identity)
    attempt = 0
    if world.is_main:
        storage.remove(paths.error)  # the error of the attempt before is no longer the run's
        attempt = attempts.claim_run(paths, commit.find_last_step(paths), world.size)
    return int(world.from_main(attempt))


def _verify_data(training: Training, world: World) -> None:
    """Hash the data before the first step if `data.verify` says so; all processes agree on the outcome."""
    if training.config.data.verify != "everything":  # that files are there has been seen by who started the job
        return
    if world.is_main:
        to_log(f"verifying the shards of {training.manifest_uri}")
    world.agree(lambda: verify_shards(training.manifest_uri, training.manifest, (world.rank, world.size)))


@dataclass(frozen=True)
class Setup:
    """The things that the steps of one attempt work with."""

    training: Training
    loader: TrainLoader
    validation: ValidationRows
    liveness: Liveness
    engine: Engine
    num_parameters: int
    description: ExportDescription
    first_use: FirstUse
    """Shards that this process has begun to read, and what their hashes have said."""


def _set_up(training: Training, world: World, loaded: load.Loaded | None) -> Setup:
    """Open the data and build the engine, which `loaded` will be read into. Collective."""
    set_numerics(training.config.precision)
    mesh = Mesh(training.config.parallel.shape(world.size), world)
    first_use = make_first_use(training.config.data, training.manifest.dataset_digest)
    training = dataclasses.replace(training, uses=first_use)
    count, carrier = functools.partial(count_loss_terms, training.task), Carrier.to(world.device, training.task)
    training = resolve_micro_batch(training, mesh)
    config = training.config
    # The data comes first: building the engine tries the model on the first rows.
    loader = open_loader(training, mesh.num_data_ranks, mesh.data_rank, count, carrier.send)
    validation = open_validation_rows(training, world.gather_slowly, (world.rank, world.size))
    liveness = Liveness(lambda: world.gather_slowly(None), config.launch.timeout_seconds)
    with liveness.mark_watched():
        engine, description = build(config, training.task, loader, mesh, loaded.manifest if loaded else None)
        if engine.rows is not None:
            engine.rows.connect(training.paths, world, loaded.manifest if loaded else None)
        if engine.islands is not None:
            engine.islands.connect(training.paths, world, loaded.manifest if loaded else None)
    return Setup(training, loader, validation, liveness, engine, engine.num_parameters, description, first_use)


def build(
    config: Config, task: Task, loader: TrainLoader, mesh: Mesh, before: CheckpointManifest | None = None
) -> tuple[Engine, ExportDescription]:
    """Build the engine that trains this configuration; see `EngineFactory`. Collective."""
    return engines.choose_factory(mesh.shape)(config, task, loader, mesh, before)


def _take_steps(
    setup: Setup, world: World, attempt: int, loaded: load.Loaded | None, stop: StopRequest, scratch: Path
) -> Finished:
    """Take the steps that are left; return what came of them once all processes saw the last one committed."""
    training, engine, config = setup.training, setup.engine, setup.training.config
    identity = Identity(
        attempt,
        training.manifest.dataset_digest,
        training.digest,
        training.identity,
        engine.state.versions,
        engine.num_norm_samples,
    )
    saving, first_step = config.checkpoint, loaded.manifest.step if loaded else 0
    writer = CheckpointWriter(
        training.paths,
        world,
        identity,
        saving.keep_last,
        first_step,
        saving.timeout_seconds,
        setup.first_use.make_barrier,
    )
    if engine.rows is not None:
        writer.write_tables = engine.rows.save
    tracker = _open_tracker(training.paths, config, scratch) if world.is_main else None
    num_quick = config.evaluate.max_interval_samples
    part = num_quick if setup.validation.num_samples > num_quick else 0
    recorder = Recorder(loaded.history if loaded else [], tracker, config.train.steps, part)
    loop = Loop(config, world, engine, setup.loader, setup.validation, writer, recorder, stop, setup.liveness)
    grace_seconds = TRACKER_GRACE_SECONDS
    try:
        last_step = loop.run(loop.resume(loaded))
    except Exception as error:  # whatever it is, for it is raised again
        known, _ = leave_error(error)  # first: the save in flight may take long, and others wait meanwhile
        if known is None or known.exit_code < FIRST_RETRYABLE_CODE:
            grace_seconds = TRACKER_TIMEOUT_SECONDS
        raise
    finally:
        setup.liveness.close()
        writer.close()
        if engine.rows is not None:
            engine.rows.close()
        if engine.islands is not None:
            engine.islands.close()
        setup.loader.close()
        if tracker is not None:
            tracker.close(timeout_seconds=grace_seconds)
    best = loop.best
    _require_agreement(world, last_step, writer.committed_step, last_step if best.is_enough else config.train.steps)
    return Finished(
        attempt, world.size, setup.num_parameters, recorder.history, setup.description, last_step, best.selection
    )


def _open_tracker(paths: RunPaths, config: Config, scratch: Path) -> tracking.Tracker | None:
    """Open a tracker whose spool lies in a local run's folder: the next attempt sends what is left in it."""
    mlflow_run_id = os.environ.get(MLFLOW_RUN_ID_ENV, "")
    if not mlflow_run_id:
        return None
    folder = storage.local_path(paths.uri) if storage.is_local(paths.uri) else scratch
    return tracking.open_tracker(config.tracking.uri, mlflow_run_id, folder / SPOOL_NAME)


def _describe_attempt(setup: Setup, world: World, attempt: int, loaded: load.Loaded | None) -> str:
    config = setup.training.config
    where = f"{world.size} {'process' if world.size == 1 else 'processes'} on {world.device.type}"
    resumed = f", going on after step {loaded.manifest.step}" if loaded and loaded.manifest.step else ""
    islands = f"{config.parallel.islands} islands of " if config.parallel.islands > 1 else ""
    how = f"{islands}{config.parallel.strategy}, {config.precision.compute}"
    return f"attempt {attempt}: {setup.num_parameters:,} parameters, {how}, {where}{resumed}"


def _require_agreement(world: World, last_step: int, committed_step: int, target_step: int) -> None:
    """Raises LaunchError unless all processes have reached the target step and saw it committed. Collective."""
    answers = world.gather((last_step, committed_step))
    if set(answers) != {(target_step, target_step)}:
        raise LaunchError(f"the processes did not all reach and commit step {target_step}", value=answers)
