"""Running a model over rows outside of training: on its own device, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kftrain.data.schema import Arrays

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
    device = next(model.parameters()).device
    num_rows = len(next(iter(rows.values())))
    results = []
    with _evaluating(model):
        for start in range(0, num_rows, batch_rows):
            batch = task.batch({name: array[start : start + batch_rows] for name, array in rows.items()})
            tensors = compute({name: tensor.to(device) for name, tensor in batch.items()})
            results.append({name: tensor.cpu().numpy() for name, tensor in tensors.items()})
    return results


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; the mode is put back afterwards."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
