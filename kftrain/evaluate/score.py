"""Scoring: per-sample statistics of a model, each sample exactly once, whatever the number of processes.

Batches are cut from the stored order of the data: batch b holds samples [b x size, (b + 1) x size). Data rank r of n
takes batches r, r + n, …, so a batch has the same rows on one process as on many, and floating-point results are equal
bit by bit. Every process runs the same number of forward passes, because a sharded model gathers its parameters in
each; a process that has run out of batches repeats its last one and throws the result away.

While a batch is computed the next one is read and decoded in the background. What was measured stays on the device
until the last batch, and then goes to the first process alone, as one array.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from kftrain.core import threads
from kftrain.core.plugins import user_code
from kftrain.data.expanded import ValidationRows
from kftrain.data.schema import CLUSTER, Arrays
from kftrain.errors import EvaluationError, UserCodeError
from kftrain.models.modes import evaluating
from kftrain.models.output import without_auxiliary
from kftrain.parallel.chunked_logits import compute_within
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.world import World
from kftrain.statistics import bootstrap
from kftrain.tasks.base import TrainingTask
from kftrain.tasks.prepare import decode_unaugmented, prepare_batch
from kftrain.tasks.user_metrics import MetricsOfSums

if TYPE_CHECKING:
    from kftrain.tasks.base import Batch

Statistics = dict[str, np.ndarray]

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """The statistics of a model, sample by sample in stored order."""

    statistics: Statistics
    """Statistic -> its value for each sample, `[samples]` float64."""
    groups: np.ndarray
    """Number of the group (block) that each sample belongs to, int64 `[samples]`."""
    clusters: np.ndarray | None
    """Number of each sample's cluster, int64 `[samples]`; None where the data names none, so that a group is one."""
    tallies: Statistics = field(default_factory=dict)
    """The task's whole numbers, summed over all samples."""

    def units(self, num_groups: int) -> np.ndarray:
        """Return the number of each group's unit, which the bootstrap resamples as one, from 0 in stored order."""
        if self.clusters is None:
            return np.arange(num_groups)
        _, first_samples = np.unique(self.groups, return_index=True)
        return bootstrap.by_appearance(self.clusters[first_samples])


@dataclass(frozen=True)
class _Batches:
    """The batches of the samples, and the data rank that takes each of them."""

    num_samples: int
    size: int
    num_ranks: int

    @property
    def num_batches(self) -> int:
        return -(-self.num_samples // self.size)

    @property
    def num_rounds(self) -> int:
        """Number of forward passes, the same on each process."""
        return -(-self.num_batches // self.num_ranks)

    def of(self, rank: int) -> range:
        """Return the numbers of a data rank's batches; some ranks have one batch fewer than others."""
        return range(rank, self.num_batches, self.num_ranks)

    def rows(self, number: int) -> range:
        return range(number * self.size, min((number + 1) * self.size, self.num_samples))


@dataclass(frozen=True)
class _Batch:
    """A batch that was read and decoded."""

    arrays: Arrays
    clusters: torch.Tensor | None
    num_rows: int
    counts: bool
    """False for a batch that is computed again, only so that all processes make the same number of passes."""


class Relay(Protocol):
    """The way of a batch through a model of which each process has some stages."""

    def compute(self, finish: Callable[[Any], Any], *inputs: Any) -> Any:
        """Compute `finish` of the model's output on the process of the last stage; None on the others. Collective."""

    def share(self, measured: list[Tensors]) -> list[Tensors]:
        """Return on all processes what that one has measured. Collective."""


def score(
    model: nn.Module,
    task: TrainingTask,
    dataset: ValidationRows,
    mesh: Mesh,
    batch_size: int,
    max_samples: int = 0,
    on_batch: Callable[[], None] = lambda: None,
    with_tallies: bool = False,
    relay: Relay | None = None,
) -> Scores | None:
    """Score the first `max_samples` samples (0: all); `with_tallies` adds up the task's tallies, too.

    `relay`: computes in the model's place where it has stages on several processes; it gives no tallies.

    Collective: the first process gets the scores, the others None. Each process calls `on_batch` after each batch.
    Raises EvaluationError unless each sample counts once.
    """
    num_samples = min(dataset.num_samples, max_samples or dataset.num_samples)
    batches = _Batches(num_samples, batch_size, mesh.num_data_ranks)
    measured: list[Tensors] = []
    counted: Tensors = {}
    with evaluating(model), torch.no_grad():
        for batch in _read_ahead(task, dataset, batches, mesh.data_rank):
            tallies = counted if with_tallies and batch.counts and mesh.counts_loss else None
            prepared, inputs = prepare_batch(task, batch.arrays, mesh.world.device)
            if mesh.sequence_cut.size > 1:  # statistics are of the places that the model has computed here
                prepared = mesh.sequence_cut.cut_batch(prepared, task.sequence_dims)
            finish = functools.partial(
                _compute_statistics, task=task, batch=prepared, num_rows=batch.num_rows, tallies=tallies
            )
            with user_code("model.forward"):
                computed = relay.compute(finish, *inputs) if relay else compute_within(model, inputs, finish)
            if computed is None:
                on_batch()
                continue
            values: Tensors = computed
            if batch.clusters is not None:
                values[CLUSTER] = batch.clusters.view(torch.float64)  # its bits: it travels with the others
            if measured and values.keys() != measured[0].keys():
                raise UserCodeError("must have the same names in all batches", where="task.statistics")
            if batch.counts or not measured:
                # A process without a batch of its own still has names to gather, with no rows.
                measured.append(values if batch.counts else {name: rows[:0] for name, rows in values.items()})
            on_batch()
    measured = measured if relay is None else relay.share(measured)
    statistics = _gather_on_main(measured, batches, mesh)
    summed = _sum_on_main(counted, mesh.world) if with_tallies else {}
    if statistics is None:
        return None
    clusters = statistics.pop(CLUSTER, None)
    groups = dataset.group_of(np.arange(num_samples, dtype=np.int64))
    return Scores(statistics, groups, None if clusters is None else clusters.view(np.int64), summed)


def share_of(num_samples: int, batch_size: int, mesh: Mesh) -> str:
    """Say in words which samples this process scores."""
    batches = _Batches(num_samples, batch_size, mesh.num_data_ranks)
    own = sum(len(batches.rows(number)) for number in batches.of(mesh.data_rank))
    which = f"from batch {mesh.data_rank} on every {batches.num_ranks}. of {batches.num_batches}"
    return f"{own} of {num_samples} samples: {which} batches of {batch_size}"


def group_sums(statistics: Statistics, groups: np.ndarray, num_groups: int) -> Statistics:
    """Sum per-sample statistics over groups, each `[groups]` float64."""
    return {name: np.bincount(groups, weights=values, minlength=num_groups) for name, values in statistics.items()}


def total_metrics(metrics_of_sums: MetricsOfSums, statistics: Statistics) -> dict[str, float]:
    """Compute the metrics over all samples. Raises UserCodeError for a metric that is no scalar."""
    metrics = metrics_of_sums({name: np.asarray(values.sum()) for name, values in statistics.items()})
    for name, value in metrics.items():
        if value.shape:
            raise UserCodeError(
                f"must return a scalar for scalar sums, got {list(value.shape)}", where=f"task.metrics {name}"
            )
    return {name: float(value) for name, value in metrics.items()}


def statistics_of(model: nn.Module, task: TrainingTask, arrays: Arrays, device: torch.device) -> Statistics:
    """Compute the statistics of some rows, `[rows]` float64 each. Raises UserCodeError for other shapes."""
    batch, inputs = prepare_batch(task, arrays, device)
    num_rows = len(next(iter(arrays.values())))
    with user_code("model.forward"):
        values: Tensors = compute_within(
            model, inputs, lambda returned: _compute_statistics(returned, task, batch, num_rows)
        )
    return {name: value.cpu().numpy() for name, value in values.items()}


def _compute_statistics(
    returned: Any, task: TrainingTask, batch: Batch, num_rows: int, tallies: Tensors | None = None
) -> Tensors:
    """Compute the statistics of some rows on the device, without waiting for it; add the task's counts to `tallies`."""
    output = without_auxiliary(returned)
    with user_code("task.statistics"):
        statistics = {name: value.double() for name, value in task.statistics(output, batch).items()}
    if tallies is not None:
        with user_code("task.tallies"):
            _add(tallies, task.tallies(output, batch))
    for name, values in statistics.items():
        if values.shape != (num_rows,):
            raise UserCodeError(
                f"must return one number for each of {num_rows} rows, got {list(values.shape)}",
                where=f"task.statistics {name}",
            )
    return statistics


def _read_ahead(task: TrainingTask, dataset: ValidationRows, batches: _Batches, rank: int) -> Iterator[_Batch]:
    """Yield a data rank's batches, as many as any other rank has; read each while the one before it is computed."""
    own = list(batches.of(rank))
    numbers = [*own, *[own[-1] if own else batches.num_batches - 1] * (batches.num_rounds - len(own))]

    def read(place: int) -> _Batch:
        rows = batches.rows(numbers[place])
        arrays, _ = dataset.read_range(rows.start, rows.stop)
        if any(len(values) != len(rows) for values in arrays.values()):
            raise EvaluationError(f"{len(rows)} samples must be read once each", value=sorted(arrays))
        clusters = torch.from_numpy(arrays[CLUSTER].astype(np.int64)) if CLUSTER in arrays else None
        return _Batch(decode_unaugmented(task, arrays, rows, dataset.place_of), clusters, len(rows), place < len(own))

    def begin(place: int) -> Future[_Batch]:
        context = contextvars.copy_context()  # it says how long a call waits for storage; threads start without it
        return threads.start(lambda: context.run(read, place), "evaluation-reader")

    # One at a time: the next is begun when the one before is there, so at most two batches are in memory.
    ahead = begin(0) if numbers else None
    for place in range(len(numbers)):
        assert ahead is not None
        batch = ahead.result()
        ahead = begin(place + 1) if place + 1 < len(numbers) else None
        yield batch


def _gather_on_main(measured: Sequence[Tensors], batches: _Batches, mesh: Mesh) -> Statistics | None:
    """Gather the statistics of all processes on the first one, in stored order; None on the others. Collective."""
    names = sorted(measured[0])
    if any(theirs != names for theirs in mesh.world.gather(names)):
        raise UserCodeError("must have the same names on all processes", where="task.statistics", value=names)
    # Of one size on all processes, as `gather_on_main` asks for: places without a batch stay 0, and nobody reads them.
    own = torch.zeros(len(names), batches.num_rounds * batches.size, dtype=torch.float64)
    for row, name in enumerate(names):
        values = torch.cat([batch[name] for batch in measured])
        own[row, : len(values)] = values.cpu()
    gathered = mesh.world.gather_on_main(own)
    if gathered is None:
        return None
    whole = np.empty((len(names), batches.num_samples))
    statistics = [row for row, name in enumerate(names) if name != CLUSTER]
    for rank, theirs in enumerate(gathered):
        if not mesh.shape.counts_loss(rank):
            continue  # the same rows as another's
        for place, number in enumerate(batches.of(mesh.shape.data_rank(rank))):
            rows = batches.rows(number)
            first = place * batches.size
            measures = theirs.numpy()[:, first : first + len(rows)]
            if mesh.shape.counts_rows(rank):
                whole[:, rows.start : rows.stop] = measures
            else:  # other places of the rows of a process before it
                whole[statistics, rows.start : rows.stop] += measures[statistics]
    return dict(zip(names, whole, strict=True))


def _sum_on_main(counted: Tensors, world: World) -> Statistics:
    """Add up whole numbers over all processes; the result is valid on the first one only. Collective."""
    shapes: dict[str, list[int]] = {}
    for theirs in world.gather({name: list(value.shape) for name, value in counted.items()}):
        for name, shape in theirs.items():
            _require_shape(name, shape, shapes.setdefault(name, shape))
    summed = {}
    for name, shape in sorted(shapes.items()):  # the same order everywhere: each sum is a collective operation
        total = counted[name].cpu() if name in counted else torch.zeros(shape, dtype=torch.int64)
        world.sum_on_main(total)
        summed[name] = total.numpy()
    return summed


def _add(tallies: Tensors, more: Tensors) -> None:
    """Add `more` to `tallies`, name by name: whole numbers, so that the order does not matter."""
    for name, value in more.items():
        if value.dtype is not torch.int64:
            raise UserCodeError(f"must be int64, got {value.dtype}", where=f"task.tallies {name}")
        if name in tallies:
            _require_shape(name, list(value.shape), list(tallies[name].shape))
        tallies[name] = tallies[name] + value if name in tallies else value.clone()


def _require_shape(name: str, shape: list[int], expected: list[int]) -> None:
    if shape != expected:
        raise UserCodeError("must have one shape in all batches", where=f"task.tallies {name}", value=shape)
