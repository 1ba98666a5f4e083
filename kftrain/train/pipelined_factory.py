"""The factory of the pipelined engine: cuts the model that was tried into stages, and refuses what stages cannot do."""

from __future__ import annotations

import functools

from kftrain.config import Config
from kftrain.core.progress import to_log
from kftrain.data.loader import TrainLoader
from kftrain.errors import ConfigError
from kftrain.parallel import initialize, stages
from kftrain.parallel.buffers import SUMS, read_reductions
from kftrain.parallel.formats import DTYPES
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.strategies import STATE_COPIES
from kftrain.run.commit import CheckpointManifest
from kftrain.tasks.base import Task
from kftrain.train.completing import ExportDescription
from kftrain.train.optimizer import require_matrices
from kftrain.train.pipelined import PipelinedEngine
from kftrain.train.spmd_factory import PlainModel, make_engine, prepare_model
from kftrain.train.stage_modules import Cut, CutIntoStages, cut_model, empty_other_stages, list_blocks

WHERE = "parallel.schedule"


def build_pipelined_engine(
    config: Config, task: Task, loader: TrainLoader, mesh: Mesh, before: CheckpointManifest | None = None
) -> tuple[PipelinedEngine, ExportDescription]:
    """Build an engine for the stages that this process has of the model; see `EngineFactory`."""
    name, size = config.parallel.schedule, mesh.shape.pipeline
    plain = prepare_model(config, task, loader, mesh, before)
    config.parallel.require_micro_batches(plain.plan.num_micro_batches)
    _refuse_changes_of_state(plain)
    require_matrices(plain.model, config.optimizer, plain.block_names)
    # From here on each process would see its own stages only: what concerns the whole model is refused before.
    cut = cut_model(plain.model, name, size)
    if stages.SCHEDULES[name].splits_backward:
        _refuse_split_backward(config, cut)
    _refuse_sharding(cut, mesh, name, plain.parallel.stage)
    for line in describe_stages(cut, name, plain.plan.num_micro_batches, size) if mesh.world.is_main else []:
        to_log(line)
    place = mesh.shape.coordinates(mesh.world.rank)["pipeline"]
    numbers = stages.list_stages(name, place, size)
    blocks = [block for stage in numbers for block in list_blocks(plain.model, plain.block_names, cut.ranges[stage])]
    empty_other_stages(initialize.places_of(plain.model), cut.users, place)
    into_stages = CutIntoStages(cut, name, DTYPES[config.precision.compute], plain.block_names)
    kind = functools.partial(PipelinedEngine, cut=into_stages, num_micro_batches=plain.plan.num_micro_batches)
    return make_engine(plain, config, task, mesh, [into_stages], kind, blocks), plain.description


def describe_stages(cut: Cut, name: str, num_micro_batches: int, num_processes: int) -> list[str]:
    """Say in words what each stage costs and keeps, and how long processes wait for each other."""
    total, largest = sum(cut.costs), max(cut.costs)
    lines = [
        f"stage {number} on process {stages.find_process(name, number, num_processes)} of the pipeline: "
        f"pieces {of.start} to {of.stop - 1}, {cost / (total or 1):.0%} of the cost, "
        f"{STATE_COPIES * 4 * count / 2**20:.1f} MiB of parameters, gradients and optimizer state"
        for number, (of, cost, count) in enumerate(zip(cut.ranges, cut.costs, cut.num_kept, strict=True))
    ]
    bubble = stages.estimate_bubble(name, num_micro_batches, num_processes)
    evenness = total / (len(cut.costs) * largest) if largest else 1.0
    return [*lines, f"{name}: processes wait {1 - (1 - bubble) * evenness:.0%} of a step for others, as estimated"]


def _refuse_split_backward(config: Config, cut: Cut) -> None:
    train, compute, what = config.train, config.precision.compute, ""
    if all(0 not in cut.stages_of[trained] for trained in cut.trained):
        what = "the first stage is frozen: torch then computes no gradients of the next one's weights"
        fix = "train a parameter of it"
    elif train.activation_checkpointing in ("blocks", "selective"):
        what = "recomputed blocks would be computed once for gradients of inputs and once more for those of weights"
        fix = "train.activation_checkpointing: none"
    elif train.loss_chunk_tokens:
        what = "losses by chunks have one backward pass, which makes the gradients of inputs and weights at once"
        fix = "train.loss_chunk_tokens: 0"
    elif compute != "fp32":
        what = f"torch adds up the gradients of weights in {compute} where a schedule computes them apart"
        fix = "precision.compute: fp32"
    if what:
        fix = f"use 1f1b or interleaved, or {fix}"
        raise ConfigError(what, where=WHERE, value=config.parallel.schedule, fix=fix)


def _refuse_changes_of_state(plain: PlainModel) -> None:
    reductions = read_reductions(plain.model)
    changed = [*reductions, *(name for one in plain.seen for name in one.changed)]
    odd = next((name for name in changed if reductions.get(name) not in SUMS), None)
    if odd is not None:
        raise ConfigError(
            "a forward pass changes a buffer that is no sum, which a pipeline would not bring to the other stages",
            where=f"model {odd}",
            fix="name it as sum in buffer_reductions if pieces add to it, or set parallel.pipeline to 1",
        )
    if any(one.steps_use_parameters for one in plain.seen):
        raise ConfigError(
            "after_step uses parameters, of which each process has those of its own stages only",
            where="model.after_step",
            fix="let it read and change buffers only, or set parallel.pipeline to 1",
        )


def _refuse_sharding(cut: Cut, mesh: Mesh, name: str, strategy: str) -> None:
    """Raises ConfigError for what a schedule cannot do with stages that are sharded."""
    if mesh.shape.replicate * mesh.shape.num_shards == 1:
        return
    if stages.SCHEDULES[name].splits_backward and strategy == "fsdp":
        what = "fsdp frees parameters after a forward pass, and this schedule must find them whole when it goes back"
        raise ConfigError(what, where=WHERE, value=name, fix="use parallel.strategy: zero1, or 1f1b or interleaved")
    twice = next(iter(cut.shared_within(name, mesh.shape.pipeline)), None)
    if twice is not None:
        what = "two stages of one process have a parameter in common, which each of them would gather by itself"
        raise ConfigError(what, where=f"model {twice}", value=name, fix="use parallel.schedule: 1f1b, or untie it")
