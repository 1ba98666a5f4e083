"""What our own optimizers have in common: they compute with local parts, and skip a step on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kftrain.parallel.sharded import local

Group = dict[str, Any]
"""`params`, and their settings."""


class SkippingOptimizer(torch.optim.Optimizer):
    """An optimizer whose step changes nothing where `found_inf` is 1, without the host's knowing.

    So every operation runs in any case, and each change is multiplied by `counts`, 1 or 0. Gradients that are no
    numbers must be masked before that: 0 times them is no number either.

    The state is there from the beginning, so that a checkpoint has it of each parameter, even of one that has had no
    gradient yet, such as an expert that no token has reached.
    """

    found_inf: torch.Tensor | None = None
    """Scalar: 1 where the gradients are not finite, else 0; None where they are known to be finite."""

    def __init__(self, groups: list[Group], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.begin(parameter)

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter before its first step, by torch's names."""
        raise NotImplementedError

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Update parameters that have a gradient; `gradients`: their local parts, which may be changed."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all groups. Collective."""
        assert closure is None
        self.advance()

    def advance(self) -> None:
        """Update all groups, without a profiler's mark. Gradients must not be recorded. Collective."""
        # A gradient is there on all processes or on none (parallel/gradients.py), so all exchange for the same ones.
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if used:
                self.update(group, used, [local(parameter.grad) for parameter in used])

    def counts(self, device: torch.device) -> torch.Tensor:
        """Return 1 where this step counts, 0 where it is skipped: a scalar on the device."""
        one = torch.ones((), device=device)
        return one if self.found_inf is None else one - self.found_inf.to(device)

    def local_states(self, parameters: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Return this process's part of each parameter's state of this name."""
        return [local(self.state[parameter][name]) for parameter in parameters]


def zero(parameter: torch.Tensor) -> torch.Tensor:
    """Make a scalar 0, fp32, on a parameter's device: a count of its steps, for example."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device)


def zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Make zeros of a parameter's shape, cut over the processes as the parameter is."""
    return torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
