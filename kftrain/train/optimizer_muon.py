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
"""Coefficients of the quintic: as steep at 0 as can be; it brings singular values to about 0.7 … 1.2."""

NUM_ITERATIONS = 5
EPSILON = 1e-7

Scale = Literal["match_rms_adamw", "original"]
MATCHING: Scale = "match_rms_adamw"


class Muon(SkippingOptimizer):
    """Muon for matrices. `compute`: the format of the iteration; `replicas`: processes with the same plain tensors."""

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
        """Start with a count of 0 and a momentum of 0."""
        assert parameter.dim() == 2, parameter.shape
        return {"step": zero(parameter), "momentum_buffer": zeros(parameter)}

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Move momentum and weights part by part; make whole matrices orthogonal, one process each."""
        counts, momentum = self.counts(gradients[0].device), group["momentum"]
        buffers = self.local_states(parameters, "momentum_buffer")
        torch._foreach_add_(self.local_states(parameters, "step"), [counts] * len(parameters))
        for gradient, buffer in zip(gradients, buffers, strict=True):
            # In a skipped step the momentum stands in for the gradient: moved towards itself it stays as it is.
            gradient.copy_(torch.where(counts > 0, gradient, buffer))
            buffer.lerp_(gradient, 1 - momentum)
            if group["nesterov"]:
                gradient.lerp_(buffer, momentum)
            else:
                gradient.copy_(buffer)
        # Cast before the exchange: it moves all matrices there and back, so half as much in bf16.
        casts = [gradient.to(self._compute) for gradient in gradients]
        directions = on_whole(casts, parameters, orthogonal, self._replicas)
        for parameter, direction in zip(parameters, directions, strict=True):
            weights, rate = local(parameter), group["lr"] * _factor(group["scale"], parameter.shape)
            weights.mul_(1 - group["lr"] * group["weight_decay"] * counts)
            weights.sub_(direction.float().mul_(rate * counts))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return about the nearest matrix with orthonormal rows or columns, by Newton-Schulz, in the matrix's format."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    wide = matrix.T if is_tall else matrix  # the products with its transpose are then the smaller ones
    wide = wide / wide.norm().clamp(min=EPSILON)  # no singular value is above 1: else the iteration diverges
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


@functools.cache
def _factor(scale: Scale, shape: tuple[int, ...]) -> float:
    """Return the factor of the learning rate for a shape: the original one, or that of Liu et al. 2025.

    The latter makes updates of any shape as large as AdamW's (arXiv:2502.16982).
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if scale == MATCHING else math.sqrt(max(1.0, rows / columns))
