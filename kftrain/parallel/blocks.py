"""Chooses the modules of a model that are sharded, and may be recomputed, as units of their own.

A unit is gathered when its forward begins. All processes must gather the same ones in the same order: where one of them
calls another module, each would compute with half of what the other asked for. So a unit is what the model's `blocks()`
names, or the elements of a list which a probe has seen called once per forward on every process, and a log of calls
watches that it stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from kftrain.errors import ConfigError, UserCodeError

ROOT = ""
"""Name of the model itself among the calls."""

Calls = list[str]
"""Names of the modules whose forward has begun, in order; calls of the model itself are among them."""


@dataclass(frozen=True)
class Candidates:
    """Modules that may become the blocks of a model, by name."""

    declared: bool
    """True where the model names them itself: there is one list then."""
    lists: list[list[str]]
    """Lists of names of modules, the best one first."""

    @property
    def names(self) -> list[str]:
        """Names of all candidates, each once."""
        return list(dict.fromkeys(name for names in self.lists for name in names))

    @property
    def declared_names(self) -> list[str]:
        """Names of the blocks that the model names itself; empty where it names none."""
        return self.lists[0] if self.declared else []


def find_candidates(model: nn.Module) -> Candidates:
    """Return what the model's `blocks()` names; else its lists of modules, outer before inner ones, then long ones.

    Raises ConfigError where `blocks()` names what cannot be sharded by itself.
    """
    declared: Any = getattr(model, "blocks", None)
    if callable(declared) and not isinstance(declared, nn.Module):
        return Candidates(True, [_name_declared(model, list(declared()))])
    lists = [
        ((name != "blocks", name.count(".")), [f"{name}.{key}" for key, _ in module.named_children()])
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) or (name == "blocks" and isinstance(module, nn.Sequential))
    ]
    # Elements of an outer list contain the inner lists: the larger units need fewer exchanges.
    ordered = sorted(lists, key=lambda pair: (pair[0], -len(pair[1])))
    return Candidates(False, [names for _, names in ordered if names and not _find_obstacle(model, names)])


def choose_blocks(candidates: Candidates, seen: Sequence[Calls]) -> list[str]:
    """Return the names of the blocks, in the order in which they are called. `seen`: each process's calls in a probe.

    Raises ConfigError where a model names blocks that the processes do not all call in the same way.
    """
    if candidates.declared:
        _require_called(candidates.lists[0], seen)
        return candidates.lists[0]
    # Where none will do, the whole model is one unit: that is right in any case, and takes the most memory.
    return next((names for names in candidates.lists if _are_called_once(names, seen)), [])


class CallLog:
    """A log of the calls of a model's modules."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._calls: Calls = []
        modules = {ROOT: model, **{name: model.get_submodule(name) for name in names}}
        self._handles = [
            module.register_forward_pre_hook(lambda _module, _inputs, name=name: self._calls.append(name))
            for name, module in modules.items()
        ]

    def take(self) -> Calls:
        """Return the calls since the last `take`, and forget them."""
        calls, self._calls[:] = list(self._calls), []
        return calls

    def close(self) -> None:
        """End the log: the modules lose its hooks."""
        for handle in self._handles:
            handle.remove()


def require_same_calls(expected: Calls, calls: Calls) -> None:
    """Raises UserCodeError where a loss has called other blocks than in the probe, or in another order."""
    if calls == expected:
        return
    odd = next((name for name in expected if calls.count(name) != expected.count(name)), "the model")
    raise UserCodeError(
        "the blocks are not called as they were at first: the processes would wait for each other",
        where="model.forward",
        value=f"{odd}: {calls.count(odd)} times, not {expected.count(odd)}",
        fix="call each block in each forward, or leave those out of blocks() that depend on the data",
    )


def _name_declared(model: nn.Module, modules: list[Any]) -> list[str]:
    """Return the names of the modules that `blocks()` has given. Raises ConfigError for what cannot be sharded."""
    name_of = {id(module): name for name, module in model.named_modules()}
    strange = next((module for module in modules if id(module) not in name_of or module is model), None)
    if strange is not None:
        raise ConfigError("names what is no part of the model", where="model.blocks", value=type(strange).__name__)
    names = list(dict.fromkeys(name_of[id(module)] for module in modules))
    problem = _find_obstacle(model, names)
    if problem:
        raise ConfigError(problem, where="model.blocks", value=names, fix="leave one of them out of blocks()")
    return names


def _find_obstacle(model: nn.Module, names: list[str]) -> str:
    """Say why these modules cannot be sharded one by one; empty where they can."""
    # FSDP keeps a parameter in one unit: one that two have would be freed by the first while the second computes with
    # it. What no unit has belongs to the root.
    owner: dict[int, str] = {}
    modules = {name: model.get_submodule(name) for name in names}
    for name, module in modules.items():
        for part in module.modules():
            other = owner.setdefault(id(part), name)
            if other != name:
                return f"{name} and {other} have a module in common"
    for module_name, module in model.named_modules(remove_duplicate=False):
        home = owner.get(id(module), ROOT)
        for key, parameter in module.named_parameters(recurse=False):
            other = owner.setdefault(id(parameter), home)
            if other != home:
                one, two = (name or "the rest of the model" for name in (home, other))
                return f"{one} and {two} have the parameter {module_name}.{key} in common"
    return ""


def _are_called_once(names: list[str], seen: Sequence[Calls]) -> bool:
    """Tell whether each call of the model is followed by one of each, in the order of the first process."""
    # In a fixed order, too: gathering is collective, and two processes that call blocks in turns would wait for ever.
    order = [name for name in seen[0] if name in names][: len(names)]
    if sorted(order) != sorted(names):
        return False
    return all(
        [name for name in calls if name in names or name == ROOT] == [ROOT, *order] * calls.count(ROOT)
        for calls in seen
    )


def _require_called(names: list[str], seen: Sequence[Calls]) -> None:
    # One process alone may skip a block (an expert without samples); where several gather, no one may.
    never = next((name for name in names if any(name not in calls for calls in seen)), None)
    if never is not None and (len(seen) > 1 or all(name not in seen[0] for name in names)):
        raise ConfigError(
            "names a module whose forward is not called in each forward of the model",
            where="model.blocks",
            value=never,
            fix="leave it out of blocks(), or call the module itself rather than a method of it",
        )
    relevant = [[name for name in calls if name in names or name == ROOT] for calls in seen]
    if any(calls != relevant[0] for calls in relevant):
        raise ConfigError(
            "the processes do not call the same blocks in the same order",
            where="model.blocks",
            fix="leave those out of blocks() whose calls depend on the data",
        )
