"""Running a model over rows outside of training: on its own device, without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kftrain.data.schema import Arrays
from kftrain.models.modes import evaluating

if TYPE_CHECKING:
    import torch

    from kftrain.tasks.base import Batch, Task


def statistics_of_rows(task: Task, model: torch.nn.Module, rows: Arrays, batch_rows: int) -> dict[str, np.ndarray]:
    """`task.statistics` of all rows, `[rows]` each, `batch_rows` at a time in evaluation mode. At least one row."""
    parts = map_batches(task, model, rows, batch_rows, lambda batch: task.statistics(model, batch))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def map_batches(
    task: Task,
    model: torch.nn.Module,
    rows: Arrays,
    batch_rows: int,
    compute: Callable[[Batch], dict[str, torch.Tensor]],
) -> list[dict[str, np.ndarray]]:
    """What `compute` returns for each batch of `batch_rows` rows, as arrays."""
    import torch

    device = next(model.parameters()).device
    num_rows = len(next(iter(rows.values())))
    results = []
    with evaluating(model), torch.inference_mode():
        for start in range(0, num_rows, batch_rows):
            batch = task.batch({name: array[start : start + batch_rows] for name, array in rows.items()})
            tensors = compute({name: tensor.to(device) for name, tensor in batch.items()})
            results.append({name: tensor.cpu().numpy() for name, tensor in tensors.items()})
    return results
