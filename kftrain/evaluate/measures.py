"""Metrics of an evaluation and of its slices, from sums per group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kftrain.core.plugins import user_code
from kftrain.errors import EvaluationError
from kftrain.evaluate.score import Statistics, group_sums
from kftrain.run.documents import Interval, Slice
from kftrain.statistics import bootstrap
from kftrain.statistics.bootstrap import Metrics
from kftrain.tasks.base import TrainingTask

CONFIDENCE = 0.95
"""Confidence of the intervals in `metrics.json`; the gate computes its own on the paired difference."""


def parts_of(task: TrainingTask, sums: Statistics, keys: list[str], names: Sequence[str] = ()) -> np.ndarray:
    """Return the name of each group's slice, `[groups]` str: `names` if given, else those of the task."""
    with user_code("task.slice_names"):
        part_of = np.array(names or task.slice_names(keys, sums))
    if len(part_of) != len(keys):
        raise EvaluationError(f"task.slice_names must name each of {len(keys)} groups", value=len(part_of))
    return part_of


def sums_by_slice(
    sums: Statistics, keys: list[str], units: np.ndarray, part_of: np.ndarray
) -> dict[str, np.ndarray] | None:
    """Sum the statistics by unit within each slice, with the key of the unit's first group, for `slices.npz`.

    Returns None where all groups are in one slice.
    """
    names, codes = np.unique(part_of, return_inverse=True)
    if len(names) < 2:
        return None
    pairs, rows = np.unique(np.stack([codes, units], axis=1), axis=0, return_inverse=True)
    _, first = np.unique(units, return_index=True)
    return {
        bootstrap.KEYS: np.array([keys[first[unit]] for unit in pairs[:, 1]]),
        bootstrap.SLICES: pairs[:, 0].astype(np.int64),
        bootstrap.SLICE_NAMES: names,
        **group_sums(sums, rows.ravel(), len(pairs)),
    }


def measure(
    task: TrainingTask,
    sums: Statistics,
    num_rows: np.ndarray,
    keys: list[str],
    num_bootstrap: int,
    units: np.ndarray | None = None,
    names: Sequence[str] = (),
    metrics: Metrics | None = None,
) -> tuple[dict[str, Interval], dict[str, Slice]]:
    """Compute metrics with intervals over all groups and over each slice; no slices where all groups have one name.

    `sums` and `num_rows` are those of each group, `[groups]`; `units`: number of the unit that each group belongs to,
    where the bootstrap resamples several groups as one; `names`: slice of each group, where the task does not say it;
    `metrics`: where there are more than the task's. A metric that a slice does not determine (a rate of nothing) is
    left out of that slice.
    """
    part_of = parts_of(task, sums, keys, names)
    named = part_of.tolist() if len(set(part_of)) > 1 else None
    whole, parts = bootstrap.sliced_intervals(metrics or task.metrics, sums, named, num_bootstrap, CONFIDENCE, 0, units)
    slices = {
        str(name): Slice(
            num_samples=int(num_rows[part_of == name].sum()),
            metrics={metric: interval.value for metric, interval in metrics.items()},
            intervals=metrics,
        )
        for name, metrics in parts.items()
    }
    return whole, slices
