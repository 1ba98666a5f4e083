"""What modules keep beside parameters and saved buffers: attributes, lists and dicts in them, buffers of no checkpoint.

A table that is computed once or the last output does no harm: what they become does not depend on what they were. That
of a count, an average or statistics of the first rows does: it begins anew on resume, and differs by process.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from kftrain.errors import ConfigError

DECLARATION = "unsaved_attributes"
"""Of a model that keeps such a state all the same: patterns of names, `layers.*.num_calls`."""

TOLERANCE = 1e-5
"""Relative: a GPU's kernels do not sum in the same order each time."""

Leaves = dict[tuple[str, str], Any]
"""Name of an attribute, and where it is in it -> tensor, number or text."""

_OF_TORCH = frozenset(vars(nn.Module()))
_CONTAINERS = ("_modules", "_non_persistent_buffers_set", "_forward_hooks")


@contextlib.contextmanager
def lend_attributes(model: nn.Module, tensors: Mapping[int, torch.Tensor] | None = None) -> Iterator[None]:
    """Within it modules work on copies of what they keep; after it they have what they had, and nothing more.

    What cannot be copied (a lock, torch's generator, an open file) stays the same. `tensors`: by the `id` of parameters
    and buffers, what stands in for them wherever they are.
    """
    shared: list[Any] = [*model.modules(), *model.parameters(), *model.buffers()]
    shared += [random.uniform.__self__, np.random.mtrand._rand]  # type: ignore[attr-defined]
    memo = {**{id(each): each for each in shared}, **(tensors or {})}
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        for attributes, own in before:
            attributes.update({key: copy.copy(own[key]) for key in _CONTAINERS})
            for kind in ("_parameters", "_buffers"):
                attributes[kind] = {key: memo.get(id(each), each) for key, each in own[kind].items()}
            attributes.update({key: _copy_of(own[key], memo) for key in own if key not in _OF_TORCH})
        yield
    finally:
        for attributes, own in before:
            attributes.clear()
            attributes.update(own)


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    num_copies = len(memo)
    try:
        return value if callable(value) else copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, NotImplementedError):
        while len(memo) > num_copies:  # what is half a copy is nobody else's
            memo.popitem()
        return value


def read_attributes(model: nn.Module) -> Leaves:
    """All of it, as it is now."""
    leaves: Leaves = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
        own |= {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
        for path, leaf in tree_leaves_with_path(own):
            leaves[f"{name}.{path[0].key}".lstrip("."), keystr(path[1:])] = _value_of(leaf)  # type: ignore[attr-defined]
    return leaves


def _value_of(leaf: Any) -> Any:
    """A copy of what may be state; None of anything else."""
    if isinstance(leaf, torch.Tensor):
        return None if isinstance(leaf, nn.Parameter) or leaf.is_meta else leaf.detach().clone()
    if isinstance(leaf, torch.Generator | np.ndarray):
        return leaf.get_state() if isinstance(leaf, torch.Generator) else leaf.tobytes()
    return copy.copy(leaf) if isinstance(leaf, int | float | complex | str | bytes | set | np.generic) else None


def first_difference(one: Leaves, other: Leaves) -> str | None:
    """The name of the first attribute that is not the same in both."""
    labels = dict.fromkeys([*one, *other])
    return next((name for name, at in labels if not _is_alike(one.get((name, at)), other.get((name, at)))), None)


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other or one != one)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (
        torch.allclose(one, other, TOLERANCE, TOLERANCE, True) if one.is_floating_point() else torch.equal(one, other)
    )


def require_no_state(model: nn.Module, once: Leaves, again: Leaves, losses: tuple[float, float]) -> None:
    """Raises ConfigError where what some rows leave (`once`), or their loss, is not the same after others (`again`)."""
    patterns = getattr(model, DECLARATION, ())
    once, again = (
        {label: value for label, value in each.items() if not any(fnmatchcase(label[0], p) for p in patterns)}
        for each in (once, again)
    )
    name = first_difference(once, again)
    if name is None and (patterns or abs(losses[0] - losses[1]) <= TOLERANCE * abs(losses[0])):
        return
    raise ConfigError(
        "the forward pass keeps a state that no checkpoint has: it begins anew on resume and differs by process",
        where=f"model {name}" if name else "model",
        fix=f"register it as a persistent buffer, or name it in the model's {DECLARATION} where that does no harm",
    )
