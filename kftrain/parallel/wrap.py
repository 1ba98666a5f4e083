"""From a plain module to one that trains on many processes: FSDP2 or DDP, activation checkpointing, number formats.

The module is built in full on every process from the same seed and then sharded, so the initial weights do not depend
on the number of processes. Order matters: activation checkpointing wraps the blocks first, sharding wraps what came of
it.

FSDP2: `torch.distributed.fsdp.fully_shard` on each block and on the root (Zhao et al. 2023, arXiv:2304.11277; ZeRO
stage 3, Rajbhandari et al. 2020, arXiv:1910.02054). With `replicate > 1` the mesh has two axes: sharded inside,
replicated across (hybrid sharding).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

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


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: what its `blocks()` names, else its longest ModuleList, else none."""
    blocks: Any = getattr(model, "blocks", None)
    if callable(blocks):
        return list(blocks())
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def distribute(model: nn.Module, layout: Layout, world: World) -> nn.Module:
    """The module, ready to train on all processes of `world`.

    `model` is in fp32, and best equal on all processes: otherwise they take the weights of rank 0. Collective. Raises
    ConfigError where its numbers would depend on the number of processes.
    """
    if world.size > 1:
        _refuse_local_statistics(model)
        _equalize(model, world)
    if layout.checkpoint_blocks:
        _recompute_blocks(model)
    if layout.strategy == "ddp":
        return _replicate(model, layout, world)
    return _shard(model, layout, world)


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool) -> Iterator[None]:
    """Around one micro batch: gradients are exchanged only on the last one of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield


def compute_context(layout: Layout, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Number format of the forward pass where FSDP does not set it itself."""
    if layout.strategy == "ddp" and layout.compute != "fp32":
        return torch.autocast(device.type, dtype=DTYPES[layout.compute])
    return contextlib.nullcontext()


def bare(model: nn.Module) -> nn.Module:
    """The user's module behind a DDP wrapper; FSDP2 changes the module in place."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _shard(model: nn.Module, layout: Layout, world: World) -> nn.Module:
    shape = mesh_shape(layout.shard, layout.replicate, world.size)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[layout.compute], reduce_dtype=DTYPES[layout.reduce])
    options: dict[str, Any] = {
        "mesh": mesh["shard"] if shape[0] == 1 else mesh,
        "mp_policy": policy,
        "reshard_after_forward": layout.reshard_after_forward,
    }
    for block in blocks_of(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def _replicate(model: nn.Module, layout: Layout, world: World) -> nn.Module:
    if layout.reduce != "fp32" and world.device.type == "cpu":
        raise ConfigError(
            "DDP on gloo sums gradients in fp32 only", value=layout.reduce, fix="set precision.reduce to fp32"
        )
    wrapped = DistributedDataParallel(model.to(world.device), gradient_as_bucket_view=True)
    if layout.reduce == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def _refuse_local_statistics(model: nn.Module) -> None:
    """Batch normalisation sees only its own process's part of a batch, and nobody averages what it collects."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
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


def _recompute_blocks(model: nn.Module) -> None:
    blocks = {id(block) for block in blocks_of(model)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in blocks:
                setattr(parent, name, checkpoint_wrapper(child))
