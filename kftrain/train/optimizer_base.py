"""What our own optimizers have in common: they compute with local parts, and skip a step on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kftrain.parallel.sharded import local

Group = dict[str, Any]
"""`params`, and their settings."""


class SkippingOptimizer(torch.optim.Optimizer):
    """One whose step changes nothing where `found_inf` is 1, without the host's knowing.

    Its state is there from the beginning, so that a checkpoint has it of each parameter, even of one that has had no
    gradient yet, such as an expert that no token has reached.
    """

    found_inf: torch.Tensor | None = None
    """Scalar: 1 where the gradients are not finite, else 0; None: they are."""

    def __init__(self, groups: list[Group], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.begin(parameter)

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step."""
        raise NotImplementedError

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Updates parameters that have a gradient; `gradients`: their local parts, which may be changed."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all groups. Collective."""
        assert closure is None
        self.advance()

    def advance(self) -> None:
        """Updates all groups, without a profiler's mark. Gradients must not be recorded. Collective."""
        for group in self.param_groups:
            used = [each for each in group["params"] if each.grad is not None]
            if used:
                self.update(group, used, [local(each.grad) for each in used])

    def counts(self, device: torch.device) -> torch.Tensor:
        """1 where this step counts, 0 where it is skipped."""
        one = torch.ones((), device=device)
        return one if self.found_inf is None else one - self.found_inf.to(device)

    def local_states(self, parameters: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        """This process's parts of what is kept of each of the parameters under a name."""
        return [local(self.state[each][name]) for each in parameters]


def zero(parameter: torch.Tensor) -> torch.Tensor:
    """A count, or another number of a parameter."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device)


def zeros(parameter: torch.Tensor) -> torch.Tensor:
    """A number for each of a parameter's, which are cut as the parameter is."""
    return torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
