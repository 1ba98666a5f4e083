"""What is learned, apart from how it is distributed. Importing it does not import torch."""

from kftrain.tasks.base import Task
from kftrain.tasks.registry import build_task

__all__ = ["Task", "build_task"]
