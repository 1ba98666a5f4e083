"""Reads a model's plan of how to split it over the processes of the axis `tensor`: names of modules -> kinds of parts.

A model's method `tensor_plan()` maps patterns of modules' names to a kind; of two patterns that fit, the first counts:

    column      a linear layer whose outputs are split: each process has some rows of its matrix
    column/3    the same for three matrices that stand one below the other in one, such as query, key and value
    row         a linear layer whose inputs are split: what the processes make of their inputs is summed
    vocabulary  an embedding: each process has the vectors of some of the tokens; where the model calls it with
                activations, as its output layer, it gives what `logits` gives
    logits      a linear layer whose outputs the model returns as they are: each process has those of some classes
    gather      a module whose linear layers are given the same input: it is gathered once for all of them
    sequence    a module that computes on each place of a sequence alone, such as a norm
    random      a dropout between such modules: it drops what one process with the whole sequence would drop
    split       a module before which all processes have the whole sequence: it is given this process's part of it
    whole       a module before which each process has a part of the sequence: it is given all of it, gathered, and from
                here on all processes compute alike

The last process may have fewer tokens or classes than the others; all else has equal parts. A module that no pattern
fits is on each process as it is on one. `sequence`, `random`, `split` and `whole` do nothing without sequence
parallelism. A model may have `tensor_sizes()`, too: the sizes that the number of processes must divide, by the names of
the model's options that set them; `sequence_length` among them counts with sequence parallelism only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from kftrain.errors import ConfigError
from kftrain.parallel.shape import require_equal_parts, require_equal_sizes, require_parts

METHOD = "tensor_plan"
SIZES = "tensor_sizes"
KINDS = ("column", "row", "vocabulary", "logits", "gather", "sequence", "random", "split", "whole")

_KIND = re.compile(rf"({'|'.join(KINDS)})|column/([2-9])")
_TYPES: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "logits": (nn.Linear,),
    "vocabulary": (nn.Embedding,),
    "random": (nn.Dropout,),
}
"""Kind -> types of modules that it is for."""


@dataclass(frozen=True)
class SplitModule:
    """The part that a process has of a module, or the exchange that stands before it."""

    kind: str
    num_matrices: int = 1
    """Number of matrices that stand one below the other in a `column`."""


def read_plan(model: nn.Module, num_processes: int, sequence_parallel: bool) -> dict[str, SplitModule]:
    """Map the name of each module that the model's plan names to how it is split.

    `sequence_parallel` decides only whether the sequence length must divide. Raises ConfigError where the model has no
    plan, or the plan does not fit it.
    """
    method: Any = getattr(model, METHOD, None)
    if not callable(method):
        raise ConfigError(
            f"{type(model).__name__} has no plan of how to split its matrices",
            where="parallel.tensor",
            value=num_processes,
            fix=f"give the model a method {METHOD}(), or set it to 1",
        )
    # Sizes first: they have the names of options, which a user can change; a matrix that does not fit has only its own.
    sizes: Any = getattr(model, SIZES, None)
    require_equal_sizes(sizes() if callable(sizes) else {}, num_processes, sequence_parallel)
    patterns: Any = method()
    if not isinstance(patterns, Mapping) or not patterns:
        raise _error("is no plan", type(patterns).__name__, "return patterns of modules' names -> kinds")
    names = [name for name, _ in model.named_modules() if name]
    kinds = {pattern: _parse_kind(pattern, kind) for pattern, kind in patterns.items()}
    for pattern in kinds:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise _error("names no module of the model", pattern, "see model.named_modules()")
    # Modules without a part stay out of the plan: they are on each process as they are on one.
    chosen = {name: next((kind for p, kind in kinds.items() if fnmatchcase(name, p)), None) for name in names}
    plan = {name: part for name, part in chosen.items() if part is not None}
    for name, part in plan.items():
        _require_fit(name, model.get_submodule(name), part, num_processes)
    return plan


def is_gathered(name: str, plan: Mapping[str, SplitModule]) -> bool:
    """Tell whether a module above this one gathers its input."""
    return any(part.kind == "gather" and name.startswith(f"{other}.") for other, part in plan.items())


def find_split_dim(part: SplitModule | None, key: str) -> int | None:
    """Return the dim along which a parameter of a module is split; None where each process has a copy."""
    # torch keeps a linear layer's weight as [outputs, inputs]: a column splits its outputs, dim 0, and the bias with
    # them; a row its inputs, dim 1, and its bias is added to the sum, so each process has all of it.
    if part is None or part.kind not in ("column", "row", "vocabulary", "logits"):
        return None
    if part.kind == "row":
        return 1 if key == "weight" else None
    return 0


def _parse_kind(pattern: str, kind: Any) -> SplitModule:
    fitting = _KIND.fullmatch(kind) if isinstance(kind, str) else None
    if fitting is None:
        raise _error("knows no such kind", f"{pattern}: {kind}", f"use one of {', '.join(KINDS)}, column/3")
    return SplitModule("column", int(fitting[2])) if fitting[2] else SplitModule(kind)


def _require_fit(name: str, module: nn.Module, part: SplitModule, num_processes: int) -> None:
    """Raises ConfigError where a module is of a type, or of a size, that cannot be split so."""
    types = _TYPES.get(part.kind)
    if types is not None and not isinstance(module, types):
        needed = types[0].__name__
        raise _error(f"{part.kind} is for nn.{needed}", f"{name}: {type(module).__name__}", f"name the nn.{needed}")
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse or module.scale_grad_by_freq):
        raise _error("an embedding with max_norm, sparse or scale_grad_by_freq cannot be split", name, "leave them out")
    # One whose weight another stage has is not called here.
    if isinstance(module, nn.Linear | nn.Embedding) and part.kind in _TYPES and module.weight is not None:
        dim = 1 if part.kind == "row" else 0
        height, rest = divmod(module.weight.shape[dim], part.num_matrices)
        if rest:
            raise _error(f"has no {part.num_matrices} matrices of equal size", name, "name it column")
        if part.kind in ("vocabulary", "logits"):
            require_parts(f"{name}.weight", height, num_processes)
        else:
            require_equal_parts(f"{name}.weight", height, num_processes)


def _error(what: str, value: Any, fix: str) -> ConfigError:
    return ConfigError(what, where=f"model.{METHOD}", value=value, fix=fix)
