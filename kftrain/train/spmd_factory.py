"""The factory of the SPMD engine: from a configuration to a distributed model, ready for its first step.

The model is built without memory for its weights, tried once on a few rows, distributed, and filled with values at the
end: so no process ever holds more than it keeps. What cannot be trained or exported is refused here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from kftrain.checkpoint import export_tensors, reader
from kftrain.checkpoint.export import read_recipe
from kftrain.checkpoint.filling import ModelSlots
from kftrain.config import Config
from kftrain.core.progress import to_log
from kftrain.data.loader import MicroBatch, TrainLoader
from kftrain.data.order import BatchPlan
from kftrain.errors import ConfigError, KftrainError, UserCodeError, error_from_dict
from kftrain.models.base import has_init_weights
from kftrain.models.modes import begin_training
from kftrain.models.registry import build_model, find_target
from kftrain.models.settings import ModelConfig
from kftrain.parallel import blocks, buffers, initialize
from kftrain.parallel.activations import CheckpointActivations, choose_checkpointed_blocks
from kftrain.parallel.batch_norm import GlobalBatchNorms
from kftrain.parallel.compiled import CompileBlocks, require_compiler
from kftrain.parallel.compression.momenta import LocalRule
from kftrain.parallel.context import CutSequences
from kftrain.parallel.distributed import Distributed, Transform
from kftrain.parallel.float8 import require_float8
from kftrain.parallel.formats import DTYPES
from kftrain.parallel.initialize import Drawn, Scattered, Weights, construct_empty
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import ParallelConfig
from kftrain.parallel.tensor import SplitTensors
from kftrain.parallel.topology import describe_axes_across_nodes
from kftrain.parallel.transforms import distribute, list_transforms, resolve_strategy
from kftrain.parallel.world import World
from kftrain.run.commit import CheckpointManifest
from kftrain.run.export import ExportManifest, read_export_manifest
from kftrain.tasks import build_task
from kftrain.tasks.base import Task, task_reads_parts
from kftrain.tasks.prepare import require_sequence_dims, tensors_of
from kftrain.train import probe, probe_split
from kftrain.train.averages import Averages
from kftrain.train.completing import ExportDescription, ask_model_arguments, describe_export
from kftrain.train.draws import PlacedDraws
from kftrain.train.islands import Islands
from kftrain.train.loss_scale import LossScale
from kftrain.train.noise_scale import NoiseScale
from kftrain.train.optimizer import build_optimizer, freeze, seed_rounding
from kftrain.train.probe import Lender
from kftrain.train.remote_rows import RemoteRows, attach_new_tables
from kftrain.train.settings import TrainConfig
from kftrain.train.spmd import SpmdEngine
from kftrain.trust import Trust

T = TypeVar("T")
E = TypeVar("E", bound=SpmdEngine)

MAX_LOOKS = 8
"""Number of processes whose rows the first one tries, where it alone has the weights."""


def build_engine(
    config: Config, task: Task, loader: TrainLoader, mesh: Mesh, before: CheckpointManifest | None = None
) -> tuple[SpmdEngine, ExportDescription]:
    """Build an SPMD engine; see `EngineFactory`."""
    plain = prepare_model(config, task, loader, mesh, before)
    engine: SpmdEngine = make_engine(plain, config, task, mesh, [], SpmdEngine)
    return engine, plain.description


@dataclass(frozen=True)
class PlainModel:
    """A model that was tried and is not distributed yet, with what engines must know of it."""

    model: nn.Module
    start: Weights | ExportedWeights
    description: ExportDescription
    block_names: list[str]
    calls: blocks.Calls
    """Calls of the model and its blocks in one loss."""
    seen: list[probe.LossObservation]
    combined: buffers.CombinedBuffers
    norms: GlobalBatchNorms
    plan: BatchPlan
    parallel: ParallelConfig
    """The layout, with a strategy in place of `auto`."""


def prepare_model(
    config: Config, task: Task, loader: TrainLoader, mesh: Mesh, before: CheckpointManifest | None
) -> PlainModel:
    """Build a model and try it. Collective. Raises ConfigError and UserCodeError for what no engine can train."""
    # The order matters. The export is described and parameters are frozen while the model is still the plain one, and
    # the dry run comes before anything wraps it. Distribution needs the blocks that the dry run has found. Values come
    # after distribution, since each process then fills its part only. The optimizer comes last, because it makes its
    # state of the parameters as they are by then.
    world, arguments = mesh.world, ask_model_arguments(task)
    if config.precision.master == "bf16":
        require_narrow_masters(config, mesh)
    if config.precision.compute == "float8":
        world.agree(lambda: require_float8(config.parallel, mesh.shape, world.device))
    if config.train.compile:
        world.agree(lambda: require_compiler(world.device))
    if config.train.cuda_graphs:
        require_graphs(config.train, world)
    model, weights = build_empty(config.model, arguments, world, config.run.seed)
    reader.require_readable(model)
    attach_new_tables(model, config)
    start = choose_initial_weights(model, weights, config, world) if before is None else weights
    description = describe_export(model, config, task, arguments)
    freeze(model, config.optimizer.groups)
    kept = begin_training(model)
    if kept and world.is_main:
        to_log(f"stay in evaluation mode, as they were built: {', '.join(kept)}")
    combined = buffers.CombinedBuffers(model, world)
    norms = GlobalBatchNorms(model, mesh)
    if mesh.shape.context > 1 and (norms.are_trained or combined.are_of_rows):
        raise ConfigError(
            "batch norms and combined buffers are of whole rows, of which each process computes a part",
            where="parallel.context",
            value=mesh.shape.context,
            fix="set it to 1, or use a norm of each place",
        )
    config.parallel.require_equal_islands(config.train.global_batch_size, mesh.num_data_ranks)
    if mesh.shape.islands > 1 and (norms.are_trained or combined.is_needed):
        what, fix = "batch norms and combined buffers are of the samples of all processes", "use a norm of each sample"
        raise ConfigError(what, where="parallel.islands", value=mesh.shape.islands, fix=f"set it to 1, or {fix}")
    if norms.are_trained and config.train.batch_warmup:
        what = "batch norms take all samples of a step, which would not always be as many"
        raise ConfigError(what, where="train.batch_warmup", fix="leave it out, or use a norm of each sample")
    names, calls, seen = _try_model(model, weights, config, task.assets(), loader, mesh, norms.buffer_names)
    plan = BatchPlan(config.train.global_batch_size, mesh.num_data_ranks, config.train.most_micro_rows)
    half = config.precision.compute != "fp32"
    parallel, said = resolve_strategy(config.parallel, model, mesh, plan.num_micro_batches, half)
    if said and world.is_main:
        to_log(said)
    for line in describe_axes_across_nodes(mesh.shape, world.places) if world.is_main else []:
        to_log(f"warning: {line}")
    require_same_samples(before.batch_norm_samples if before else None, norms, plan)
    norms.connect(plan.num_micro_batches, config.train.activation_checkpointing in ("blocks", "selective"))
    # Whoever has built a whole model that is not used lets go of it here, with the weights.
    return PlainModel(model, start, description, names, calls, seen, combined, norms, plan, parallel)


def make_engine(
    plain: PlainModel,
    config: Config,
    task: Task,
    mesh: Mesh,
    first: Sequence[Transform],
    kind: Callable[..., E],
    names: Sequence[str] | None = None,
) -> E:
    """Distribute a model, give it its weights, and make an engine for it. Collective. Raises ConfigError.

    `first`: transforms before those of the configuration. `names`: of the blocks that this process has; None: all.
    """
    parallel, own = plain.parallel, plain.block_names if names is None else names
    within = list_block_transforms(config.train, plain.block_names)
    within += [CompileBlocks(config.train.cuda_graphs)] if config.train.compile else []
    chunk_tokens, reads_parts = config.train.loss_chunk_tokens, task_reads_parts(task)
    if chunk_tokens and not reads_parts:
        what, fix = "the task computes its loss and metrics from whole logits", "mark its methods by reads_parts"
        raise ConfigError(what, where="train.loss_chunk_tokens", value=chunk_tokens, fix=f"{fix}, or set it to 0")
    rule, optimizing, clip_norm = None, config.optimizer, config.train.gradient_clip_norm
    if parallel.compression.has_local_momenta:  # each process clips its gradient, and has the momentum of it
        rule = LocalRule(0.9 if optimizing.momentum is None else optimizing.momentum, clip_norm)
        optimizing, clip_norm = optimizing.model_copy(update={"momentum": 0.0}), 0.0
    strategy = list_transforms(
        parallel, config.precision, within, mesh.shape, reads_parts, loss_chunk_tokens=chunk_tokens, rule=rule
    )
    is_scaled = config.precision.compute == "fp16"
    scaling = [LossScale(config.precision.loss_scale, mesh.world.device)] if is_scaled else []
    measuring = [NoiseScale(config, plain.plan, mesh)] if config.train.noise_scale else []
    rows = [RemoteRows(config, plain.model)] if config.server.tables else []
    made: list[Distributed] = []
    # What one stage is refused for the others do not see.
    mesh.world.agree(
        lambda: made.append(distribute(plain.model, [*scaling, *measuring, *rows, *first, *strategy], mesh, own))
    )
    (distributed,) = made
    plain.start.fill(distributed.roots, on_host=parallel.offload)
    draws = any(one.draws for one in plain.seen)
    # Muon scales what it iterates on to 1 first: fp16 would lose small updates, bf16 has the range of fp32.
    compute = torch.bfloat16 if is_scaled else DTYPES[config.precision.compute]
    is_part = mesh.shape.pipeline > 1
    optimizer = build_optimizer(plain.model, optimizing, own, compute, distributed.team, is_part)
    seed_rounding(optimizer, plain.model, config.run.seed)
    engine = kind(
        distributed=distributed,
        optimizer=optimizer,
        task=task,
        calls=plain.calls,
        clip_norm=clip_norm,
        combined_buffers=plain.combined,
        norms=plain.norms,
        draws=PlacedDraws(plain.model, plain.block_names, own, mesh.world.device) if draws else None,
        averages=Averages(plain.model, config.train.average_decay, config.train.average_start_steps)
        if config.train.average_decay
        else None,
        loss_scale=scaling[0] if scaling else None,
        islands=Islands(plain.model, config, mesh) if mesh.shape.islands > 1 else None,
    )
    engine.rows = rows[0] if rows else None
    engine.num_norm_samples = count_norm_samples(plain.norms, plain.plan)
    return engine


def list_block_transforms(train: TrainConfig, names: Sequence[str]) -> list[Transform]:
    """List what is done to single blocks. `names`: of all blocks of the model. Raises ConfigError."""
    if train.activation_checkpointing == "none":
        return []
    chosen = choose_checkpointed_blocks(names, train.checkpointed_blocks)
    return [CheckpointActivations(train.activation_checkpointing, chosen, train.compile)]


def require_narrow_masters(config: Config, mesh: Mesh) -> None:
    """Raises ConfigError where weights cannot be kept in bf16: another optimizer, or a layout without a proof."""
    shape, what = mesh.shape, ""
    if config.optimizer.kind != "adamw":
        what = f"{config.optimizer.kind} does not round its updates by chance: in bf16 small ones would be lost"
    if config.optimizer.state != "fp32":
        what = "moments in eight bits are of weights in fp32"
    if shape.size > 1 and (config.parallel.stage != "fsdp" or shape.size != shape.shard):
        what = "weights in bf16 are for one process, or fsdp along shard alone"
    if what:
        fix = "set it to fp32, or use adamw with parallel.strategy: fsdp"
        raise ConfigError(what, where="precision.master", value="bf16", fix=fix)


def require_graphs(train: TrainConfig, world: World) -> None:
    """Raises ConfigError where blocks cannot repeat CUDA graphs: without a GPU, or where that was not thought through.

    A graph repeats at the same addresses: it would overwrite gradients that wait for those of another micro batch, and
    each size of a batch has graphs of its own, whose memory stays.
    """
    accumulates = 0 < train.most_micro_rows < train.global_batch_size
    reasons = {
        "torch has no GPU here": world.device.type != "cuda",
        "they are for one process: sharding gives weights new memory, and exchanges wait": world.size > 1,
        "gradients of several micro batches would be overwritten": accumulates,
        "batches that grow would record each size": bool(train.batch_warmup),
        "blocks that keep less are computed in another way": train.activation_checkpointing != "none",
    }
    what = next((reason for reason, holds in reasons.items() if holds), None)
    if what is not None:
        raise ConfigError(what, where="train.cuda_graphs", value=True, fix="change that, or set it to false")


def build_empty(
    config: ModelConfig, arguments: Mapping[str, Any], world: World, seed: int
) -> tuple[nn.Module, Weights]:
    """Build the model, whose parameters have no memory; return it with the source of its initial values.

    A class with `init_weights` draws its weights later. Any other model is built by its constructor on the first
    process; the constructors of the others give its shape. Buffers are the same on all processes. Collective. Raises
    ConfigError and UserCodeError.
    """

    def construct() -> nn.Module:
        initialize.seed_all(seed)
        return build_model(config, arguments)

    is_drawn, models = has_init_weights(find_target(config)), list[nn.Module]()

    def build() -> None:
        has_memory = world.is_main and not is_drawn
        models.append(construct() if has_memory else construct_empty(construct, is_drawn and world.is_main))

    # One constructor may take longer than the others, and may fail where the others do not.
    build() if world.size == 1 else world.agree(build)
    (model,) = models
    if is_drawn:
        initialize.require_buffers(model)
    if world.size > 1:  # the same parts first: sharing goes through the tensors one by one, each an exchange
        initialize.require_same_parts(model, world)
        initialize.share_tensors(model, world)
    places = initialize.places_of(model)
    if is_drawn:
        init: Any = model.init_weights
        return model, Drawn(places, init, seed, world.device)
    if world.is_main and world.size > 1:
        to_log(
            "the model is built by its constructor on the first process, and its weights are scattered to the others"
        )
    return model, Scattered(places, world)


@dataclass(frozen=True)
class ExportedWeights:
    """The weights of an export. Each process reads and checks its part of them, in every layout."""

    slots: ModelSlots
    uri: str
    manifest: ExportManifest
    world: World

    def fill(self, model: nn.Module, on_host: bool = False) -> None:
        """See `Weights`. Collective. Raises CheckpointError where the export is damaged."""
        with export_tensors.open_tensors(self.uri, self.manifest, self.world) as tensors:
            self.slots.fill(model, tensors, self.world, on_host)


def choose_initial_weights(
    model: nn.Module, weights: Weights, config: Config, world: World
) -> Weights | ExportedWeights:
    """Return the source of the first weights: the export that the run starts from, or else `weights`.

    Sets the model's buffers, too, where there is an export. Collective. Raises ConfigError where the model is another
    one than the exported one, or its export may not be read; CheckpointError where that is damaged.
    """
    start = config.train.initial_weights
    if not start.export_uri:
        return weights
    uri = start.export_uri
    if world.is_main:
        to_log(f"starting with the weights of {start.origin}: {uri}")
    slots, manifests = ModelSlots(model), list[ExportManifest]()

    def read_manifest_and_compare() -> None:  # reads no tensor
        read_recipe(uri, start.export_digest, Trust.of(config))
        manifests.append(read_export_manifest(uri, start.export_digest))
        with export_tensors.open_tensors(uri, manifests[0]) as tensors:
            misfit = slots.misfit(tensors.forms)
        if misfit:
            raise ConfigError(
                f"the model is not the one of {start.origin}: {misfit}",
                where="train.from",
                value=uri,
                fix="configure the same model, or train from scratch",
            )

    world.agree(read_manifest_and_compare)
    exported = ExportedWeights(slots, uri, manifests[0], world)
    if slots.has_buffers:
        with export_tensors.open_tensors(uri, manifests[0], world) as tensors:
            slots.fill_buffers(tensors, world)
    return exported


def _try_model(
    model: nn.Module,
    weights: Weights,
    config: Config,
    assets: Mapping[str, bytes],
    loader: TrainLoader,
    mesh: Mesh,
    kept_equal: Collection[str],
) -> tuple[list[str], blocks.Calls, list[probe.LossObservation]]:
    """Compute losses of the plain model; return the names of its blocks, the calls of one loss, and what was seen.

    Collective.

    `kept_equal`: buffers that differ in the dry run, where each process is by itself, and will not differ in steps.
    """
    world = mesh.world
    # A task of its own: what the dry run leaves in it must not reach the training's.
    candidates, task = blocks.find_candidates(model), build_task(config.task)
    if assets:
        task.restore(assets)
    units = list(candidates.names) if candidates.declared and isinstance(weights, Drawn) else []
    with contextlib.closing(loader.steps(0, 1)) as steps:
        micro = probe.take_rows(next(steps).micro_batches[0])
    if mesh.shape.context > 1:
        gather_results(world, lambda: _shorten_sequences(task, micro, config.parallel))
    is_sharded = mesh.shape.tensor > 1 or (world.size > 1 and config.parallel.stage != "ddp")
    num_chances = probe.NUM_CHANCES if is_sharded and candidates.names else 1

    def look(rows: MicroBatch, rank: int) -> probe.LossObservation:
        try:
            return probe.observe_loss(model, task, rows, candidates.names, *seed_and_lend(rank), num_chances)
        except UserCodeError:
            if not units:
                raise
        units.clear()  # all weights at once: where that helps, it is a block whose forward is not called
        return look(rows, rank)

    def seed_and_lend(rank: int) -> tuple[torch.device, tuple[int, int], Lender]:
        return world.device, (config.run.seed, rank), Lender(weights, units)

    def look_at_rows(work: Callable[[MicroBatch, int], T]) -> list[T]:
        return _look_at_rows(mesh, weights, micro, work)

    seen = look_at_rows(look)
    if any(one.batch_draws for one in seen):
        loader.send_nothing()
    if mesh.shape.context > 1 and any(one.draws for one in seen):
        raise ConfigError(
            "the model draws random numbers for each place, and each process has other places",
            where="parallel.context",
            value=mesh.shape.context,
            fix="set dropout to 0, or this to 1",
        )
    calls = [turn for one in seen for turn in one.calls]
    # The processes' calls must agree only where they exchange a block's parameters when it is called.
    names = blocks.choose_blocks(candidates, calls if is_sharded else calls[:1])
    probe.require_equal_buffers(seen, {*buffers.read_reductions(model), *kept_equal})
    dtype = DTYPES[config.precision.compute]
    if dtype != torch.float32:
        look_at_rows(lambda rows, rank: probe.rehearse(model, task, rows, names, dtype, *seed_and_lend(rank)))
    splitting = SplitTensors(config.parallel.sequence_parallel, task_reads_parts(task))
    ways: list[SplitTensors | CutSequences] = [splitting] * (mesh.shape.tensor > 1)
    for way in ways + [CutSequences()] * (mesh.shape.context > 1):
        probe_split.require_same_as_whole(model, task, micro, mesh, way, names, units, config.run.seed)
    if mesh.shape.pipeline > 1:
        look_at_rows(lambda rows, rank: probe.require_pieces(model, task, rows, *seed_and_lend(rank)))
    return names, [name for name in calls[0] if name in {blocks.ROOT, *names}], seen


def _shorten_sequences(task: Task, micro: MicroBatch, parallel: ParallelConfig) -> None:
    """Let a task make short sequences.

    Raises ConfigError where it has none, or processes could not share them; UserCodeError where it names others.
    """
    batch = tensors_of(task, micro.arrays)
    require_sequence_dims(task, batch)
    parallel.require_sequences(task.sequence_dims)
    name, dim = next(iter(task.sequence_dims.items()))
    probe.shorten_sequences(task, parallel.require_chunks(batch[name].shape[dim]))


def _look_at_rows(mesh: Mesh, weights: Weights, micro: MicroBatch, look: Callable[[MicroBatch, int], T]) -> list[T]:
    """Return what each process sees in its rows; a process that alone has the weights looks at rows of others, too.

    Collective.
    """
    world = mesh.world
    if isinstance(weights, Drawn):
        return gather_results(world, lambda: look(micro, mesh.data_rank))
    # Every n-th process's rows, so that these are at most MAX_LOOKS.
    parts = gather_results(world, lambda: micro)[:: -(-world.size // MAX_LOOKS)]

    def look_at_parts() -> list[T]:
        return [look(rows, rank) for rank, rows in enumerate(parts)] if weights.is_here else []

    return gather_results(world, look_at_parts)[0]


def gather_results(world: World, work: Callable[[], T]) -> list[T]:
    """Return the results of all processes; raise the first error of any of them on all. Collective."""
    try:
        result, problem = work(), None
    except KftrainError as error:
        result, problem = None, error.to_dict()
    answers = world.gather((result, problem))
    first = next((problem for _, problem in answers if problem), None)
    if first is not None:
        raise error_from_dict(first)
    return [result for result, _ in answers]


def count_norm_samples(norms: GlobalBatchNorms, plan: BatchPlan) -> int | None:
    """Count the samples that share statistics of batch norms; None where the model trains none."""
    if not norms.are_trained:
        return None
    return plan.global_batch_size if plan.num_micro_batches == 1 else plan.micro_batch_rows


def require_same_samples(before: int | None, norms: GlobalBatchNorms, plan: BatchPlan) -> None:
    """Raises ConfigError where a run would go on with other samples together in its batch norms.

    `before`: the number in its last checkpoint; None where that does not say it, or its model had no such statistics.
    """
    now = count_norm_samples(norms, plan)
    # With one micro batch, or one process, the same number of samples means the same samples.
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
