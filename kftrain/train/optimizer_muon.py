"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose matrices are made orthogonal.

The numbers are those of `torch.optim.Muon`, whose iteration is always in bf16; here it is in the format of the
computation, since in bf16 the last bit of a gradient, which no two layouts share, tips roundings. And torch's leaves it
to distributed tensors, which round otherwise; here a matrix is brought together on one process.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch

from kftrain.parallel.sharded import ALONE, Team, local, on_whole
from kftrain.train.optimizer_base import Group, SkippingOptimizer, zero, zeros

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic: as steep at 0 as can be; it brings singular values to about 0.7 … 1.2."""

NUM_ITERATIONS = 5
EPSILON = 1e-7

Scale = Literal["match_rms_adamw", "original"]
MATCHING: Scale = "match_rms_adamw"


class Muon(SkippingOptimizer):
    """Of matrices. `compute`: the format of the iteration; `replicas`: who has the same plain tensors."""

    def __init__(
        self,
        groups: list[Group],
        learning_rate: float,
        momentum: float,
        nesterov: bool,
        scale: Scale,
        compute: torch.dtype,
        replicas: Team = ALONE,
    ) -> None:
        defaults = {
            "lr": learning_rate,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": 0.0,
            "scale": scale,
        }
        super().__init__(groups, defaults)
        self._compute = compute
        self._replicas = replicas

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Its count and its momentum."""
        assert parameter.dim() == 2, parameter.shape
        return {"step": zero(parameter), "momentum_buffer": zeros(parameter)}

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Momentum and weights part by part, the iteration matrix by matrix."""
        counts, momentum = self.counts(gradients[0].device), group["momentum"]
        buffers = self.local_states(parameters, "momentum_buffer")
        torch._foreach_add_(self.local_states(parameters, "step"), [counts] * len(parameters))
        for gradient, buffer in zip(gradients, buffers, strict=True):
            gradient.copy_(torch.where(counts > 0, gradient, buffer))  # which leaves the momentum as it is
            buffer.lerp_(gradient, 1 - momentum)
            if group["nesterov"]:
                gradient.lerp_(buffer, momentum)
            else:
                gradient.copy_(buffer)
        casts = [each.to(self._compute) for each in gradients]
        directions = on_whole(casts, parameters, orthogonal, self._replicas)
        for parameter, direction in zip(parameters, directions, strict=True):
            weights, rate = local(parameter), group["lr"] * _factor(group["scale"], parameter.shape)
            weights.mul_(1 - group["lr"] * group["weight_decay"] * counts)
            weights.sub_(direction.float().mul_(rate * counts))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix with orthonormal rows or columns, by a Newton-Schulz iteration, in its own format."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=EPSILON)
    for _ in range(NUM_ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


@functools.cache
def _factor(scale: Scale, shape: tuple[int, ...]) -> float:
    """Of the learning rate; updates of any shape may be as large as AdamW's (Liu et al. 2025, arXiv:2502.16982)."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if scale == MATCHING else math.sqrt(max(1.0, rows / columns))
