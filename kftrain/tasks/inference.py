"""Forward passes over rows outside of training: on the model's own device, without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.data.schema import Arrays
from kftrain.models.modes import evaluating
from kftrain.models.output import output_of
from kftrain.tasks.fields import rows_of
from kftrain.tasks.prepare import decode_unaugmented, prepare_batch

if TYPE_CHECKING:
    import pandas
    import torch

    from kftrain.tasks.base import Batch, Task


def answer(task: Task, model: torch.nn.Module, inputs: pandas.DataFrame) -> pandas.DataFrame:
    """Return `task.answer` for each row of a data frame. Raises DataError."""
    import pandas

    columns = map_rows(task, model, rows_of(task, inputs), lambda output, _: task.answer(output))
    return pandas.DataFrame({name: column[: len(inputs)] for name, column in columns.items()}, index=inputs.index)


def map_rows(
    task: Task, model: torch.nn.Module, rows: Arrays, compute: Callable[[Any, Batch], dict[str, torch.Tensor]]
) -> dict[str, np.ndarray]:
    """Apply `compute` to the model's output for all rows, at least one; return its columns, `[rows, ...]` each.

    The model is in evaluation mode and sees `task.predict_batch_rows` rows at a time.
    """
    import torch

    device, size = next(model.parameters()).device, task.predict_batch_rows
    num_rows = len(next(iter(rows.values())))
    parts: list[dict[str, np.ndarray]] = []
    with evaluating(model), torch.inference_mode():
        for start in range(0, num_rows, size):
            numbers = range(num_rows)[start : start + size]
            arrays = {name: array[start : start + size] for name, array in rows.items()}
            batch, arguments = prepare_batch(task, decode_unaugmented(task, arrays, numbers, "row {}".format), device)
            columns = compute(output_of(model, arguments), batch)
            parts.append({name: tensor.cpu().numpy() for name, tensor in columns.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
