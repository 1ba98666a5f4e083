"""Logits of which each of several processes has a part of the classes, as a task reads them.

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
    """What a task asks of logits `[..., classes]` that are split; all processes ask the same, in the same order."""

    def cross_entropy(self, targets: torch.Tensor) -> torch.Tensor:
        """In nats, fp32, of each of `targets` `[...]`."""

    def argmax(self) -> torch.Tensor:
        """The classes of the largest logits, `[...]`."""


def reads_parts(method: Method) -> Method:
    """Marks a method that knows what to do with `LogitsInParts`."""
    setattr(method, MARK, True)
    return method


def task_reads_parts(task: Task) -> bool:
    """Whether no method of a task needs whole logits; one that is overridden does, unless it is marked again."""
    from kftrain.tasks.base import Task as Base

    methods = [getattr(type(task), name) for name in ("loss", "statistics", "tallies")]
    return all(getattr(each, MARK, False) or each is Base.tallies for each in methods)
