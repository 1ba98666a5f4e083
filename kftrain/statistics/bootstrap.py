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
"""The one entry among the statistics that is none: the names of the groups, `[groups]` str."""

SLICES, SLICE_NAMES = "slices", "slice_names"
"""Where sums are kept by slice: the number of each row's slice, `[rows]` int, and the slices' names."""

CHUNK_BYTES = 64 << 20

Statistics = Mapping[str, np.ndarray]
"""Statistic name -> sums of each group, `[groups]` float64."""

Metrics = Callable[[Statistics], dict[str, np.ndarray]]
"""From sums of shape `[...]` to metrics of shape `[...]`, elementwise."""


@dataclass(frozen=True)
class _Table:
    """Names of the statistics, and their sums `[units, statistics]`; `rows`: which units of the whole, if not all."""

    names: list[str]
    sums: np.ndarray
    rows: np.ndarray | None = None


def intervals(
    metrics: Metrics, statistics: Statistics, num_bootstrap: int, confidence: float, seed: int
) -> dict[str, Interval]:
    """Every metric over all groups, with its percentile interval at `confidence`.

    A resample in which a metric is not finite (a rare class was not drawn) says nothing about it: it counts as the
    lowest for the lower bound and as the highest for the upper one, so either may be infinite. Raises EvaluationError
    where there are no groups or a metric over all groups is not finite.
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
    """What `intervals` gives, and the same for each slice, from the very same resamples. `slices`: of each group.

    `units`: number of the unit that each group belongs to, where a unit that is resampled is more than a group.

    Of a slice a resample holds as many groups as it happens to: a metric of one that a resample easily misses has no
    finite bounds. A metric that a slice does not determine is left out of it.
    """
    names, sums = _table(statistics)
    labels, codes = np.unique(np.asarray(["" for _ in sums] if slices is None else slices), return_inverse=True)
    order = np.lexsort(np.vstack([codes, sums.T]))  # the slices only part what is equal
    sums, codes = sums[order], codes[order]
    members = [] if slices is None else [np.flatnonzero(codes == code) for code in range(len(labels))]
    places = np.arange(len(sums)) if units is None else by_appearance(np.asarray(units)[order])
    tables = [_summed(names, sums[rows], places[rows]) for rows in (np.arange(len(sums)), *members)]
    samples = _resampled(metrics, tables, num_bootstrap, seed)
    values = [_metrics_of(metrics, names, table.sums.sum(axis=0)) for table in tables]
    whole = {name: _interval(name, float(value), samples[0][name], confidence) for name, value in values[0].items()}
    parts = [
        {name: _interval(name, float(v), drawn[name], confidence) for name, v in found.items() if np.isfinite(v)}
        for found, drawn in zip(values[1:], samples[1:], strict=True)
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
    """How much better the challenger is in `metric`, in its unit; positive is better whatever the goal.

    The interval is two-sided, so of two equally good models it lies above zero with half of `1 - confidence`. Its
    bounds are the outer ones of the percentiles and of those over the jackknife, which hold also for few groups and for
    a `confidence` that the resamples cannot tell. Both statistics must have an entry `keys`, and the same
    groups in any order, else EvaluationError. An unknown metric is a ConfigError.
    """
    tables = [_Table(*_table(statistics, order)) for statistics, order in _aligned(challenger, champion)]
    values = [_metrics_of(metrics, table.names, table.sums.sum(axis=0)) for table in tables]
    if metric not in values[0]:
        known = ", ".join(sorted(values[0]))
        raise ConfigError("unknown metric", where="registry.metric", value=metric, fix=f"known: {known}")
    ours, theirs = _resampled(metrics, tables, num_bootstrap, seed)
    sign = {"maximize": 1.0, "minimize": -1.0}[goal]
    value = sign * float(values[0][metric] - values[1][metric])
    found = _interval(metric, value, sign * (ours[metric] - theirs[metric]), confidence)
    without = [_metrics_of(metrics, table.names, table.sums.sum(axis=0) - table.sums)[metric] for table in tables]
    left_out = sign * (without[0] - without[1])
    low, high = significance.jackknife_interval(value, left_out, confidence)
    needed = significance.num_units_needed(left_out)
    return Interval(value=value, low=min(low, found.low), high=max(high, found.high), num_needed=needed)


def paired_values(metrics: Metrics, metric: str, challenger: Statistics, champion: Statistics) -> list[np.ndarray]:
    """The metric of each group alone, `[groups]`, of challenger and champion in one order. Raises as the above."""
    found = []
    for statistics, order in _aligned(challenger, champion):
        names, sums = _table(statistics, order)
        found.append(np.asarray(_metrics_of(metrics, names, sums)[metric], np.float64))
    return found


def paired_differences(
    metrics: Metrics,
    ours: Statistics,
    theirs: Statistics,
    slices: Mapping[str, str],
    num_bootstrap: int,
    confidence: float,
    seed: int,
) -> tuple[dict[str, Interval], dict[str, dict[str, Interval]]]:
    """Each metric of ours minus the same of theirs, with its paired interval: over all groups, and by slice.

    Both statistics must have an entry `keys`, and the same groups in any order, else EvaluationError. `slices`: key of
    a group -> name of its slice; empty: none. All are of the same resamples, so a slice that one easily misses has
    unknown bounds. A metric that one side does not determine is left out.
    """
    (ours, order), (theirs, their_order) = _aligned(ours, theirs)
    pair = [_table(ours, order), _table(theirs, their_order)]
    of_group = np.asarray([slices.get(key, "") for key in np.asarray(ours[KEYS])[order].tolist()])
    names = sorted(set(slices.values()))
    parts = [np.arange(len(of_group)), *(np.flatnonzero(of_group == name) for name in names)]
    tables = [_Table(columns, sums[rows], rows) for rows in parts for columns, sums in pair]
    samples = _resampled(metrics, tables, num_bootstrap, seed)
    values = [_metrics_of(metrics, table.names, table.sums.sum(axis=0)) for table in tables]
    found = [
        {
            name: _interval(name, float(values[at][name] - values[at + 1][name]), drawn, confidence)
            for name, drawn in _minus(samples[at], samples[at + 1]).items()
            if np.isfinite(values[at][name]) and np.isfinite(values[at + 1][name])
        }
        for at in range(0, len(tables), 2)
    ]
    return found[0], dict(zip(names, found[1:], strict=True))


def _minus(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The differences of the metrics that both have; what is not finite on one side is not in the difference."""
    with np.errstate(invalid="ignore"):
        return {name: values - theirs[name] for name, values in ours.items() if name in theirs}


def by_appearance(numbers: np.ndarray) -> np.ndarray:
    """The same numbers counted from 0, in the order in which they appear."""
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def _summed(names: list[str], sums: np.ndarray, places: np.ndarray) -> _Table:
    """The groups' sums, added up where they have the same place."""
    rows, inverse = np.unique(places, return_inverse=True)
    total = np.zeros((len(rows), len(names)))
    np.add.at(total, inverse, sums)
    return _Table(names, total, rows)


def _table(statistics: Statistics, order: np.ndarray | None = None) -> tuple[list[str], np.ndarray]:
    """Names of the statistics, sorted, and their sums `[groups, statistics]`."""
    names = sorted(set(statistics) - {KEYS})
    columns = [np.asarray(statistics[name], dtype=np.float64) for name in names]
    if not columns or not len(columns[0]):
        raise EvaluationError("there is nothing to resample", where="bootstrap", fix="the validation split is empty")
    if any(column.shape != columns[0].shape or column.ndim != 1 for column in columns):
        shapes = {name: column.shape for name, column in zip(names, columns, strict=True)}
        raise EvaluationError("every statistic needs one sum per group", where="bootstrap", value=shapes)
    table = np.stack(columns, axis=1)
    return names, table if order is None else table[order]


def _aligned(challenger: Statistics, champion: Statistics) -> list[tuple[Statistics, np.ndarray]]:
    """Both statistics, each with the order that sorts its groups by key."""
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


def _metrics_of(metrics: Metrics, names: list[str], sums: np.ndarray) -> dict[str, np.ndarray]:
    """Metrics of sums `[..., statistics]`; divisions by zero are the caller's to judge, by their result."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return metrics({name: sums[..., column] for column, name in enumerate(names)})


def _resampled(metrics: Metrics, tables: list[_Table], num_bootstrap: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Per table: metric name -> its value in every resample; all tables under the same weights. The first is whole."""
    sums: list[list[np.ndarray]] = [[] for _ in tables]
    for weights in _weights(len(tables[0].sums), num_bootstrap, seed):
        for table, chunks in zip(tables, sums, strict=True):
            whole = table.rows is None or len(table.rows) == weights.shape[1]
            chunks.append((weights if whole else weights[:, table.rows]) @ table.sums)
    return [
        _metrics_of(metrics, table.names, np.concatenate(chunks)) for table, chunks in zip(tables, sums, strict=True)
    ]


def _weights(num_groups: int, num_bootstrap: int, seed: int) -> Iterator[np.ndarray]:
    """Multinomial weights `[rows, groups]`, chunk by chunk; the same rows for any chunk size."""
    generator = np.random.default_rng(seed)
    rows = max(1, min(num_bootstrap, CHUNK_BYTES // (8 * num_groups)))
    for start in range(0, num_bootstrap, rows):
        weights = np.empty((min(rows, num_bootstrap - start), num_groups))
        for row in weights:
            row[:] = np.bincount(generator.integers(0, num_groups, num_groups), minlength=num_groups)
        yield weights


def _interval(name: str, value: float, samples: np.ndarray, confidence: float) -> Interval:
    """The percentile interval; samples that are not finite stand outside of it, on either side."""
    if not np.isfinite(value):
        raise EvaluationError("a metric is not finite", where=name, value=value, fix="did the training diverge?")
    tail = (1.0 - confidence) / 2.0
    low, high = _quantile(samples, tail, -np.inf), _quantile(samples, 1.0 - tail, np.inf)
    return Interval(value=value, low=low, high=high)


def _quantile(samples: np.ndarray, share: float, unknown: float) -> float:
    """The quantile with `unknown`, an infinity, in the place of samples that are not finite."""
    with np.errstate(invalid="ignore"):  # numpy interpolates between two infinities, which gives NaN
        found = float(np.quantile(np.where(np.isfinite(samples), samples, unknown), share))
    return unknown if np.isnan(found) else found
