"""SGD with momentum, as `torch.optim.SGD` (Sutskever et al. 2013), by its fused kernel, which can skip a step.

torch's own class cannot be used: distributed tensors do not know the kernel, which works on each number by itself.
"""

from __future__ import annotations

import torch

from kftrain.parallel.sharded import local
from kftrain.train.optimizer_base import Group, SkippingOptimizer, zero, zeros


class Sgd(SkippingOptimizer):
    """SGD with weight decay added to the gradient."""

    def __init__(self, groups: list[Group], learning_rate: float, momentum: float, nesterov: bool) -> None:
        super().__init__(groups, {"lr": learning_rate, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.0})

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Start with a count of 0, and a momentum of 0 where there is one."""
        momentum = {"momentum_buffer": zeros(parameter)} if self.defaults["momentum"] else {}
        return {"step": zero(parameter), **momentum}

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Update all parameters of a group by one kernel."""
        torch._fused_sgd_(
            [local(each) for each in parameters],
            gradients,
            self.local_states(parameters, "momentum_buffer") if group["momentum"] else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=False,  # the first momentum is the gradient, as from a momentum of 0
            found_inf=None if self.found_inf is None else self.found_inf.to(gradients[0].device),
        )
        torch._foreach_add_(self.local_states(parameters, "step"), [self.counts(gradients[0].device)] * len(parameters))
