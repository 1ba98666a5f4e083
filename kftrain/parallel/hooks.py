"""Hooks that a model has registered on its parameters: called once a step, with the whole gradient of all its samples.

That is what they are given on one process which takes all samples at a time, in every layout: where a parameter is
spread its gradient is gathered for them, and each process goes on with its part of what they return.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kftrain.core.plugins import user_code
from kftrain.errors import ConfigError
from kftrain.parallel.initialize import Places, set_hooks, stored_parameter
from kftrain.parallel.sharded import index_of, local, whole_of


class ParameterHooks:
    """The hooks of a model's parameters, taken from them before they are spread, and called by us once a step.

    What a parameter becomes has no hooks, so that torch does not call them with the gradients of parts.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._hooks = {name: set_hooks(stored_parameter(slots[0]), None, None) for name, slots in places.items()}
        self._kinds = {name: type(stored_parameter(slots[0])) for name, slots in places.items()}

    def require_whole(self) -> None:
        """Raises ConfigError for a parameter that is spread by now, and has what is for whole ones only."""
        for name, slots in self._places.items():
            odd = "a hook" if self._hooks[name][1] else "" if self._kinds[name] is nn.Parameter else self._kinds[name]
            if odd and isinstance(stored_parameter(slots[0]), DTensor):
                raise ConfigError(
                    "a type of its own, or a hook after accumulation, is for parameters that are not spread",
                    where=f"model {name}",
                    value=odd,
                    fix="use nn.Parameter with attributes, register_hook, parallel.strategy: ddp, or one process",
                )

    @torch.no_grad()
    def __call__(self) -> None:
        """Call the hooks with the gradients of a step. Collective where they are spread. Raises UserCodeError."""
        # All processes skip the same ones: by now a parameter has a gradient on all of them, or on none.
        for name, (of_gradient, of_parameter) in self._hooks.items():
            parameter = stored_parameter(self._places[name][0])
            if parameter.grad is None or not (of_gradient or of_parameter):
                continue
            with user_code(f"a hook of model {name}"):
                own = local(parameter.grad)
                whole = whole_of(own, parameter.grad)
                for hook in list((of_gradient or {}).values()):
                    answer = hook(whole)
                    whole = whole if answer is None else answer.reshape(whole.shape)
                own.copy_(whole[index_of(parameter.grad)])
                for hook in list((of_parameter or {}).values()):
                    hook(parameter)
