"""Parameters that a step has not used.

Gradients are reduced as one long vector per block, so that all processes must bring the same ones: where a process has
none (its samples have reached another expert), it brings zeros. A parameter that none of them has used has no gradient
at all, as on one process: the optimizer leaves it alone, rather than to decay it.

Before torch 2.13 FSDP2 cannot bring zeros. There a step whose processes have used different parameters is an error.

Whole parameters are there while a unit computes. What a forward changes of them would be lost, and memory that it gives
them is none that they are gathered into; so both are errors.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from kftrain.errors import ConfigError, UserCodeError
from kftrain.parallel.world import World


class UsedParameters:
    """Which parameters of a sharded model have had a gradient since the last step."""

    def __init__(self, model: nn.Module, world: World) -> None:
        assert isinstance(model, FSDPModule)
        self._brings_zeros = hasattr(model, "set_reduce_scatter_unused_params")
        if self._brings_zeros:
            model.set_reduce_scatter_unused_params(True)
        self._num_processes = world.size
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._places = {name: place for place, name in enumerate(self._parameters)}
        self._used = [0.0] * len(self._parameters)
        self._gathered: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}
        """Name -> a whole parameter, and its memory and version before the first forward."""
        self._watch_units(model)

    def take(self) -> list[float]:
        """1 for each parameter that this process has used since this was asked last, 0 for the others.

        Raises UserCodeError for one that a forward has changed.
        """
        changed = next((name for name, (each, before) in self._gathered.items() if _memory(each) != before), None)
        if changed is not None:
            raise UserCodeError(
                "a forward changes a parameter, of which it has a copy that is thrown away",
                where="model.forward",
                value=changed,
                fix="change it in the model's after_step, or compute with a changed value: weight.clamp(…)",
            )
        used = self._used
        self._used = [0.0] * len(self._used)
        return used

    def drop_unused(self, num_users: list[float]) -> None:
        """Takes their zeros from the parameters that no process has used: `num_users` is the sum of what all `take`.

        Raises ConfigError where only some processes have used one, and this torch cannot bring zeros for the others.
        """
        for (name, parameter), users in zip(self._parameters.items(), num_users, strict=True):
            if not users:
                parameter.grad = None
            elif users < self._num_processes and not self._brings_zeros:
                raise ConfigError(
                    "only some processes have used a parameter in this step",
                    where=f"model {name}",
                    value=f"torch {torch.__version__}",
                    fix="use torch 2.13 or newer, or one process",
                )

    def _watch_units(self, model: nn.Module) -> None:
        """Of each unit: its parameters are whole, and what autograd sees, from its first forward on."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for unit in [module for module in model.modules() if isinstance(module, FSDPModule)]:
            assert isinstance(unit, nn.Module)
            slots = [
                (module, key, names[id(parameter)])
                for module in _own_modules(unit)
                for key, parameter in module.named_parameters(recurse=False)
            ]
            self._watch(unit, slots)

    def _watch(self, unit: nn.Module, slots: list[tuple[nn.Module, str, str]]) -> None:
        def begin(_module: nn.Module, _inputs: object) -> None:
            handle.remove()
            whole = {name: getattr(module, key) for module, key, name in slots}
            for name, parameter in whole.items():
                self._gathered[name] = parameter, _memory(parameter)
                if name in self._places:
                    place = self._places[name]
                    parameter.register_post_accumulate_grad_hook(lambda _each, place=place: self._mark(place))

        handle = unit.register_forward_pre_hook(begin)

    def _mark(self, place: int) -> None:
        self._used[place] = 1.0


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """What is another one when `tensor.data` is set, or numbers are changed in place."""
    return tensor.untyped_storage()._cdata, tensor._version


def _own_modules(unit: nn.Module) -> list[nn.Module]:
    """The modules whose parameters a unit holds: all below it but those of units within."""
    own = [unit]
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            own += _own_modules(child)
    return own
