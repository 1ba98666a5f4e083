"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): torch's fused kernel on local tensors, which skips a step.

torch's own class finds out anew which tensors belong together, and distributed tensors are dispatched one by one: a
tenth of the step of a small model. Nothing but the state is kept between steps: a parameter may get other memory.
"""

from __future__ import annotations

import torch

from kftrain.parallel.sharded import local
from kftrain.train.optimizer_base import Group, SkippingOptimizer, zero, zeros


class AdamW(SkippingOptimizer):
    """AdamW whose state has torch's names."""

    def __init__(self, groups: list[Group], learning_rate: float, betas: tuple[float, float], epsilon: float) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0})

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Start with a count of 0 and two moments of 0."""
        return {"step": zero(parameter), "exp_avg": zeros(parameter), "exp_avg_sq": zeros(parameter)}

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Update all parameters of a group by one kernel."""
        counts, device = self.local_states(parameters, "step"), gradients[0].device
        # the kernel divides by powers of the counts, and does nothing where the step is skipped
        torch._foreach_add_(counts, [self.counts(device)] * len(counts))
        torch._fused_adamw_(
            [local(each) for each in parameters],
            gradients,
            self.local_states(parameters, "exp_avg"),
            self.local_states(parameters, "exp_avg_sq"),
            [],
            counts,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=None if self.found_inf is None else self.found_inf.to(device),
        )
