"""Tails against the standard library and integrals by hand; the level of a whole reign by simulation."""

import math
from fractions import Fraction

import numpy as np
import pytest

from kftrain.registry.gate import Evidence, choose_confidence, decide
from kftrain.registry.settings import RegistryConfig
from kftrain.run.documents import Interval
from kftrain.statistics import bootstrap, significance
from kftrain.statistics.significance import confidence_of_try, jackknife_interval, level_of_try, mcnemar, t_quantile

REIGNS, NIGHTS, UNITS = 2000, 40, 60


def test_the_levels_of_all_tries_add_up_to_the_stated_one():
    shares = [Fraction(1, number * (number + 1)) for number in range(1, 1000)]
    assert sum(shares) == 1 - Fraction(1, 1000)
    assert [level_of_try(0.05, number) for number in (1, 2, 40)] == pytest.approx([0.025, 0.05 / 6, 0.05 / 1640])
    assert confidence_of_try(0.95, 3) == pytest.approx(1 - 0.05 / 12)


@pytest.mark.parametrize(("degrees", "tail"), [(1, 0.025), (4, 0.0125), (19, 0.025), (59, 1e-5), (1000, 1e-7)])
def test_the_quantile_of_students_t_leaves_its_tail(degrees, tail):
    x = np.linspace(0.0, math.pi / 2, 2_000_001)[:-1]  # t = tan(x) sqrt(n): the density becomes cos(x)^(n - 1)
    beyond = x >= math.atan(t_quantile(degrees, tail) / math.sqrt(degrees))
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    found = scale * (np.cos(x[beyond]) ** (degrees - 1)).sum() * (x[1] - x[0])
    assert found == pytest.approx(tail, rel=2e-3)


def test_the_jackknife_of_a_mean_is_the_interval_of_the_textbook():
    half = np.random.default_rng(0).normal(size=15)
    values = np.concatenate([1.0 + half, 1.0 - half])  # as long a tail on either side
    without = (values.sum() - values) / 29
    low, high = jackknife_interval(values.mean(), without, 0.95)
    margin = 2.045229642 * values.std(ddof=1) / math.sqrt(30)  # t of 29 degrees of freedom, from a printed table
    assert (low, high) == pytest.approx((values.mean() - margin, values.mean() + margin), rel=1e-9)


@pytest.mark.parametrize("confidence", [0.95, 0.9999])
def test_the_bound_on_the_side_of_a_long_tail_is_halls(confidence):
    values = -np.random.default_rng(0).exponential(size=30)
    error = values.std(ddof=1)
    skew = ((values - values.mean()) ** 3).mean() / values.std() ** 3
    quantile = t_quantile(29, (1 - confidence) / 2) / math.sqrt(30)
    roots = np.roots([skew**2 / 27, skew / 3, 1.0, skew / 180 - quantile])
    (hall,) = roots[np.abs(roots.imag) < 1e-9].real
    found = jackknife_interval(values.mean(), (values.sum() - values) / 29, confidence)
    assert found == pytest.approx((values.mean() - error * hall, values.mean() + error * quantile), rel=1e-9)
    assert hall > 1.1 * quantile


def test_what_one_unit_decides_has_no_bounds():
    assert jackknife_interval(0.5, np.array([0.5, np.nan, 0.4]), 0.95) == (-math.inf, math.inf)
    assert jackknife_interval(0.5, np.array([0.5]), 0.95) == (-math.inf, math.inf)
    assert jackknife_interval(0.0, np.zeros(50), 0.95) == (0.0, 0.0)


@pytest.mark.parametrize(("num_better", "num_worse"), [(0, 0), (1, 0), (5, 0), (8, 2), (2, 8), (7, 7), (600, 520)])
def test_mcnemar_is_the_tail_of_a_binomial(num_better, num_worse):
    ours = np.array([True] * num_better + [False] * num_worse + [True] * 11 + [False] * 3)
    theirs = np.array([False] * num_better + [True] * num_worse + [True] * 11 + [False] * 3)
    order = np.random.default_rng(0).permutation(len(ours))
    found = mcnemar(ours[order], theirs[order])
    discordant = num_better + num_worse
    tail = Fraction(sum(math.comb(discordant, k) for k in range(num_better, discordant + 1)), 2**discordant)
    assert (found.num_better, found.num_worse) == (num_better, num_worse)
    assert found.p_value == pytest.approx(float(tail), rel=1e-9)


def mean(sums):
    return {"mean": sums["value"] / sums["count"]}


def statistics(values):
    keys = np.array([f"{number:03d}" for number in range(len(values))])
    return {"value": values, "count": np.ones(len(values)), "keys": keys}


def test_the_paired_interval_is_never_narrower_than_students():
    for seed in range(20):
        ours, theirs = np.random.default_rng(seed).normal(size=(2, 12))
        arguments = (mean, "mean", "maximize", statistics(ours), statistics(theirs), 200)
        difference = ours - theirs
        error = difference.std(ddof=1) / math.sqrt(12)
        for confidence in (0.95, 0.9999):
            found = bootstrap.paired_improvement(*arguments, confidence, 0)
            margin = t_quantile(11, (1 - confidence) / 2) * error
            assert found.low <= difference.mean() - margin + 1e-12
            assert found.high >= difference.mean() + margin - 1e-12


def false_promotions(corrected):
    """Share of the reigns in which a model that is no better becomes champion within 40 nights.

    On each night the gate sees the difference to the same champion over new data, which is noise. Its intervals are at
    least as wide as Student's, so with those alone it promotes at least as often.
    """
    generator = np.random.default_rng(7)
    differences = generator.normal(size=(REIGNS, NIGHTS, UNITS))
    values = differences.mean(axis=2)
    errors = differences.std(axis=2, ddof=1) / math.sqrt(UNITS)
    settings = RegistryConfig(correct_repeated_tries=corrected)
    promoted = np.zeros(REIGNS, bool)
    for night in range(NIGHTS):
        number = night + 1
        confidence = choose_confidence(settings, number)
        margins = t_quantile(UNITS - 1, (1 - confidence) / 2) * errors[:, night]
        for reign in np.flatnonzero(~promoted & (values[:, night] > margins)):
            value, margin = float(values[reign, night]), float(margins[reign])
            found = Interval(value=value, low=value - margin, high=value + margin)
            one = Interval(value=1.0, low=0.9, high=1.1)
            promoted[reign] |= decide(settings, Evidence(one, UNITS, one, found, confidence, number)).promote
    return promoted.mean()


LEVEL = 0.025
"""One side of the confidence of 95 %."""


def test_of_reigns_of_40_nights_no_more_than_the_level_end_with_a_model_that_is_no_better():
    noise = 3 * math.sqrt(LEVEL * (1 - LEVEL) / REIGNS)
    assert 0.005 < false_promotions(corrected=True) <= LEVEL + noise
    assert false_promotions(corrected=False) > 0.5


def test_mcnemar_keeps_the_level_over_reigns_too():
    from scipy.special import bdtr

    generator = np.random.default_rng(3)
    better = generator.binomial(80, 0.5, size=(REIGNS, NIGHTS))
    p_values = bdtr(80 - better, 80, 0.5)
    assert p_values[0, 0] == significance.mcnemar(np.arange(80) < better[0, 0], np.arange(80) >= better[0, 0]).p_value
    levels = np.array([level_of_try(LEVEL, number) for number in range(1, NIGHTS + 1)])
    assert (p_values <= levels).any(axis=1).mean() <= LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / REIGNS)
    assert (p_values <= LEVEL).any(axis=1).mean() > 0.3
