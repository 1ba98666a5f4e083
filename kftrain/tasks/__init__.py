"""Tasks: what is learned, apart from how it is distributed. Importing it does not import torch."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.tasks.base import Task as Task
    from kftrain.tasks.classification import Classification as Classification
    from kftrain.tasks.registry import build_task as build_task
    from kftrain.tasks.registry import build_task_of as build_task_of
    from kftrain.tasks.regression import Regression as Regression

__getattr__ = attributes(
    __name__,
    {
        "kftrain.tasks.classification": ("Classification",),
        "kftrain.tasks.regression": ("Regression",),
        "kftrain.tasks.base": ("Task",),
        "kftrain.tasks.registry": ("build_task", "build_task_of"),
    },
)
