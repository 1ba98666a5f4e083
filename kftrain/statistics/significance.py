"""Significance: intervals for few units and far tails, McNemar's test, and the level of the k-th try.

A percentile of 1,000 resamples says nothing of a tail of one in 10,000, and with few units it lies too near to the
value. Student's t over the jackknife (Tukey, 1958; Efron and Tibshirani, "An Introduction to the Bootstrap", 1993,
chapter 11) reaches any tail and knows how few units there are. Hall's transformation ("On the
removal of skewness by transformation", 1992) allows for a longer tail on one side. The gate takes the widest of these.

Tries against one champion share a level: the k-th has level / (k (k + 1)), and 1/2 + 1/6 + 1/12 + ... = 1. So however
many there are, known beforehand or not, the probability that any of them promotes a model that is no better is at most
the level (Bonferroni's inequality, with unequal shares).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

ROUNDING = 1e-12
"""Relative difference up to which values count as equal."""


@dataclass(frozen=True)
class PairedTest:
    """McNemar's test of two models over the same units, one-sided: is the challenger right more often?"""

    num_better: int
    """Number of units where the challenger alone is right."""
    num_worse: int
    """Number of units where the champion alone is right."""
    p_value: float
    """Probability of `num_better` or more among these units, if better and worse were equally likely."""


def level_of_try(level: float, number: int) -> float:
    """Return the level of the `number`-th try, from 1, of a series whose level is `level`."""
    return level / (number * (number + 1))


def confidence_of_try(confidence: float, number: int) -> float:
    """Return the confidence of the two-sided interval of the `number`-th try in a series with `confidence`."""
    return 1.0 - level_of_try(1.0 - confidence, number)


def jackknife_interval(value: float, left_out: np.ndarray, confidence: float) -> tuple[float, float]:
    """Return the outer bounds of Student's and of Hall's interval around `value`.

    `left_out`: the value with one unit left out, `[units]`; not finite where there is no value without that unit. Then,
    and where there is only one unit, the bounds are infinite.
    """
    num_units = len(left_out)
    if num_units < 2 or not np.isfinite(left_out).all():
        return -np.inf, np.inf
    error = np.sqrt((num_units - 1) / num_units * np.square(left_out - left_out.mean()).sum())
    quantile, skew = t_quantile(num_units - 1, (1.0 - confidence) / 2.0), skewness(left_out)
    # On the side of the shorter tail Hall's bound is nearer than Student's; on either side the farther one counts.
    below, above = (float(max(quantile, _hall(quantile, side * skew, num_units)) * error) for side in (1.0, -1.0))
    return value - below, value + above


def skewness(left_out: np.ndarray) -> float:
    """Compute the skewness of what each unit adds to a value, from the value with one unit left out, `[units]`.

    It is 0 if the units do not differ by more than roundings.
    """
    with np.errstate(invalid="ignore"):  # a value that one unit alone determines
        mean, spread = left_out.mean(), float(left_out.std())
    return float((((mean - left_out) / spread) ** 3).mean()) if spread > ROUNDING * abs(mean) else 0.0


def num_units_needed(left_out: np.ndarray) -> int:
    """Count the units that are needed behind a mean with a long tail on the bad, lower side; 0 if there are enough.

    That is 25 times the square of a negative skewness; a long tail on the good side needs none. Cochran, "Sampling
    Techniques", 1977, page 42.
    """
    needed = ceil(25.0 * min(0.0, skewness(left_out)) ** 2)
    return needed if needed > len(left_out) else 0


def _hall(quantile: float, skew: float, num_units: int) -> float:
    """Solve T + skew T^2 / 3 + skew^2 T^3 / 27 + skew / 6n = t for T, which replaces the quantile t of Student's t.

    Both T and t are divided by sqrt(n) in this equation, where n is `num_units`.
    """
    shifted = quantile / sqrt(num_units) - skew / (6.0 * num_units)
    root = float(np.cbrt(1.0 + skew * shifted))
    return 3.0 * shifted / (root * root + root + 1.0) * sqrt(num_units)


def t_quantile(degrees_of_freedom: int, tail: float) -> float:
    """Return the value that Student's t exceeds with the probability `tail`."""
    from scipy.special import stdtrit  # takes 0.3 s: only the gate needs it

    return -float(stdtrit(degrees_of_freedom, tail))


def mcnemar(ours: np.ndarray, theirs: np.ndarray) -> PairedTest:
    """Run McNemar's test in its exact, binomial form, one-sided, on which units were right, `[units]` bool each.

    McNemar, "Note on the sampling error of the difference between correlated proportions or percentages", 1947. Units
    where both are right or both wrong tell nothing.
    """
    from scipy.special import bdtr

    num_better, num_worse = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    return PairedTest(num_better, num_worse, float(bdtr(num_worse, num_better + num_worse, 0.5)))
