"""Bootstrap confidence intervals for metrics that are functions of sums.

Groups (documents, images) are the independent units: a resample draws as many groups as there are, with
replacement, sums their statistics and computes the metrics from the sums. The interval is the percentile
interval of the resampled values (Efron, "Bootstrap methods", 1979; Efron and Tibshirani, "An Introduction
to the Bootstrap", 1993, chapter 13). For two models over the same groups every resample is applied to both,
so that what makes a group hard for both cancels (Koehn, "Statistical significance tests for machine
translation evaluation", 2004).

A resample is a row of multinomial weights, drawn as the histogram of uniform indices (numpy's multinomial
takes fifteen times as long for 20 000 groups); weights times statistics are the sums. Rows are made in
chunks, so memory stays near `CHUNK_BYTES` however many groups and resamples there are. Time is groups times
resamples times 20 ns.

Results depend on the seed and the groups, not on the order of the groups: they are sorted first.

The paired interval is the widest of this one and those over the jackknife (`significance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kftrain.errors import ConfigError, EvaluationError
from kftrain.run.documents import Interval
from kftrain.statistics import significance

KEYS = "keys"
"""Entry with the names of the groups, `[groups]` str; the only one among the statistics that is no statistic."""

SLICES, SLICE_NAMES = "slices", "slice_names"
"""Entries of sums that are kept by slice: the number of each row's slice, `[rows]` int, and the slices' names."""

CHUNK_BYTES = 64 << 20

Statistics = Mapping[str, np.ndarray]
"""Statistic name -> sums of each group, `[groups]` float64."""

Metrics = Callable[[Statistics], dict[str, np.ndarray]]
"""Function from sums of shape `[...]` to metrics of shape `[...]`, elementwise."""


@dataclass(frozen=True)
class _Table:
    """Names of the statistics, and their sums `[units, statistics]`; `rows`: which units of the whole, if not all."""

    names: list[str]
    sums: np.ndarray
    rows: np.ndarray | None = None


def intervals(
    metrics: Metrics, statistics: Statistics, num_bootstrap: int, confidence: float, seed: int
) -> dict[str, Interval]:
    """Compute every metric over all groups, with its percentile interval at `confidence`.

    A resample in which a metric is not finite (a rare class was not drawn) says nothing about it: it counts as the
    lowest for the lower bound and as the highest for the upper one, so either may be infinite. Raises EvaluationError
    if there are no groups or a metric over all groups is not finite.
    """
    return sliced_intervals(metrics, statistics, None, num_bootstrap, confidence, seed)[0]


def sliced_intervals(
    metrics: Metrics,
    statistics: Statistics,
    slices: Sequence[str] | None,
    num_bootstrap: int,
    confidence: float,
    seed: int,
    units: np.ndarray | None = None,
) -> tuple[dict[str, Interval], dict[str, dict[str, Interval]]]:
    """Compute what `intervals` does, and the same for each slice, from the very same resamples.

    `slices`: name of each group's slice. `units`: number of the unit that each group belongs to, if a resampled unit is
    more than a group.

    A resample draws whatever number of a slice's groups it happens to: a slice that it easily misses has no finite
    bounds. A metric that a slice does not determine is left out of it.
    """
    names, sums = _build_table(statistics)
    labels, codes = np.unique(np.asarray(["" for _ in sums] if slices is None else slices), return_inverse=True)
    order = np.lexsort(np.vstack([codes, sums.T]))  # the slices only part what is equal
    sums, codes = sums[order], codes[order]
    members = [] if slices is None else [np.flatnonzero(codes == code) for code in range(len(labels))]
    places = np.arange(len(sums)) if units is None else by_appearance(np.asarray(units)[order])
    tables = [_sum_units(names, sums[rows], places[rows]) for rows in (np.arange(len(sums)), *members)]
    samples = _resample(metrics, tables, num_bootstrap, seed)
    values = [_compute_metrics(metrics, names, table.sums.sum(axis=0)) for table in tables]
    whole = {name: _interval(name, float(value), samples[0][name], confidence) for name, value in values[0].items()}
    parts = [
        {name: _interval(name, float(v), drawn[name], confidence) for name, v in own.items() if np.isfinite(v)}
        for own, drawn in zip(values[1:], samples[1:], strict=True)
    ]
    return whole, dict(zip(labels.tolist(), parts, strict=False))


def paired_improvement(
    metrics: Metrics,
    metric: str,
    goal: str,
    challenger: Statistics,
    champion: Statistics,
    num_bootstrap: int,
    confidence: float,
    seed: int,
) -> Interval:
    """Compute how much better the challenger is in `metric`, in its unit; positive is better whatever the goal.

    The interval is two-sided: for two equally good models it lies above zero with half of `1 - confidence`. Its bounds
    are the outer ones of the percentiles and of those over the jackknife, which also hold for few groups and for a
    `confidence` that the resamples cannot tell. Both statistics must have an entry `keys`, and the same groups in any
    order, else EvaluationError. Raises ConfigError for an unknown metric.
    """
    tables = [_Table(*_build_table(statistics, order)) for statistics, order in _align(challenger, champion)]
    values = [_compute_metrics(metrics, table.names, table.sums.sum(axis=0)) for table in tables]
    if metric not in values[0]:
        known = ", ".join(sorted(values[0]))
        raise ConfigError("unknown metric", where="registry.metric", value=metric, fix=f"known: {known}")
    ours, theirs = _resample(metrics, tables, num_bootstrap, seed)
    sign = {"maximize": 1.0, "minimize": -1.0}[goal]
    value = sign * float(values[0][metric] - values[1][metric])
    percentile = _interval(metric, value, sign * (ours[metric] - theirs[metric]), confidence)
    # The jackknife: the metric of all sums but one unit's, for each unit.
    without = [_compute_metrics(metrics, table.names, table.sums.sum(axis=0) - table.sums)[metric] for table in tables]
    left_out = sign * (without[0] - without[1])
    low, high = significance.jackknife_interval(value, left_out, confidence)
    needed = significance.num_units_needed(left_out)
    return Interval(value=value, low=min(low, percentile.low), high=max(high, percentile.high), num_needed=needed)


def paired_values(metrics: Metrics, metric: str, challenger: Statistics, champion: Statistics) -> list[np.ndarray]:
    """Compute the metric of each group alone, `[groups]`, for challenger and champion in one order.

    Raises EvaluationError as `paired_improvement` does.
    """
    tables = [_build_table(statistics, order) for statistics, order in _align(challenger, champion)]
    return [np.asarray(_compute_metrics(metrics, names, sums)[metric], np.float64) for names, sums in tables]


def paired_differences(
    metrics: Metrics,
    ours: Statistics,
    theirs: Statistics,
    slices: Mapping[str, str],
    num_bootstrap: int,
    confidence: float,
    seed: int,
) -> tuple[dict[str, Interval], dict[str, dict[str, Interval]]]:
    """Subtract each metric of theirs from ours, with its paired interval: over all groups, and by slice.

    Both statistics must have an entry `keys`, and the same groups in any order, else EvaluationError. `slices`: key of
    a group -> name of its slice; empty: none. All use the same resamples, so a slice that a resample easily misses has
    unknown bounds. A metric that one side does not determine is left out.
    """
    (ours, order), (theirs, their_order) = _align(ours, theirs)
    pair = [_build_table(ours, order), _build_table(theirs, their_order)]
    of_group = np.asarray([slices.get(key, "") for key in np.asarray(ours[KEYS])[order].tolist()])
    names = sorted(set(slices.values()))
    parts = [np.arange(len(of_group)), *(np.flatnonzero(of_group == name) for name in names)]
    tables = [_Table(columns, sums[rows], rows) for rows in parts for columns, sums in pair]
    samples = _resample(metrics, tables, num_bootstrap, seed)
    values = [_compute_metrics(metrics, table.names, table.sums.sum(axis=0)) for table in tables]
    differences = [
        {
            name: _interval(name, float(values[at][name] - values[at + 1][name]), drawn, confidence)
            for name, drawn in _subtract(samples[at], samples[at + 1]).items()
            if np.isfinite(values[at][name]) and np.isfinite(values[at + 1][name])
        }
        for at in range(0, len(tables), 2)
    ]
    return differences[0], dict(zip(names, differences[1:], strict=True))


def _subtract(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Subtract the metrics that both have; a sample that is not finite on one side is not finite in the difference."""
    with np.errstate(invalid="ignore"):
        return {name: values - theirs[name] for name, values in ours.items() if name in theirs}


def by_appearance(numbers: np.ndarray) -> np.ndarray:
    """Renumber from 0, in the order in which numbers first appear."""
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def _sum_units(names: list[str], sums: np.ndarray, places: np.ndarray) -> _Table:
    """Add up the sums of groups that belong to one unit."""
    rows, inverse = np.unique(places, return_inverse=True)
    total = np.zeros((len(rows), len(names)))
    np.add.at(total, inverse, sums)
    return _Table(names, total, rows)


def _build_table(statistics: Statistics, order: np.ndarray | None = None) -> tuple[list[str], np.ndarray]:
    """Return the sorted names of the statistics, and their sums `[groups, statistics]`."""
    names = sorted(set(statistics) - {KEYS})
    columns = [np.asarray(statistics[name], dtype=np.float64) for name in names]
    if not columns or not len(columns[0]):
        raise EvaluationError("there is nothing to resample", where="bootstrap", fix="the validation split is empty")
    if any(column.shape != columns[0].shape or column.ndim != 1 for column in columns):
        shapes = {name: column.shape for name, column in zip(names, columns, strict=True)}
        raise EvaluationError("every statistic needs one sum per group", where="bootstrap", value=shapes)
    table = np.stack(columns, axis=1)
    return names, table if order is None else table[order]


def _align(challenger: Statistics, champion: Statistics) -> list[tuple[Statistics, np.ndarray]]:
    """Return both statistics, each with the order that sorts its groups by key. Raises EvaluationError."""
    pairs = []
    for role, statistics in (("challenger", challenger), ("champion", champion)):
        if KEYS not in statistics:
            raise EvaluationError("a paired comparison needs the keys of the groups", where=f"{role}'s statistics")
        pairs.append((statistics, np.argsort(statistics[KEYS], kind="stable")))
    ours, theirs = (np.asarray(statistics[KEYS])[order] for statistics, order in pairs)
    if ours.shape != theirs.shape or not np.array_equal(ours, theirs):
        differing = sorted(set(ours.tolist()) ^ set(theirs.tolist()))[:3]
        raise EvaluationError(
            "the two models were not evaluated on the same groups",
            where="paired comparison",
            value=differing,
            fix="evaluate both on the same data",
        )
    if len(np.unique(ours)) != len(ours):
        raise EvaluationError("the keys of the groups are not unique", where="paired comparison")
    return pairs


def _compute_metrics(metrics: Metrics, names: list[str], sums: np.ndarray) -> dict[str, np.ndarray]:
    """Compute metrics of sums `[..., statistics]`; where a sum is zero they may be infinite or NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return metrics({name: sums[..., column] for column, name in enumerate(names)})


def _resample(metrics: Metrics, tables: list[_Table], num_bootstrap: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Compute each table's metrics in every resample, all tables under the same weights; the first holds all units."""
    sums: list[list[np.ndarray]] = [[] for _ in tables]
    for weights in _draw_weights(len(tables[0].sums), num_bootstrap, seed):
        for table, chunks in zip(tables, sums, strict=True):
            whole = table.rows is None or len(table.rows) == weights.shape[1]
            chunks.append((weights if whole else weights[:, table.rows]) @ table.sums)
    return [
        _compute_metrics(metrics, table.names, np.concatenate(chunks))
        for table, chunks in zip(tables, sums, strict=True)
    ]


def _draw_weights(num_groups: int, num_bootstrap: int, seed: int) -> Iterator[np.ndarray]:
    """Draw multinomial weights `[rows, groups]`, chunk by chunk; the same rows for any chunk size."""
    generator = np.random.default_rng(seed)
    rows = max(1, min(num_bootstrap, CHUNK_BYTES // (8 * num_groups)))
    for start in range(0, num_bootstrap, rows):
        weights = np.empty((min(rows, num_bootstrap - start), num_groups))
        for row in weights:
            row[:] = np.bincount(generator.integers(0, num_groups, num_groups), minlength=num_groups)
        yield weights


def _interval(name: str, value: float, samples: np.ndarray, confidence: float) -> Interval:
    """Return the percentile interval; samples that are not finite count as outside of it, on either side."""
    if not np.isfinite(value):
        raise EvaluationError("a metric is not finite", where=name, value=value, fix="did the training diverge?")
    tail = (1.0 - confidence) / 2.0
    low, high = _quantile(samples, tail, -np.inf), _quantile(samples, 1.0 - tail, np.inf)
    return Interval(value=value, low=low, high=high)


def _quantile(samples: np.ndarray, share: float, unknown: float) -> float:
    """Return the quantile, with the infinity `unknown` in the place of samples that are not finite."""
    with np.errstate(invalid="ignore"):  # numpy interpolates between two infinities, which gives NaN
        quantile = float(np.quantile(np.where(np.isfinite(samples), samples, unknown), share))
    return unknown if np.isnan(quantile) else quantile
