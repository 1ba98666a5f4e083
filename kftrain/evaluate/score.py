"""Scoring: per-sample statistics of a model, each sample exactly once, whatever the number of processes.

Batches are cut from the stored order of the data: batch b holds samples [b x size, (b + 1) x size). Process r takes
batches r, r + n, …, so a batch has the same rows on one process as on many, and floating-point results are equal bit by
bit. Every process runs the same number of forward passes, because a sharded model gathers its parameters in each; a
process that has run out of batches repeats its last one and throws the result away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from kftrain.data.dataset import ShardedDataset
from kftrain.errors import EvaluationError
from kftrain.parallel.world import World
from kftrain.plugins import user_code
from kftrain.tasks.base import Task

Statistics = dict[str, np.ndarray]


def score(
    model: nn.Module,
    task: Task,
    dataset: ShardedDataset,
    world: World,
    batch_size: int,
    max_samples: int = 0,
    on_batch: Callable[[], None] = lambda: None,
) -> tuple[Statistics, np.ndarray]:
    """Statistics of the first `max_samples` samples (0: all), `[samples]` float64 each, and their group ids.

    Collective. Every process gets the same arrays, and calls `on_batch` after each of its batches. Raises
    EvaluationError where a sample is not counted once.
    """
    num_samples = min(dataset.num_samples, max_samples or dataset.num_samples)
    num_batches = -(-num_samples // batch_size)
    parts: dict[int, tuple[Statistics, np.ndarray]] = {}
    with _evaluating(model):
        for round_ in range(-(-num_batches // world.size)):
            index = min(round_ * world.size + world.rank, num_batches - 1)
            start, stop = index * batch_size, min((index + 1) * batch_size, num_samples)
            arrays, groups = dataset.read_range(start, stop)
            parts[index] = _batch_statistics(model, task, arrays, world.device), groups
            on_batch()
    return _merge(world.gather(parts), num_samples)


def group_sums(statistics: Statistics, groups: np.ndarray, num_groups: int) -> Statistics:
    """Sums of per-sample statistics over groups, each `[groups]` float64."""
    return {name: np.bincount(groups, weights=values, minlength=num_groups) for name, values in statistics.items()}


def total_metrics(task: Task, statistics: Statistics) -> dict[str, float]:
    """The metrics over all samples."""
    sums = {name: np.asarray(values.sum()) for name, values in statistics.items()}
    with user_code("task.metrics"):
        return {name: float(value) for name, value in task.metrics(sums).items()}


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode before is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _batch_statistics(model: nn.Module, task: Task, arrays: dict[str, np.ndarray], device: torch.device) -> Statistics:
    with user_code("task.statistics"):
        batch = {name: tensor.to(device) for name, tensor in task.batch(arrays).items()}
        return {name: value.double().cpu().numpy() for name, value in task.statistics(model, batch).items()}


def _merge(gathered: list[dict[int, tuple[Statistics, np.ndarray]]], num_samples: int) -> tuple[Statistics, np.ndarray]:
    """All batches in the order of the data. A repeated batch appears under the same index, hence once."""
    batches: dict[int, Any] = {index: part for parts in gathered for index, part in parts.items()}
    ordered = [batches[index] for index in sorted(batches)]
    names = ordered[0][0].keys()
    statistics = {name: np.concatenate([part[name] for part, _ in ordered]) for name in names}
    groups = np.concatenate([group for _, group in ordered])
    if len(groups) != num_samples or any(len(values) != num_samples for values in statistics.values()):
        raise EvaluationError(
            f"{num_samples} samples must be counted once each", value=len(groups), fix="check task.statistics"
        )
    return statistics, groups
