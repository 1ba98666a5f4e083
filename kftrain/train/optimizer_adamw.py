"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): torch's fused kernel on local tensors, which skips a step.

What torch's own step finds out each time anew (which tensors belong together, what is kept of each) is kept here, and
distributed tensors are not dispatched one by one: for small models that takes as long as their backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kftrain.parallel.sharded import local
from kftrain.train.optimizer_base import Group, zero, zeros


class Together(NamedTuple):
    """Tensors of one kernel: of one group, one device and one format; of each parameter the local part."""

    group: Group
    parameters: list[torch.Tensor]
    """The parameters themselves: a gradient is asked of them."""
    weights: list[torch.Tensor]
    means: list[torch.Tensor]
    squares: list[torch.Tensor]
    counts: list[torch.Tensor]

    def with_gradient(self) -> Together:
        """Without the parameters that have none in this step."""
        places = [place for place, each in enumerate(self.parameters) if each.grad is not None]
        return Together(self.group, *([tensors[place] for place in places] for tensors in self[1:]))


class AdamW(torch.optim.AdamW):
    """Its state has torch's names, and is there from the beginning: see `SkippingOptimizer`."""

    found_inf: torch.Tensor | None = None
    """Scalar: 1 where the gradients are not finite, else 0; None: they are."""

    def __init__(self, groups: list[Group], learning_rate: float, betas: tuple[float, float], epsilon: float) -> None:
        super().__init__(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each] = {"step": zero(each), "exp_avg": zeros(each), "exp_avg_sq": zeros(each)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also the end of `load_state_dict`, which makes new groups and new tensors of the state."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._kept = None

    _kept: list[Together] | None = None
    """From the first step on: wrappers put parameters into their places when the first forward pass begins."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all groups."""
        assert closure is None
        self.advance()

    def advance(self) -> None:
        """Updates all groups, without a profiler's mark. Gradients must not be recorded."""
        if self._kept is None:
            self._kept = [each for group in self.param_groups for each in self._together(group)]
        for kept in self._kept:
            gradients = [each.grad for each in kept.parameters]
            used = kept
            if any(each is None for each in gradients):
                used = kept.with_gradient()
                gradients = [each.grad for each in used.parameters]
            if used.parameters:
                self._update(used, [local(each) for each in gradients if each is not None])

    def _together(self, group: Group) -> list[Together]:
        found: dict[tuple[torch.device, torch.dtype], Together] = {}
        for parameter in group["params"]:
            weight, state = local(parameter.detach()), self.state[parameter]
            kept = found.setdefault((weight.device, weight.dtype), Together(group, [], [], [], [], []))
            tensors = (parameter, weight, local(state["exp_avg"]), local(state["exp_avg_sq"]), local(state["step"]))
            for own, each in zip(kept[1:], tensors, strict=True):
                own.append(each)
        return list(found.values())

    def _update(self, of: Together, gradients: list[torch.Tensor]) -> None:
        found_inf = None if self.found_inf is None else self.found_inf.to(of.weights[0].device)
        # the kernel divides by powers of the counts, and does nothing where the step is skipped
        if found_inf is None:
            torch._foreach_add_(of.counts, 1)
        else:
            torch._foreach_add_(of.counts, [1 - found_inf] * len(of.counts))
        torch._fused_adamw_(
            of.weights,
            gradients,
            of.means,
            of.squares,
            [],
            of.counts,
            lr=of.group["lr"],
            beta1=of.group["betas"][0],
            beta2=of.group["betas"][1],
            weight_decay=of.group["weight_decay"],
            eps=of.group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )
