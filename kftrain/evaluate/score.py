"""Scoring: per-sample statistics of a model, each sample exactly once, whatever the number of processes.

Batches are cut from the stored order of the data: batch b holds samples [b x size, (b + 1) x size). Data rank r of n
takes batches r, r + n, …, so a batch has the same rows on one process as on many, and floating-point results are equal
bit by bit. Every process runs the same number of forward passes, because a sharded model gathers its parameters in
each; a process that has run out of batches repeats its last one and throws the result away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from kftrain import bootstrap
from kftrain.data.expanded import ValidationRows
from kftrain.data.schema import CLUSTER, Arrays
from kftrain.errors import EvaluationError, UserCodeError
from kftrain.models.modes import evaluating
from kftrain.models.output import output_of
from kftrain.parallel.mesh import Mesh
from kftrain.plugins import user_code
from kftrain.tasks.base import Task
from kftrain.tasks.prepare import decoded, prepare
from kftrain.tasks.user_metrics import MetricsOfSums

Statistics = dict[str, np.ndarray]


@dataclass(frozen=True)
class Scores:
    """What was measured, sample by sample in stored order."""

    statistics: Statistics
    """`[samples]` float64 each."""
    groups: np.ndarray
    """Number of the group (block) that each sample belongs to, int64 `[samples]`."""
    clusters: np.ndarray | None
    """Number that stands for the cluster of each sample; None where the data names none: each group is by itself."""
    tallies: Statistics = field(default_factory=dict)
    """The task's whole numbers, summed over all samples."""

    def units(self, num_groups: int) -> np.ndarray:
        """Number of the unit, from 0 in stored order, that each group belongs to: what the bootstrap resamples."""
        if self.clusters is None:
            return np.arange(num_groups)
        _, first_samples = np.unique(self.groups, return_index=True)
        return bootstrap.by_appearance(self.clusters[first_samples])


def score(
    model: nn.Module,
    task: Task,
    dataset: ValidationRows,
    mesh: Mesh,
    batch_size: int,
    max_samples: int = 0,
    on_batch: Callable[[], None] = lambda: None,
    with_tallies: bool = False,
) -> Scores:
    """Statistics of the first `max_samples` samples (0: all); `with_tallies`: also what the task counts.

    Collective. Every process gets the same arrays, and calls `on_batch` after each of its batches. Raises
    EvaluationError where a sample is not counted once.
    """
    num_samples = min(dataset.num_samples, max_samples or dataset.num_samples)
    num_batches = -(-num_samples // batch_size)
    parts: dict[int, Scores] = {}
    counted: Statistics = {}
    with evaluating(model), torch.no_grad():
        for round_ in range(-(-num_batches // mesh.num_data_ranks)):
            place = round_ * mesh.num_data_ranks + mesh.data_rank
            index = min(place, num_batches - 1)
            start, stop = index * batch_size, min((index + 1) * batch_size, num_samples)
            arrays, groups = dataset.read_range(start, stop)
            statistics = statistics_of(
                model,
                task,
                decoded(task, arrays, range(start, stop), dataset.place_of),
                mesh.world.device,
                counted if with_tallies and place == index and mesh.counts_loss else None,
            )
            parts[index] = Scores(statistics, groups, arrays[CLUSTER] if task.names_clusters else None)
            on_batch()
    merged = _merge(mesh.world.gather(parts), num_samples)
    if not with_tallies:
        return merged
    tallies: Statistics = {}
    for each in mesh.world.gather(counted):
        _add(tallies, each)
    return replace(merged, tallies=tallies)


def group_sums(statistics: Statistics, groups: np.ndarray, num_groups: int) -> Statistics:
    """Sums of per-sample statistics over groups, each `[groups]` float64."""
    return {name: np.bincount(groups, weights=values, minlength=num_groups) for name, values in statistics.items()}


def total_metrics(metrics_of_sums: MetricsOfSums, statistics: Statistics) -> dict[str, float]:
    """The metrics over all samples."""
    metrics = metrics_of_sums({name: np.asarray(values.sum()) for name, values in statistics.items()})
    for name, value in metrics.items():
        if value.shape:
            raise UserCodeError(
                f"must return a scalar for scalar sums, got {list(value.shape)}", where=f"task.metrics {name}"
            )
    return {name: float(value) for name, value in metrics.items()}


def statistics_of(
    model: nn.Module, task: Task, arrays: Arrays, device: torch.device, tallies: Statistics | None = None
) -> Statistics:
    """The statistics of some rows, `[rows]` float64 each. What the task counts is added to `tallies`, if given.

    Raises UserCodeError for other shapes and types.
    """
    batch, inputs = prepare(task, arrays, device)
    with user_code("model.forward"):
        output = output_of(model, inputs)
    with user_code("task.statistics"):
        found = {name: value.double().cpu().numpy() for name, value in task.statistics(output, batch).items()}
    if tallies is not None:
        with user_code("task.tallies"):
            _add(tallies, {name: _whole(name, value) for name, value in task.tallies(output, batch).items()})
    num_rows = len(next(iter(arrays.values())))
    for name, values in found.items():
        if values.shape != (num_rows,):
            raise UserCodeError(
                f"must return one number for each of {num_rows} rows, got {list(values.shape)}",
                where=f"task.statistics {name}",
            )
    return found


def _whole(name: str, value: torch.Tensor) -> np.ndarray:
    if value.dtype is not torch.int64:
        raise UserCodeError(f"must be int64, got {value.dtype}", where=f"task.tallies {name}")
    return value.cpu().numpy()


def _add(tallies: Statistics, more: Statistics) -> None:
    """Adds up, name by name: whole numbers, so the order does not matter."""
    for name, values in more.items():
        if name in tallies and tallies[name].shape != values.shape:
            raise UserCodeError(
                "must have one shape in all batches", where=f"task.tallies {name}", value=list(values.shape)
            )
        tallies[name] = tallies[name] + values if name in tallies else values


def _merge(gathered: list[dict[int, Scores]], num_samples: int) -> Scores:
    """All batches in the order of the data. A repeated batch appears under the same index, hence once."""
    batches = {index: part for parts in gathered for index, part in parts.items()}
    ordered = [batches[index] for index in sorted(batches)]
    names = ordered[0].statistics.keys()
    statistics = {name: np.concatenate([part.statistics[name] for part in ordered]) for name in names}
    groups = np.concatenate([part.groups for part in ordered])
    if len(groups) != num_samples or any(len(values) != num_samples for values in statistics.values()):
        raise EvaluationError(
            f"{num_samples} samples must be counted once each", value=len(groups), fix="check task.statistics"
        )
    clusters = [part.clusters for part in ordered if part.clusters is not None]
    return Scores(statistics, groups, np.concatenate(clusters) if clusters else None)
