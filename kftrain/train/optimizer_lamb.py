"""LAMB (You et al. 2019, arXiv:1904.00962): AdamW's direction, as long for each parameter as the parameter itself.

The norms go over the parts of a parameter: one all-reduce in a step for each parameter group, and for each axis of the
mesh that cuts its parameters.
"""

from __future__ import annotations

import torch

from kftrain.parallel.sharded import local, sum_over_parts
from kftrain.train.optimizer_base import Group, SkippingOptimizer, zero, zeros


class Lamb(SkippingOptimizer):
    """LAMB as in the paper: moments with bias correction, decay within the direction, no bounds of the norms."""

    def __init__(self, groups: list[Group], learning_rate: float, betas: tuple[float, float], epsilon: float) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0})

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Start with a count of 0 and two moments of 0."""
        return {"step": zero(parameter), "exp_avg": zeros(parameter), "exp_avg_sq": zeros(parameter)}

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Make the directions, then their norms and those of the weights, then change the weights."""
        # All directions first, in the gradients' memory: then one exchange brings the norms of all parameters.
        counts = self.counts(gradients[0].device)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._make_direction(group, parameter, gradient.masked_fill_(counts == 0, 0.0), counts)
        weights = [local(parameter) for parameter in parameters]
        squares = [
            torch.stack([part.square().sum(), d.square().sum()]) for part, d in zip(weights, gradients, strict=True)
        ]
        for part, direction, sums in zip(weights, gradients, sum_over_parts(squares, parameters), strict=True):
            size, length = sums.sqrt()
            ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)  # or weights of 0 would stay 0
            part.sub_(direction.mul_(ratio * group["lr"] * counts))

    def _make_direction(
        self, group: Group, parameter: torch.Tensor, gradient: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Move the moments, and make the gradient the direction. A skipped step moves them by 0 times a masked one."""
        (beta1, beta2), state = group["betas"], self.state[parameter]
        mean, variance = local(state["exp_avg"]), local(state["exp_avg_sq"])
        step = state["step"].add_(counts).clamp(min=1)  # 0: the first step is skipped
        mean.lerp_(gradient, (1 - beta1) * counts)
        variance.lerp_(gradient.square(), (1 - beta2) * counts)
        scale = (variance / (1 - beta2**step)).sqrt_().add_(group["eps"])
        gradient.copy_(mean / (1 - beta1**step) / scale + group["weight_decay"] * local(parameter))
