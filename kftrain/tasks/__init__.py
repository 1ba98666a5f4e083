"""Tasks: what is learned, apart from how it is distributed. Importing it does not import torch."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.tasks.base import Task
    from kftrain.tasks.classification import Classification
    from kftrain.tasks.registry import build_task, build_task_of
    from kftrain.tasks.regression import Regression

__all__ = [
    "Classification",
    "Regression",
    "Task",
    "build_task",
    "build_task_of",
]

__getattr__ = attributes(
    __name__,
    {
        "Classification": "kftrain.tasks.classification",
        "Regression": "kftrain.tasks.regression",
        "Task": "kftrain.tasks.base",
        "build_task": "kftrain.tasks.registry",
        "build_task_of": "kftrain.tasks.registry",
    },
)
