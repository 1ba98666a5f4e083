"""Units of a sharded model that only computes forward, on CPUs: gathered matrix by matrix.

FSDP2 gathers a unit into one buffer and copies the parameters out of it, gloo fills a buffer of its own first, and the
buffer of the unit before is kept to the end of the next exchange: three units at a time. Here the large matrices of a
unit are units of their own, all gathered where the unit's forward begins and freed where it ends. So whatever the unit
does with its matrices it finds them whole; and only a single matrix is there several times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

MIN_PIECE_BYTES = 4 << 20
"""Least size of a piece. An exchange for each smaller module would cost more time than it saves memory."""


def fully_shard_in_pieces(model: nn.Module, blocks: Sequence[str], options: dict[str, Any]) -> None:
    """Shard the blocks and the root, each after its pieces. `options`: arguments of `fully_shard`. Collective."""
    # Inner modules first: fully_shard leaves out of a unit what already belongs to another one. Pieces are not freed
    # after their own forward, since the unit may still read their weights: _gather_with frees them.
    units = [*(model.get_submodule(name) for name in blocks), model]
    pieces = [pieces_of(model, unit, [other for other in units if other is not unit]) for unit in units]
    for unit, parts in zip(units, pieces, strict=True):
        for part in parts:
            fully_shard(part, **{**options, "reshard_after_forward": False})
        fully_shard(unit, **options)
        if parts:
            _gather_with(unit, parts)


def pieces_of(model: nn.Module, unit: nn.Module, others: Sequence[nn.Module]) -> list[nn.Module]:
    """List the modules below a unit, inner ones first, whose own parameters are large and of no other module.

    `others`: The other units; the modules of those that are nested in this one are skipped.
    """
    numbers = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    inner = {id(part) for other in others if other in set(unit.modules()) for part in other.modules()}

    def is_piece(module: nn.Module) -> bool:
        own = list(module.parameters(recurse=False))
        return (
            module is not unit
            and id(module) not in inner
            and not isinstance(module, nn.ModuleList | nn.ModuleDict)
            and type(module).forward is not nn.Module.forward
            and all(numbers[id(parameter)] == 1 for parameter in module.parameters())  # a tied one has two homes
            and sum(parameter.nbytes for parameter in own) >= MIN_PIECE_BYTES
        )

    return [module for module in unit.modules() if is_piece(module)][::-1]


def _gather_with(unit: nn.Module, pieces: Sequence[nn.Module]) -> None:
    """Keep the pieces whole from the beginning of the unit's forward to its end."""
    parts = [piece for piece in pieces if isinstance(piece, FSDPModule)]

    def gather(*_: Any) -> None:
        for part in parts:
            part.unshard()

    def free(*_: Any) -> None:
        for part in parts:
            part.reshard()

    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free)
