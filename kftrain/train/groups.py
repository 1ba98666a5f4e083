"""Groups of parameters by the patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from kftrain.errors import ConfigError
from kftrain.train.settings import ParameterGroup

NUM_SHOWN = 3

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What wrappers put into the names of a model's parameters."""

OTHERS = ParameterGroup(pattern="*")
"""The group of what no pattern fits."""


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter once, in the model's order, with all its names: a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        names.setdefault(parameter, []).append(name)
    return names


def assigned(model: nn.Module, groups: Sequence[ParameterGroup]) -> dict[nn.Parameter, ParameterGroup]:
    """The group of each parameter: the first of which the pattern fits any of its names, or `OTHERS`.

    Raises ConfigError for a pattern that fits no name.
    """
    names = names_of(model)
    every = [name for several in names.values() for name in several]
    for number, group in enumerate(groups):
        if not any(fnmatchcase(name, group.pattern) for name in every):
            near = difflib.get_close_matches(group.pattern, every, n=NUM_SHOWN, cutoff=0.0)
            raise ConfigError(
                "the pattern fits no parameter of the model",
                where=f"optimizer.groups.{number}.pattern",
                value=group.pattern,
                fix=f"names are like {', '.join(near)}",
            )
    return {parameter: _first(several, groups) for parameter, several in names.items()}


def _first(names: Sequence[str], groups: Sequence[ParameterGroup]) -> ParameterGroup:
    fitting = (group for group in groups if any(fnmatchcase(name, group.pattern) for name in names))
    return next(fitting, OTHERS)


def freeze(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Before the model is distributed: what the configuration freezes has no gradient from now on.

    Raises ConfigError where nothing is left to train, and for a pattern that fits no name.
    """
    for parameter, group in assigned(model, groups).items():
        if group.frozen:
            parameter.requires_grad_(False)
    if any(group.frozen for group in groups) and not any(each.requires_grad for each in model.parameters()):
        raise ConfigError("all parameters are frozen: nothing is trained", where="optimizer.groups")
