"""Training and evaluation mode of modules: a module that its owner keeps in `eval()` stays in it.

`train()` on the root would thaw them: a frozen backbone would drop out again, and its batch norms would forget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    Modes = list[tuple[nn.Module, bool]]


def begin_training(model: nn.Module) -> list[str]:
    """Put a model that was just built into training mode; return the names of what stays in evaluation mode.

    These are the modules that are in it already, unless all of them are, as in a model that comes from a library
    ready to use. A `train` method of the model's own has its say.
    """
    kept = {name: module for name, module in model.named_modules() if model.training and not module.training}
    model.train()
    for module in kept.values():  # not by `eval()`, which would reach children that are in training mode
        module.training = False
    return [name for name in kept if name.rpartition(".")[0] not in kept]


def modes_of(model: nn.Module) -> Modes:
    """Return each module with its mode."""
    return [(module, module.training) for module in model.modules()]


def restore(modes: Modes) -> None:
    """Put the modes back, whatever has changed them."""
    for module, training in modes:
        if module.training != training:
            module.training = training


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep all modules in evaluation mode within the block, and restore each one's own mode after it."""
    before = modes_of(model)
    model.eval()
    try:
        yield
    finally:
        restore(before)
