"""Preparation of a forward pass: rows are decoded, become a batch on the model's device, and the model's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.core.plugins import user_code
from kftrain.data.decoding import at_place
from kftrain.data.schema import Arrays
from kftrain.errors import DataError, UserCodeError

if TYPE_CHECKING:
    import torch

    from kftrain.tasks.base import Batch, TrainingTask


def decode_unaugmented(
    task: TrainingTask, arrays: Arrays, numbers: Sequence[int], place_of: Callable[[int], str]
) -> Arrays:
    """Decode rows as outside of training; without a `decode` of the task's own return them as they are.

    `numbers`: numbers of the rows; `place_of` names the row of a number in errors. Raises DataError and UserCodeError.
    """
    if not task.decodes:
        return arrays
    rows = []
    for row, number in enumerate(numbers):
        try:
            with user_code("task.decode"):
                rows.append(task.decode({name: array[row] for name, array in arrays.items()}, None))
        except (DataError, UserCodeError) as error:
            raise at_place(error, place_of(number)) from error
    with user_code("task.decode"):
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def prepare_batch(task: TrainingTask, arrays: Arrays, device: torch.device) -> tuple[Batch, tuple[Any, ...]]:
    """Make a batch of rows on the device, and the arguments of the model. Raises UserCodeError."""
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors_of(task, arrays).items()}
    return batch, arguments_of(task, batch)


def tensors_of(task: TrainingTask, arrays: Arrays) -> Batch:
    """Make a batch of rows on the CPU. Raises UserCodeError."""
    with user_code("task.batch"):
        return dict(task.batch(arrays))


def arguments_of(task: TrainingTask, batch: Batch) -> tuple[Any, ...]:
    """Return the model's arguments for a batch. Raises UserCodeError."""
    with user_code("task.inputs"):
        inputs = task.inputs(batch)
    if not isinstance(inputs, tuple | list):  # a tensor would be taken apart, row by row
        raise UserCodeError(
            f"must return a tuple, got {type(inputs).__name__}", where="task.inputs", fix="return (tensor,)"
        )
    return tuple(inputs)


def require_sequence_dims(task: TrainingTask, batch: Batch) -> None:
    """Raise UserCodeError if the task's sequence dims are not in its batches, or differ in length."""
    dims = task.sequence_dims
    wrong = [name for name, dim in dims.items() if name not in batch or not 0 < dim < batch[name].dim()]
    if wrong or len({batch[name].shape[dim] for name, dim in dims.items()}) > 1:
        shapes = {name: list(tensor.shape) for name, tensor in batch.items()}
        raise UserCodeError("does not fit the batch", where="task.sequence_dims", value=f"{dict(dims)} for {shapes}")
