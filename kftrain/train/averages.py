"""Moving averages of the weights, which evaluation and export take in the place of the weights of the last step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kftrain.parallel.distributed import Part
from kftrain.parallel.sharded import local
from kftrain.train.optimizer import list_parameter_names


class Averages:
    """An exponential moving average of each parameter that is trained, in fp32, cut over processes as the parameter is.

    As `torch.optim.swa_utils` computes it: the first average is the weights, a later one moves by `1 - decay` towards
    the weights of its step. Each process averages its own parts, so nothing is exchanged. Buffers have no averages.
    """

    def __init__(self, model: nn.Module, decay: float, start_steps: int) -> None:
        """Begin with the weights of now, which the averages follow for `start_steps` steps more."""
        self._names = {weight: names for weight, names in list_parameter_names(model).items() if weight.requires_grad}
        self._weights = list(self._names)
        self._averages = [weight.detach().to(torch.float32, copy=True) for weight in self._weights]
        self._parts = [local(average) for average in self._averages]
        self._are_plain = not any(isinstance(weight, DTensor) for weight in self._weights)
        self._are_narrow = any(weight.dtype != torch.float32 for weight in self._weights)
        # Of any parameter, since a stage whose parameters are all frozen counts the steps, too: one of the processes
        # writes the count into checkpoints, for all.
        device = next((local(weight).device for weight in model.parameters()), None)
        self._num_steps = torch.zeros((), device=device)
        """Number of steps that were not skipped: on the device, as the decision to skip one is."""
        self._decay = decay
        self._start_steps = start_steps

    @torch.no_grad()
    def update(self, found_inf: torch.Tensor) -> None:
        """Move the averages to the weights that a step has left; they stay where `found_inf` is 1."""
        counts = torch.rsub(found_inf.to(self._num_steps.device), 1.0)
        self._num_steps.add_(counts)
        if not self._averages:
            return
        # 1 up to the first step after the start, which copies the weights; and 0 for a skipped one.
        share = torch.rsub(self._num_steps, self._start_steps + 2.0).clamp_(1.0 - self._decay, 1.0).mul_(counts)
        weights: list[torch.Tensor] = [*self._weights] if self._are_plain else list(map(local, self._weights))
        if self._are_narrow:
            weights = [weight.float() for weight in weights]
        torch._foreach_lerp_(self._parts, weights, [share] * len(weights))

    def in_place(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Give the model the averages as its weights within the block, which may compute but not train."""
        return standing_in(model, [local(weight.detach()) for weight in self._weights], self._parts)

    def make_part(self) -> Part:
        """Make the part of a checkpoint: the averages by the names of their parameters."""

        def save() -> dict[str, Any]:
            named = zip(self._names.values(), self._averages, strict=True)
            weights = {name: average for names, average in named for name in names}
            return {"num_steps": self._num_steps, "weights": weights}

        def load(state: dict[str, Any]) -> None:
            self._num_steps.copy_(state["num_steps"])
            _copy(self._parts, [local(state["weights"][names[0]]) for names in self._names.values()])

        return Part(1, save, load, is_optional=True, begin=self._begin)

    @torch.no_grad()
    def _begin(self, num_steps: int) -> None:
        """Begin with the weights of a checkpoint after so many steps."""
        _copy(self._parts, [local(weight) for weight in self._weights])
        self._num_steps.fill_(min(num_steps, self._start_steps))


@contextlib.contextmanager
def standing_in(model: nn.Module, weights: list[torch.Tensor], values: list[torch.Tensor]) -> Iterator[None]:
    """Give this process's parts of a model's weights other values within the block."""
    # A copy of the weights, and no exchange of the two: their formats may differ, and nothing may be rounded.
    kept = [weight.clone() for weight in weights]
    _copy(weights, values)
    try:
        yield
    finally:
        _copy(weights, kept)
        # Units that stay whole after a forward pass hold the values; a step would take them for the weights.
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


@torch.no_grad()
def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for target, value in zip(into, values, strict=True):
        target.copy_(value)
