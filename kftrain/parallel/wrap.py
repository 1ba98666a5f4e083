"""The same weights on all processes, before they are spread over them."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from kftrain.errors import ConfigError
from kftrain.parallel.world import World
from kftrain.progress import to_log

COMPARED_NUMBERS = 64
"""Of each tensor, to see whether all processes have built the same model."""


def equalize(model: nn.Module, world: World) -> None:
    """Gives all processes the weights of rank 0 where they have drawn different ones.

    Sharding takes a part of each process's weights: of different ones it would make a model that nobody built.
    Collective. Raises ConfigError where they have built different models.
    """
    if world.size == 1:
        return
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
