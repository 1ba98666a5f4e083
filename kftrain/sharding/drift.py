"""Drift of a dataset from another: two measures for each distribution, and the value that chance alone would give.

Bins are chosen by the dataset before: of ordered values (pixels, sizes, floating point numbers) up to ten that hold
about as much each, one below all of them, one above, and of numbers one for those that are not finite; of names
(classes, tokens) the most frequent ones, and one for all others.

- Population stability index, the sum of (p - q) ln(p / q) over the bins: N. Siddiqi, "Credit Risk Scorecards" (2006),
whose thresholds 0.1 and 0.25 are the usual ones; it is the divergence of H. Jeffreys (1946). Half a count is added to
each bin, or an empty one would make it infinite. - Jensen-Shannon distance, the root of the divergence in bits, from 0
to 1: J. Lin, "Divergence Measures Based on the Shannon Entropy" (1991); D. Endres and J. Schindelin (2003) for the
root.

Of two samples of the same distribution the index is about (1/n + 1/m) times a chi-square variable of one degree of
freedom less than there are bins (B. Yurdakul, "Statistical Properties of Population Stability Index", 2018). What it
exceeds in one of twenty such pairs is what chance would give; only what is above that, too, counts as a change. Values
of one document or image are alike: n and m are the numbers of independent values that vary as much, by the first-order
correction of J. Rao and A. Scott (1981).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np

from kftrain.run.drift import DriftShift

MAX_ORDERED_BINS = 10
MAX_NAMED_BINS = 100
"""Number of names with a bin of their own, beside the one for all others."""

SMOOTHING = 0.5
"""Counts that are added to each bin for the index."""

CHANCE = 0.05
"""Share of pairs of equal distributions in which chance gives more."""

MAX_SHIFTS = 5
"""Bins that are named as the ones that have changed most."""

OTHERS = "others"
MISSING = "not finite"
"""Bins of other names, and of numbers that are none."""

Bin = tuple[str, float, float]
"""Name of a bin, and its counts before and now."""

Level = Literal["none", "some", "large"]


@dataclass(frozen=True)
class Distribution:
    """Counts or quantiles of the values of a field, as a profile holds them."""

    counts: dict[str, int]
    is_ordered: bool = False
    """True if the values are whole numbers that have an order."""
    num_independent: float = 0.0
    """Number of independent values that would vary as much; 0: as many as there are."""
    quantiles: list[float] = field(default_factory=list)
    """Quantiles of finite floating point numbers, in order and evenly spread, instead of counts."""
    missing: float | None = None
    """Share of floating point numbers that are not finite; None: it was not counted."""

    @property
    def has_numbers(self) -> bool:
        """True if its values are floating point numbers."""
        return bool(len(self.quantiles)) or self.missing is not None

    @property
    def size(self) -> float:
        """Number of values that decides what chance gives."""
        return self.num_independent or float(sum(self.counts.values()) or len(self.quantiles))


@dataclass(frozen=True)
class DistributionChange:
    """Change of one distribution, measured twice."""

    psi: float
    """Population stability index."""
    js_distance: float
    """Jensen-Shannon distance."""
    chance_psi: float
    """Index that chance alone exceeds once in twenty times."""
    num_bins: int
    shifts: list[DriftShift]
    """The bins whose share has changed most, the largest change first."""

    def level(self, some: float, large: float) -> Level:
        """Tell how large the change is by the thresholds; "none" where chance would give as much."""
        if self.psi <= max(some, self.chance_psi):
            return "none"
        return "large" if self.psi > large else "some"


def measure_change(before: Distribution, now: Distribution) -> DistributionChange | None:
    """Measure how a distribution has changed; None where one of them is empty, or they are of different kinds."""
    bins = _make_bins(before, now) if before.has_numbers == now.has_numbers else []
    counts = np.array([[old, new] for _, old, new in bins], dtype=np.float64).reshape(-1, 2).T
    if not counts.any(axis=1).all():
        return None
    shares = counts / counts.sum(axis=1, keepdims=True)
    largest = sorted(range(len(bins)), key=lambda number: -abs(shares[1, number] - shares[0, number]))[:MAX_SHIFTS]
    return DistributionChange(
        psi=stability_index(counts[0], counts[1]),
        js_distance=jensen_shannon_distance(counts[0], counts[1]),
        chance_psi=compute_chance_index(len(bins), before.size, now.size),
        num_bins=len(bins),
        shifts=[DriftShift(bin=bins[number][0], before=shares[0, number], now=shares[1, number]) for number in largest],
    )


def stability_index(before: np.ndarray, now: np.ndarray) -> float:
    """Compute the population stability index of the counts `[bins]` of two datasets."""
    p, q = (_compute_shares(counts + SMOOTHING) for counts in (now, before))
    return float(np.sum((p - q) * np.log(p / q)))


def jensen_shannon_distance(before: np.ndarray, now: np.ndarray) -> float:
    """Compute the distance of the counts `[bins]` of two datasets, from 0 to 1."""
    p, q = _compute_shares(now), _compute_shares(before)
    divergence = (_compute_relative_entropy(p, (p + q) / 2) + _compute_relative_entropy(q, (p + q) / 2)) / 2
    return math.sqrt(min(1.0, max(0.0, divergence)))


def compute_chance_index(num_bins: int, before: float, now: float) -> float:
    """Compute the index that two samples of these sizes, of one distribution, exceed once in twenty times."""
    return (1 / before + 1 / now) * _compute_chi_square_quantile(num_bins - 1, 1 - CHANCE) if num_bins > 1 else 0.0


def count_independent_values(groups: np.ndarray) -> float:
    """Count the independent values that vary as much as those of `groups`, `[groups, bins]`, whose values are alike.

    The number of values over the mean design effect of the bins, weighted as Rao and Scott do for a test of fit.
    """
    sizes, total = groups.sum(axis=1), groups.sum()
    shares = groups.sum(axis=0) / total
    used = (shares > 0) & (shares < 1)
    if len(groups) < 2 or not used.any():
        return float(total)
    shares = shares[used]
    deviations = groups[:, used] - sizes[:, None] * shares
    variances = len(groups) / (len(groups) - 1) * np.square(deviations).sum(axis=0) / total**2
    effects = variances / (shares * (1 - shares) / total)
    return float(total / max(1.0, float(np.average(effects, weights=1 - shares))))


def compute_decile_edges(values: np.ndarray) -> np.ndarray:
    """Compute the values up to which a tenth of all lie, and two, and so on: ends of all bins but the last."""
    shares = np.arange(1, MAX_ORDERED_BINS) / MAX_ORDERED_BINS
    return np.unique(np.quantile(values, shares, method="inverted_cdf")) if len(values) else np.empty(0)


def count_between(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Count the values up to each edge, and those above the last one."""
    return np.bincount(np.searchsorted(edges, values, side="left"), minlength=len(edges) + 1)


def _make_bins(before: Distribution, now: Distribution) -> list[Bin]:
    """Name of each bin, with the counts of both."""
    if before.has_numbers:
        return _make_number_bins(before, now)
    return _make_ordered_bins(before, now) if before.is_ordered and now.is_ordered else _make_named_bins(before, now)


def _make_number_bins(before: Distribution, now: Distribution) -> list[Bin]:
    """Make bins that hold about as much each, before, and room around them; those without a value are left out."""
    old = np.asarray(before.quantiles)
    edges, names = np.empty(0), ["numbers"]
    if len(old):
        lowest, highest = old[0], old[-1]
        edges = np.unique([np.nextafter(lowest, -np.inf), *compute_decile_edges(old), highest])
        ranges = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges[1:].tolist())]
        names = [f"below {lowest:.4g}", f"up to {edges[1]:.4g}", *ranges, f"above {highest:.4g}"]
    counts = [count_between(np.asarray(distribution.quantiles), edges).tolist() for distribution in (before, now)]
    if before.missing is not None and now.missing is not None:
        names.append(MISSING)
        counts = [[*finite, _missing(numbers)] for finite, numbers in zip(counts, (before, now), strict=True)]
    return [named for named in zip(names, *counts, strict=True) if any(named[1:])]


def _missing(numbers: Distribution) -> float:
    """Count the numbers that are not finite, beside the quantiles of those that are."""
    share = numbers.missing or 0.0
    return len(numbers.quantiles) * share / (1 - share) if share < 1 else numbers.size


def _make_ordered_bins(before: Distribution, now: Distribution) -> list[Bin]:
    """Make bins of values that hold about as much each, before, and room around them."""
    values = sorted({int(value) for value in (*before.counts, *now.counts)})
    known = [int(value) for value, count in before.counts.items() if count]
    if not known:
        return []
    wanted = sum(before.counts.values()) / MAX_ORDERED_BINS
    bins: list[Bin] = []
    first, old, new = values[0], 0, 0
    for value, following in zip(values, [*values[1:], None], strict=True):
        old += before.counts.get(str(value), 0)
        new += now.counts.get(str(value), 0)
        if old >= wanted or value == max(known) or following in (None, min(known)):
            bins.append((f"{first} to {value}" if value > first else str(value), old, new))
            first, old, new = value + 1, 0, 0
    return bins


def _make_named_bins(before: Distribution, now: Distribution) -> list[Bin]:
    """Make bins of the most frequent names before, and one of all others together."""
    named = sorted(before.counts, key=lambda name: (-before.counts[name], name))[:MAX_NAMED_BINS]
    bins: list[Bin] = [(name, before.counts[name], now.counts.get(name, 0)) for name in named]
    others = [
        sum(distribution.counts.values()) - sum(distribution.counts.get(name, 0) for name in named)
        for distribution in (before, now)
    ]
    return [*bins, (OTHERS, others[0], others[1])] if any(others) else bins


def _compute_shares(counts: np.ndarray) -> np.ndarray:
    return np.asarray(counts / counts.sum())


def _compute_relative_entropy(p: np.ndarray, q: np.ndarray) -> float:
    """Compute the relative entropy in bits; what p lacks counts nothing."""
    used = p > 0
    return float(np.sum(p[used] * np.log2(p[used] / q[used])))


def _compute_chi_square_quantile(degrees: int, probability: float) -> float:
    """Approximate the quantile by the cube of a normal variable: E. Wilson and M. Hilferty (1931).

    The error is within 1 % from 3 degrees of freedom on. Wilson and M. Hilferty (1931); within 1 % from 3 degrees of
    freedom on. Wilson and M. Hilferty (1931); within 1 % from 3 degrees of freedom on.
    """
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + NormalDist().inv_cdf(probability) * math.sqrt(spread)) ** 3)
