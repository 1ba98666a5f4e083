"""From a plain module to one that trains on many processes: FSDP2, activation checkpointing, number formats.

The module is built in full on every process from the same seed and then sharded, so the initial weights do not depend
on the number of processes. Order matters: activation checkpointing wraps the blocks first, sharding wraps what came of
it.

FSDP2: `torch.distributed.fsdp.fully_shard` on each block and on the root (Zhao et al. 2023, arXiv:2304.11277; ZeRO
stage 3, Rajbhandari et al. 2020, arXiv:1910.02054). The mesh has two axes: sharded inside, replicated across (hybrid
sharding). `ddp` is the mesh that shards over one process, and one process alone is sharded too: so the number formats
are one thing in all of them. In bf16 the weights and what enters the model or a block are cast, gradients come back in
bf16 and are summed in `precision.reduce`; buffers stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from kftrain.errors import ConfigError
from kftrain.parallel.world import World
from kftrain.progress import to_log

COMPARED_NUMBERS = 64
"""Of each tensor, to see whether all processes have built the same model."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """What to spread how; the fields of the `parallel` and `precision` sections."""

    strategy: str
    shard: int
    replicate: int
    reshard_after_forward: bool
    compute: str
    reduce: str
    checkpoint_blocks: bool

    def mesh_shape(self, world_size: int) -> tuple[int, int]:
        """Sizes of the mesh axes (replicate, shard). Raises ConfigError."""
        return (world_size, 1) if self.strategy == "ddp" else mesh_shape(self.shard, self.replicate, world_size)


def mesh_shape(shard: int, replicate: int, world_size: int) -> tuple[int, int]:
    """Sizes of the mesh axes (replicate, shard) for a number of processes.

    Raises ConfigError if they do not multiply to it.
    """
    if shard == -1:
        shard = world_size // replicate
    if shard * replicate != world_size:
        raise ConfigError(
            f"parallel.replicate x parallel.shard must be the number of processes, {world_size}",
            value=f"{replicate} x {shard}",
            fix="set parallel.shard to -1, or change launch.nodes and launch.processes_per_node",
        )
    return replicate, shard


def distribute(model: nn.Module, layout: Layout, world: World, blocks: Sequence[str]) -> nn.Module:
    """The module, ready to train on all processes of `world`. `blocks`: names of what is a unit of its own.

    `model` is in fp32, and best equal on all processes: otherwise they take the weights of rank 0. Collective. Raises
    ConfigError where its numbers would depend on the number of processes.
    """
    shape = layout.mesh_shape(world.size)
    if world.size > 1:
        _equalize(model, world)
    if layout.checkpoint_blocks:
        _recompute(model, blocks)
    mesh = _mesh(shape, world)
    options: dict[str, Any] = {
        "mesh": mesh["shard"] if shape[0] == 1 else mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[layout.compute], reduce_dtype=DTYPES[layout.reduce]),
        "reshard_after_forward": layout.reshard_after_forward,
    }
    for name in blocks:
        fully_shard(model.get_submodule(name), **options)
    fully_shard(model, **options)
    return model


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool) -> Iterator[None]:
    """Around one micro batch: gradients are exchanged only on the last one of a step."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    yield


def _mesh(shape: tuple[int, int], world: World) -> DeviceMesh:
    """Processes side by side along `shard`; groups are made by hand, since those of torch's own forget the timeout."""
    ranks = torch.arange(world.size).reshape(shape)
    groups = [_group_of(world, columns.tolist()) for columns in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, world.device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _group_of(world: World, members: list[list[int]]) -> dist.ProcessGroup:
    """This process's group of these. Collective."""
    own = next(ranks for ranks in members if world.rank in ranks)
    group: dist.ProcessGroup | None = dist.group.WORLD
    if len(own) < world.size:
        group = dist.new_group(own, timeout=world.timeout, use_local_synchronization=True)
    assert group is not None
    return group


def require_global_statistics(model: nn.Module, world: World) -> None:
    """Raises ConfigError for batch normalisation on several processes.

    It sees only its own process's part of a batch, and nobody averages what it collects. One that is kept in evaluation
    mode sees none.
    """
    if world.size == 1:
        return
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or isinstance(module, nn.SyncBatchNorm):
            continue
        if module.training or not module.track_running_stats:
            raise ConfigError(
                "batch normalisation is not synchronised over processes",
                where=f"module {name or 'model'}",
                value=type(module).__name__,
                fix="use GroupNorm or LayerNorm, on GPUs SyncBatchNorm, or launch.processes_per_node: 1",
            )


def _equalize(model: nn.Module, world: World) -> None:
    """Gives all processes the weights of rank 0 where they have drawn different ones.

    Sharding takes a part of each process's weights: of different ones it would make a model that nobody built.
    """
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    heads = [_head(tensor) for tensor in tensors.values()]
    seen = world.gather(tuple(hashlib.sha256(repr(part).encode()).hexdigest() for part in (shapes, heads)))
    if len({digest for digest, _ in seen}) > 1:
        raise ConfigError(
            "the model does not have the same parts on all processes",
            where="model",
            fix="names, shapes and types of its weights must not depend on rank or chance",
        )
    if len({digest for _, digest in seen}) > 1:
        if world.is_main:
            to_log("the processes have drawn different initial weights: all take those of rank 0")
        for tensor in tensors.values():
            if _is_plain(tensor):
                world.copy_from_main(tensor)


def _head(tensor: torch.Tensor) -> bytes:
    """The first numbers of a tensor as they lie in memory; nothing of one that has none there."""
    if not _is_plain(tensor):
        return b""
    head = tensor.detach().reshape(-1)[:COMPARED_NUMBERS].resolve_conj().resolve_neg().cpu().contiguous()
    return head.view(torch.uint8).numpy().tobytes()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _recompute(model: nn.Module, names: Sequence[str]) -> None:
    if not names:
        raise ConfigError(
            "the model has no blocks that could be recomputed",
            where="train.activation_checkpointing",
            value="blocks",
            fix="name them in a method blocks() of the model, or set it to none",
        )
    blocks = {id(model.get_submodule(name)) for name in names}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in blocks:
                setattr(parent, name, checkpoint_wrapper(child))
