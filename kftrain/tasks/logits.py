"""The task's view of logits of which each of several processes holds a part of the classes.

A task whose `loss`, `statistics` and `tallies` all carry the mark `reads_parts` is given what the model's matrices have
left on this process, where they are split over the classes; any other task is given whole logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from kftrain.tasks.base import Task

MARK = "_reads_parts"

Method = TypeVar("Method", bound=Callable[..., Any])


class LogitsInParts(Protocol):
    """Questions of a task to split logits `[..., classes]`; all processes ask the same, in the same order."""

    def cross_entropy(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy in nats, fp32, of each of `targets` `[...]`."""

    def argmax(self) -> torch.Tensor:
        """Return the classes of the largest logits, `[...]`."""


def reads_parts(method: Method) -> Method:
    """Mark a method that accepts `LogitsInParts`."""
    setattr(method, MARK, True)
    return method


def task_reads_parts(task: Task) -> bool:
    """Return True if no method of a task needs whole logits; an overridden one does, unless it is marked again."""
    from kftrain.tasks.base import Task as Base

    methods = [getattr(type(task), name) for name in ("loss", "statistics", "tallies")]
    return all(getattr(method, MARK, False) or method is Base.tallies for method in methods)
