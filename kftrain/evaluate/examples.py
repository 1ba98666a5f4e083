"""Sample predictions: which groups a report shows, and what the task says of each.

Which ones follows from the groups' sums and places alone, so they are the same for any number of processes; the few
forward passes are one process's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from kftrain.core.plugins import user_code
from kftrain.data.expanded import ValidationRows
from kftrain.errors import UserCodeError
from kftrain.evaluate.score import Statistics
from kftrain.models.modes import evaluating
from kftrain.run.documents import Example
from kftrain.tasks.base import TrainingTask
from kftrain.tasks.prepare import decode_unaugmented
from kftrain.tasks.shown import format_example
from kftrain.tasks.user_metrics import MetricsOfSums

Shown = Mapping[str, Any]


def losses(task: TrainingTask, metrics: MetricsOfSums, sums: Statistics, metric: str, goal: str) -> np.ndarray:
    """Return one number per group, larger if the group is worse, `[groups]`: the task's loss, else the gate's metric.

    It is NaN for a group that does not determine the metric, and for all groups where there is no such metric.
    """
    values = metrics_of_groups(metrics, sums).get(task.loss_metric or metric)
    if values is None:
        return np.full(len(next(iter(sums.values()))), np.nan)
    return values if task.loss_metric or goal == "minimize" else -values


def choose_groups(worst_first: np.ndarray, num_examples: int) -> list[tuple[int, bool]]:
    """Choose groups to show, each with whether it is one of the worst: first those spread over the data, in order.

    `worst_first`: the loss of each group, `[groups]`. Of equal losses the first in the data leads; groups whose loss
    is not finite are never among the worst.
    """
    num_groups = len(worst_first)
    num_spread = min(num_examples, num_groups)
    spread = [(number * num_groups // num_spread, False) for number in range(num_spread)]
    finite = np.flatnonzero(np.isfinite(worst_first))
    worst = finite[np.argsort(-worst_first[finite], kind="stable")[:num_examples]]
    return [*spread, *((group, True) for group in worst.tolist())]


def collect(
    task: TrainingTask,
    metrics_of_sums: MetricsOfSums,
    model: nn.Module,
    dataset: ValidationRows,
    sums: Statistics,
    num_rows: np.ndarray,
    keys: Sequence[str],
    chosen: Sequence[tuple[int, bool]],
    batch_size: int,
    device: torch.device,
) -> list[Example]:
    """Return the chosen groups with their metrics and the task's examples of their first rows. Runs on one process."""
    groups = sorted({group for group, _ in chosen})
    rows = rows_of_groups(groups, num_rows)
    shown = dict(zip(groups, show_examples(task, model, dataset, rows, batch_size, device), strict=True))
    metrics = metrics_of_groups(metrics_of_sums, sums)
    return [
        Example(
            key=keys[group],
            is_worst=is_worst,
            metrics={name: float(values[group]) for name, values in metrics.items() if np.isfinite(values[group])},
            **format_example(shown[group], "task.examples"),
        )
        for group, is_worst in chosen
    ]


def rows_of_groups(groups: Sequence[int], num_rows: np.ndarray) -> list[int]:
    """Return the number of the first row of each of these groups; `num_rows`: rows of every group, `[all groups]`."""
    first_rows = np.cumsum(num_rows) - num_rows
    return [int(first_rows[group]) for group in groups]


def metrics_of_groups(metrics: MetricsOfSums, sums: Statistics) -> dict[str, np.ndarray]:
    """Compute every metric for each group alone, `[groups]` each; not finite where a group does not determine it."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return {name: np.asarray(values, np.float64) for name, values in metrics(sums).items()}


def show_examples(
    task: TrainingTask,
    model: nn.Module,
    dataset: ValidationRows,
    rows: list[int],
    batch_size: int,
    device: torch.device,
) -> list[Shown]:
    """Return the task's examples of these rows. All processes that share a model call this together."""
    shown: list[Shown] = []
    for start in range(0, len(rows), batch_size):
        numbers = rows[start : start + batch_size]
        arrays = decode_unaugmented(task, dataset.read(np.array(numbers)), numbers, dataset.place_of)
        with evaluating(model), torch.no_grad(), user_code("task.examples"):
            batch = {name: tensor.to(device) for name, tensor in task.batch(arrays).items()}
            shown += task.examples(model, arrays, batch)
    if len(shown) != len(rows) or not all(isinstance(example, Mapping) for example in shown):
        raise UserCodeError(f"must return a mapping for each of {len(rows)} rows", where="task.examples")
    return shown
