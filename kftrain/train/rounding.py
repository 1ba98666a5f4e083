"""Weights that are kept in bf16 alone, and rounded by chance: up as often as they are nearer to the larger number.

An update is smaller than half the distance of two numbers of bf16 where it is below 1/512 of the weight: rounded to the
nearest, the weight would never move. Rounded by chance it moves by the right amount in the mean (Gupta et al. 2015,
arXiv:1502.02551; for bf16 Zamirai et al. 2020, arXiv:2010.06192). Moments are kept in the same way.

Chances are drawn from the seed of the run, the step, the parameter's name and the place of this process's part: so a
run that is stopped goes on as it would have, and copies of a weight stay equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from kftrain.parallel.sharded import local, part_of
from kftrain.train.optimizer_kinds import AdamW, Group

DROPPED_BITS = 16
"""Bits of an fp32 number that bf16 does not have."""


def round_by_chance(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round fp32 to bf16, to one of the two neighbours; the nearer one is the more probable, and the mean is exact."""
    # The bits of a number grow with its size. So a random number below the last place that stays is added to them, and
    # what is then below that place is cut off. Infinity and what is no number stay what they are.
    chances = torch.randint(
        0, 1 << DROPPED_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    bits = values.contiguous().view(torch.int32) + chances
    rounded = (bits & -(1 << DROPPED_BITS)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


class RoundedAdamW(AdamW):
    """AdamW whose weights and moments are bf16; a parameter at a time is fp32 while it is updated."""

    seed = 0
    """Seed of the run."""
    names: Mapping[torch.Tensor, str]
    """Name of each parameter."""

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Update one parameter after the other in fp32, and round it. A skipped step rounds what needs no rounding."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            kept = [local(tensor) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])]
            wide = [tensor.float() for tensor in kept]
            self.compute(group, wide[:1], [gradient.float()], wide[1:2], wide[2:], [state["step"]])
            generator = self._make_generator(parameter, gradient.device)
            for tensor, value in zip(kept, wide, strict=True):
                tensor.copy_(round_by_chance(value, generator))

    def _make_generator(self, parameter: torch.Tensor, device: torch.device) -> torch.Generator:
        place, _ = part_of(parameter)
        digest = hashlib.sha256(f"{self.seed}/{self.position}/{self.names[parameter]}/{place}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
