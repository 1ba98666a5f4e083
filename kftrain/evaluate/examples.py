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

from kftrain.data.expanded import ValidationRows
from kftrain.errors import UserCodeError
from kftrain.evaluate.score import Statistics
from kftrain.models.modes import evaluating
from kftrain.plugins import user_code
from kftrain.run.documents import Example
from kftrain.tasks.base import Task
from kftrain.tasks.prepare import decoded
from kftrain.tasks.shown import fields
from kftrain.tasks.user_metrics import MetricsOfSums

Shown = Mapping[str, Any]


def losses(task: Task, metrics: MetricsOfSums, sums: Statistics, metric: str, goal: str) -> np.ndarray:
    """Of each group what is the larger the worse, `[groups]`: the task's own loss, else the gate's metric.

    Not a number where that does not determine it, or where there is no such metric.
    """
    values = metrics_of_groups(metrics, sums).get(task.loss_metric or metric)
    if values is None:
        return np.full(len(next(iter(sums.values()))), np.nan)
    return values if task.loss_metric or goal == "minimize" else -values


def choose(worst_first: np.ndarray, num_examples: int) -> list[tuple[int, bool]]:
    """Groups to show, each with whether it is one of the worst: first those spread over the data, by their number.

    `worst_first`: the loss of each group; of equal ones the first in the data leads; one that is not finite is none.
    """
    num_groups = len(worst_first)
    num_spread = min(num_examples, num_groups)
    spread = [(number * num_groups // num_spread, False) for number in range(num_spread)]
    finite = np.flatnonzero(np.isfinite(worst_first))
    worst = finite[np.argsort(-worst_first[finite], kind="stable")[:num_examples]]
    return [*spread, *((group, True) for group in worst.tolist())]


def collect(
    task: Task,
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
    """The chosen groups with their metrics, and what the task shows of the first row of each. On one process."""
    groups = sorted({group for group, _ in chosen})
    rows = rows_of_groups(groups, num_rows)
    shown = dict(zip(groups, show(task, model, dataset, rows, batch_size, device), strict=True))
    metrics = metrics_of_groups(metrics_of_sums, sums)
    return [
        Example(
            key=keys[group],
            is_worst=is_worst,
            metrics={name: float(values[group]) for name, values in metrics.items() if np.isfinite(values[group])},
            **fields(shown[group], "task.examples"),
        )
        for group, is_worst in chosen
    ]


def rows_of_groups(groups: Sequence[int], num_rows: np.ndarray) -> list[int]:
    """The first row of each of these groups; `num_rows`: of all groups."""
    first_rows = np.cumsum(num_rows) - num_rows
    return [int(first_rows[group]) for group in groups]


def metrics_of_groups(metrics: MetricsOfSums, sums: Statistics) -> dict[str, np.ndarray]:
    """Each metric of each group alone, `[groups]`."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return {name: np.asarray(values, np.float64) for name, values in metrics(sums).items()}


def show(
    task: Task,
    model: nn.Module,
    dataset: ValidationRows,
    rows: list[int],
    batch_size: int,
    device: torch.device,
) -> list[Shown]:
    """What the task shows of each row. All processes that share a model call this together."""
    found: list[Shown] = []
    for start in range(0, len(rows), batch_size):
        numbers = rows[start : start + batch_size]
        arrays = decoded(task, dataset.read(np.array(numbers)), numbers, dataset.place_of)
        with evaluating(model), torch.no_grad(), user_code("task.examples"):
            batch = {name: tensor.to(device) for name, tensor in task.batch(arrays).items()}
            found += task.examples(model, arrays, batch)
    if len(found) != len(rows) or not all(isinstance(each, Mapping) for each in found):
        raise UserCodeError(f"must return a mapping for each of {len(rows)} rows", where="task.examples")
    return found
