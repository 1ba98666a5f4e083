"""What stands before a forward pass: rows decoded, as a batch on the model's device, and the model's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.data.schema import Arrays
from kftrain.errors import UserCodeError
from kftrain.plugins import user_code

if TYPE_CHECKING:
    import torch

    from kftrain.tasks.base import Batch, Task


def decoded(task: Task, arrays: Arrays, generators: Iterable[np.random.Generator | None] = repeat(None)) -> Arrays:
    """These rows as `task.decode` gives them, where it has one of its own. Raises UserCodeError."""
    if not task.decodes:
        return arrays
    num_rows = len(next(iter(arrays.values())))
    with user_code("task.decode"):
        rows = [
            task.decode({name: array[row] for name, array in arrays.items()}, generator)
            for row, generator in zip(range(num_rows), generators, strict=False)
        ]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def decoded_in_training(task: Task, seed: int, arrays: Arrays, positions: np.ndarray) -> Arrays:
    """The same for the samples at these positions of the training order, counted on through all epochs."""
    return decoded(task, arrays, (np.random.default_rng([seed, int(position)]) for position in positions))


def prepare(task: Task, arrays: Arrays, device: torch.device) -> tuple[Batch, tuple[Any, ...]]:
    """A batch of these rows on the device, and the arguments of the model. Raises UserCodeError."""
    with user_code("task.batch"):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in task.batch(arrays).items()}
    with user_code("task.inputs"):
        inputs = task.inputs(batch)
    if not isinstance(inputs, tuple | list):  # a tensor would be taken apart, row by row
        raise UserCodeError(
            f"must return a tuple, got {type(inputs).__name__}", where="task.inputs", fix="return (tensor,)"
        )
    return batch, tuple(inputs)


def require_sequence_dims(task: Task, batch: Batch) -> None:
    """Raises UserCodeError where the task names sequence dims that its batches do not have, or of different lengths."""
    dims = task.sequence_dims
    wrong = [name for name, dim in dims.items() if name not in batch or not 0 < dim < batch[name].dim()]
    if wrong or len({batch[name].shape[dim] for name, dim in dims.items()}) > 1:
        shapes = {name: list(tensor.shape) for name, tensor in batch.items()}
        raise UserCodeError("does not fit the batch", where="task.sequence_dims", value=f"{dict(dims)} for {shapes}")
