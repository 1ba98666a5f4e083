"""Spreads a model over the processes of an evaluation: as in its training, where it is large.

A model whose weights are small is copied to each process, which is the fastest: no process waits for another. A larger
one is spread as the section `parallel` says. Another model that cannot be spread so (it has no plan for its matrices,
or other sizes) is sharded over all processes, and else copied. Statistics are the same numbers in all but the axis
`tensor`, along which sums are taken in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kftrain.checkpoint import export
from kftrain.checkpoint.export import EmptyExport
from kftrain.checkpoint.filling import ModelSlots
from kftrain.config import Config
from kftrain.core.progress import to_log
from kftrain.errors import ConfigError
from kftrain.parallel import blocks
from kftrain.parallel.chunked_logits import ChunkLogits, find_output_layer
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.transforms import distribute, list_transforms
from kftrain.parallel.world import World
from kftrain.tasks.base import task_reads_parts

COPIES_UP_TO_BYTES = 1 << 30
"""Weights of no more bytes are copied, unless the configuration says otherwise."""

WHOLE = ("ddp", "zero1", "zero2")
"""Strategies under which each process of a training holds all parameters while it computes."""


@dataclass(frozen=True)
class SpreadModel:
    """A model that is ready to be measured."""

    model: nn.Module
    mesh: Mesh
    is_shared: bool
    """True if each process has only a part of the model, so that all must call it together."""


def layouts(config: Config, num_bytes: int, num_processes: int) -> list[ParallelConfig | None]:
    """List the layouts to try, in order, for weights of so many bytes; None stands for a copy on each process."""
    layout, parallel = config.evaluate.layout, config.parallel
    small = layout == "auto" and num_bytes <= COPIES_UP_TO_BYTES
    if num_processes == 1 or layout == "copies" or small:
        return [None]
    if parallel.tensor == parallel.expert == parallel.pipeline == 1 and parallel.stage in WHOLE:
        return [None]
    # Without a backward pass nothing is kept of a sequence, and a stage would wait for the one before it: who shared a
    # sequence or a pipeline in training reads samples of its own.
    num_shards = parallel.shard * parallel.context * parallel.pipeline if parallel.shard > 0 else -1
    forward_only = {"strategy": "fsdp", "reshard_after_forward": True, "exchange": "step", "shard": num_shards}
    no_islands = {"islands": 1, "replicate": parallel.replicate * parallel.islands}
    trained = parallel.model_copy(update={**forward_only, **no_islands, "context": 1, "pipeline": 1})
    sharded = ParallelConfig()
    return [trained, *([sharded] if trained != sharded else []), None]


def spread_out(empty: EmptyExport, config: Config, world: World) -> SpreadModel:
    """Load the weights of an export into its model, in the first layout that the model can have. Collective.

    Raises CheckpointError where the export is damaged.
    """
    num_bytes = sum(parameter.numel() * parameter.dtype.itemsize for parameter in empty.model.parameters())
    *candidates, _ = layouts(config, num_bytes, world.size)
    chunk_tokens = find_chunk_tokens(empty, config)
    for parallel in filter(None, candidates):
        try:
            return _spread_model(empty, parallel, world, chunk_tokens)
        except ConfigError as error:
            if world.is_main:
                to_log(f"the evaluated model cannot be spread as in training: {error.line}")
            empty = empty.rebuilt()
    slots = ModelSlots(empty.model)
    export.fill(empty, empty.model, slots, world)
    model, mesh = empty.model.to(world.device), Mesh.of_copies(world)
    if chunk_tokens:
        ChunkLogits(chunk_tokens).apply(Distributed(model, mesh), [])
    return SpreadModel(model, mesh, False)


def find_chunk_tokens(empty: EmptyExport, config: Config) -> int:
    """Return how many tokens' logits are computed at a time, as in training; 0 for a model or task that cannot."""
    try:
        find_output_layer(empty.model, blocks.find_candidates(empty.model).declared_names)
    except ConfigError:
        return 0
    return config.train.loss_chunk_tokens if task_reads_parts(empty.task) else 0


def _spread_model(empty: EmptyExport, parallel: ParallelConfig, world: World, chunk_tokens: int) -> SpreadModel:
    """Spread a model in one layout and fill it. Raises ConfigError, before any weight is read, if it cannot be."""
    mesh = Mesh(parallel.shape(world.size), world)
    names = blocks.find_candidates(empty.model).declared_names
    if not names and parallel.tensor == 1:
        raise ConfigError("it names no blocks", where="model.blocks", fix="give it a method blocks()")
    slots = ModelSlots(empty.model)
    # Logits that `tensor` splits are whole again when the model returns them.
    chunks = [ChunkLogits(chunk_tokens)] if chunk_tokens and mesh.shape.tensor == 1 else []
    strategy = list_transforms(parallel, PrecisionConfig(), chunks, mesh.shape, forward_only=True)
    model = distribute(empty.model, strategy, mesh, names).model
    export.fill(empty, model, slots, world, on_host=parallel.offload)
    return SpreadModel(model, mesh, True)
