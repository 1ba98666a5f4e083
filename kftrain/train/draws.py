"""Random numbers of a forward pass, by where they are drawn: in which micro batch, and in which block.

One stream for a whole step would give each schedule, and each cut into stages, other numbers: they compute in other
orders. So each block begins with a seed of (seed of the step, micro batch, block), and what follows with another. The
first micro batch begins with the seed of the step itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from kftrain.train.step import seed_generators

MAX_PLACES = 1 << 20
"""More than there are places with a seed of their own in a micro batch: two for each block."""


class PlacedDraws:
    """Seeds the generators where a forward pass may draw. For models that draw: others are spared the hooks."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], kept: Sequence[str], device: torch.device) -> None:
        """Watch the blocks of a distributed model: their wrappers, so that recomputing draws as at first.

        `blocks`: names of all blocks of the model; `kept`: of those that are called here.
        """
        self._device = device
        self._step = 0
        self._micro = 0
        for number, name in enumerate(blocks):
            if name in kept:
                module = model.get_submodule(name)
                module.register_forward_pre_hook(lambda *_, place=2 * number + 1: self._seed(place))
                module.register_forward_hook(lambda *_, place=2 * number + 2: self._seed(place))

    def begin_step(self) -> None:
        """Note the seed of the step, which the loop has set."""
        self._step = torch.default_generator.initial_seed()

    def begin(self, micro: int, num_blocks: int = 0) -> None:
        """Begin with a micro batch, or with a stage of it that comes after so many blocks."""
        self._micro = micro
        # As behind the block before this stage, where a process with all blocks would be by now.
        self._seed(2 * num_blocks)

    def _seed(self, place: int) -> None:
        # Not where a block is recomputed: there the hooks of its wrapper are not called.
        seed_generators((self._step + self._micro * MAX_PLACES + place) % 2**63, self._device)
