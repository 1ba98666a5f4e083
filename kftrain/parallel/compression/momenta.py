"""Momenta that each process has of its own gradients, for sums that are no gradients an optimizer could add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from kftrain.parallel.compression.codecs import Codec
from kftrain.parallel.compression.sums import CompressedSums


@dataclass(frozen=True)
class LocalRule:
    """Momentum and limit of each process's own gradient, in the place of the optimizer's and the engine's."""

    momentum: float
    clip_norm: float
    """Limit of the norm of the sum; 0: none."""


class MomentumSums(CompressedSums):
    """Sums of what a kind makes of the momenta of all processes."""

    def __init__(
        self, group: dist.ProcessGroup, codec: Codec, has_feedback: bool, bucket_bytes: int, rule: LocalRule
    ) -> None:
        super().__init__(group, codec, has_feedback, bucket_bytes)
        self._rule = rule

    def lay_out(self, length: int, device: torch.device) -> None:
        """See `CompressedSums`."""
        super().lay_out(length, device)
        self._state["momentum"] = self._momentum = torch.zeros(length, device=device)
        self._next_momentum = torch.zeros(length, device=device)
        self._changes.append((self._momentum, self._next_momentum))

    def gather(self) -> None:
        """Find the momentum after this step; what is to be sent is left to the kind."""
        self._work.zero_()
        self.add_gradients()
        if self._rule.clip_norm:
            limit = self._rule.clip_norm / math.sqrt(self._group.size())
            self._work.mul_(torch.clamp(limit / (torch.linalg.vector_norm(self._work) + 1e-6), max=1.0))
        torch.add(self._work, self._momentum, alpha=self._rule.momentum, out=self._next_momentum)
