"""Measures of drift against scipy and against sums by hand, and how often chance alone is taken for a change."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.stats import chi2

from kftrain.sharding import drift
from kftrain.sharding.drift import Distribution, count_independent_values, measure_change

COUNTS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=2, max_size=30).filter(
    lambda pairs: all(sum(column) for column in zip(*pairs, strict=True))
)


@settings(max_examples=200, deadline=None)
@given(COUNTS)
def test_both_measures_are_those_of_others(pairs):
    before, now = (np.array(column, float) for column in zip(*pairs, strict=True))
    assert drift.jensen_shannon_distance(before, now) == pytest.approx(jensenshannon(before, now, base=2), abs=1e-7)
    totals = [sum(column) + 0.5 * len(pairs) for column in zip(*pairs, strict=True)]
    terms = [((old + 0.5) / totals[0], (new + 0.5) / totals[1]) for old, new in pairs]
    by_hand = math.fsum((q - p) * (math.log(q) - math.log(p)) for p, q in terms)
    assert drift.stability_index(before, now) == pytest.approx(by_hand, abs=1e-9)
    assert drift.stability_index(now, before) == pytest.approx(by_hand, abs=1e-9)


@pytest.mark.parametrize("num_bins", [3, 5, 10, 33, 101])
def test_what_chance_gives_is_a_quantile_of_chi_square(num_bins):
    found = drift.compute_chance_index(num_bins, 100.0, 400.0) / (1 / 100 + 1 / 400)
    assert found == pytest.approx(chi2.ppf(0.95, num_bins - 1), rel=0.01)
    assert drift.compute_chance_index(1, 10.0, 10.0) == 0.0
    assert drift.compute_chance_index(2, 1.0, 1.0) / 2 == pytest.approx(chi2.ppf(0.95, 1), rel=0.05)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_equal_distributions_are_called_changed_once_in_twenty_times(is_ordered):
    draw = np.random.default_rng(1)
    shares = draw.dirichlet(np.full(12, 3.0))
    beyond = 0
    for _ in range(600):
        two = [dict(zip(map(str, range(12)), draw.multinomial(n, shares).tolist(), strict=True)) for n in (900, 400)]
        found = measure_change(*(Distribution(counts, is_ordered) for counts in two))
        beyond += found.psi > found.chance_psi
    assert 0.02 < beyond / 600 < 0.09


def test_values_that_are_alike_count_as_few():
    """200 documents of 50 tokens each; the tokens of one come from shares of its own."""
    draw = np.random.default_rng(2)

    def sample():
        return np.array([draw.multinomial(50, draw.dirichlet(np.full(8, 0.5))) for _ in range(200)])

    naive, corrected = 0, 0
    for _ in range(150):
        before, now = sample(), sample()
        named = [{str(number): int(count) for number, count in enumerate(each.sum(axis=0))} for each in (before, now)]
        found = measure_change(*(Distribution(counts) for counts in named))
        naive += found.psi > found.chance_psi
        sizes = [count_independent_values(each) for each in (before, now)]
        found = measure_change(*(Distribution(counts, False, size) for counts, size in zip(named, sizes, strict=True)))
        corrected += found.psi > found.chance_psi
    assert naive > 100 and corrected / 150 < 0.12


def test_the_number_of_independent_values_between_its_extremes():
    one_value_each = np.repeat(np.eye(4, dtype=int) * 30, 25, axis=0)
    assert count_independent_values(one_value_each) == pytest.approx(100, rel=0.05), "as many as there are groups"
    assert count_independent_values(np.full((50, 4), 10)) == 2000, "never more than there are values"
    draw = np.random.default_rng(3)
    assert count_independent_values(draw.multinomial(40, [0.1, 0.2, 0.7], 500)) == pytest.approx(20_000, rel=0.15)
    assert (
        count_independent_values(np.array([[5, 0], [7, 0]])) == 12 and count_independent_values(np.array([[5, 3]])) == 8
    )


def test_ordered_values_make_bins_of_equal_shares_and_names_the_most_frequent_ones():
    before = Distribution({str(value): 1 for value in range(100)}, is_ordered=True)
    now = Distribution({str(value): 1 for value in range(50, 150)}, is_ordered=True)
    found = measure_change(before, now)
    assert found.num_bins == 11 and {shift.bin for shift in found.shifts} >= {"100 to 149"}
    shift = next(each for each in found.shifts if each.bin == "100 to 149")
    assert (shift.before, shift.now) == (0.0, 0.5) and found.shifts[0] == shift
    many = Distribution({f"t{number}": 1000 - number for number in range(300)})
    assert measure_change(many, many).num_bins == drift.MAX_NAMED_BINS + 1 and measure_change(many, many).psi == 0.0
    assert measure_change(many, Distribution({})) is None and measure_change(Distribution({}), many) is None


def test_a_change_counts_from_the_threshold_on_and_beyond_chance():
    before, now = Distribution({"a": 50, "b": 50}), Distribution({"a": 75, "b": 25})
    found = measure_change(before, now)
    assert found.psi == pytest.approx(0.27, abs=0.02) and found.psi > found.chance_psi
    assert [found.level(0.1, 0.25), found.level(0.1, 0.4), found.level(0.3, 0.4)] == ["large", "some", "none"]
    few = measure_change(Distribution({"a": 2, "b": 2}), Distribution({"a": 3, "b": 1}))
    assert few.psi > 0.1 and few.level(0.1, 0.25) == "none"


def quantiles_of(values):
    """A distribution as a profile keeps it."""
    finite = values[np.isfinite(values)]
    kept = np.quantile(finite, np.linspace(0, 1, 1000), method="inverted_cdf").tolist() if len(finite) else []
    return Distribution({}, num_independent=float(len(values)), quantiles=kept, missing=1 - len(finite) / len(values))


def plain_index(before, now):
    """The index over deciles with room below, above and for what is not finite; half a count of a thousand each."""
    known = before[np.isfinite(before)]
    inner = np.unique(np.quantile(known, np.arange(1, 10) / 10, method="inverted_cdf")) if len(known) else []

    def shares(values):
        finite = values[np.isfinite(values)]
        below, above = finite < min(known, default=np.inf), finite > max(known, default=-np.inf)
        places = np.digitize(finite[~below & ~above], inner, right=True)
        inside = np.bincount(places, minlength=len(inner) + 1)
        counts = [(~np.isfinite(values)).sum(), below.sum(), *inside, (above & ~below).sum()]
        return np.array(counts) / len(values)

    p, q = shares(now), shares(before)
    used = p + q > 0
    p, q = (1000 * each[used] + 0.5 for each in (p, q))
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum((p - q) * np.log(p / q))), int(used.sum())


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (0.3, 1.0), (1.0, 1.0), (0.0, 2.0)])
@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e6])
def test_the_index_of_floating_point_numbers_is_that_of_all_their_values_in_deciles(shift, scale, unit):
    draw = np.random.default_rng(3)
    before = 1000 * unit + unit * draw.normal(size=20_000)
    now = 1000 * unit + unit * (shift + scale * draw.normal(size=20_000))
    index, num_bins = plain_index(before, now)
    found = measure_change(quantiles_of(before), quantiles_of(now))
    assert found.psi == pytest.approx(index, rel=0.05, abs=0.005)
    assert found.level(0.1, 0.25) == ("none" if shift < 0.3 and scale == 1.0 else found.level(0.1, 0.25))
    assert found.num_bins == num_bins and found.shifts[0].bin


def test_numbers_that_are_all_the_same_have_not_changed_and_others_have():
    same, other = quantiles_of(np.full(50, 2.5)), quantiles_of(np.full(50, 2.75))
    assert measure_change(same, same).psi == 0.0 and measure_change(same, same).num_bins == 1
    found = measure_change(same, other)
    assert found.level(0.1, 0.25) == "large" and {each.bin for each in found.shifts} == {"up to 2.5", "above 2.5"}
    assert measure_change(same, Distribution({"1": 3})) is None and measure_change(same, Distribution({})) is None


def test_equal_numbers_are_called_changed_once_in_twenty_times():
    draw = np.random.default_rng(4)
    beyond = 0
    for _ in range(400):
        found = measure_change(quantiles_of(draw.normal(size=900)), quantiles_of(draw.normal(size=400)))
        beyond += found.psi > found.chance_psi
    assert 0.015 < beyond / 400 < 0.1


NUMBERS = np.random.default_rng(5).normal(size=2000)
HOLES = np.where(np.arange(2000) % 10 < 6, np.nan, NUMBERS)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        (np.full(2000, 5.0), np.full(2000, 3.0), "below 5"),
        (np.full(2000, 3.0), np.full(2000, 5.0), "above 3"),
        (np.maximum(NUMBERS, 0), np.where(NUMBERS <= 0, -999, NUMBERS), "below 0"),
        (np.zeros(2000), np.full(2000, -999.0), "below 0"),
        (NUMBERS, HOLES, "not finite"),
        (HOLES, NUMBERS, "not finite"),
        (NUMBERS, np.full(2000, np.nan), "not finite"),
        (np.full(2000, np.nan), NUMBERS, "not finite"),
        (np.where(NUMBERS > 2, np.inf, NUMBERS), np.where(NUMBERS > 0, np.inf, NUMBERS), "not finite"),
    ],
)
def test_what_lies_outside_of_all_that_was_there_and_what_is_missing_is_a_change(before, now, named):
    found = measure_change(quantiles_of(before), quantiles_of(now))
    index, num_bins = plain_index(before, now)
    assert found.psi == pytest.approx(index, rel=0.2) and found.num_bins == num_bins
    assert found.level(0.1, 0.25) == "large" and named in {each.bin for each in found.shifts}
    assert measure_change(quantiles_of(before), quantiles_of(before)).psi == 0.0


@pytest.mark.parametrize(("before", "now"), [({"255": 640}, {"0": 640}), ({"0": 640}, {"255": 640})])
def test_black_images_are_not_white_ones(before, now):
    found = measure_change(Distribution(before, is_ordered=True), Distribution(now, is_ordered=True))
    assert found.psi > 10 and found.num_bins == 2
    rest = measure_change(Distribution({"0": 95, "9": 5}, True), Distribution({"0": 95, "200": 5}, True))
    assert {(each.bin, each.before, each.now) for each in rest.shifts} == {
        ("0", 0.95, 0.95),
        ("1 to 9", 0.05, 0.0),
        ("10 to 200", 0.0, 0.05),
    }


def test_a_profile_that_does_not_say_what_is_missing_is_compared_by_its_numbers():
    old = Distribution({}, quantiles=quantiles_of(NUMBERS).quantiles)
    assert measure_change(old, quantiles_of(HOLES)).level(0.1, 0.25) == "none"
    assert measure_change(old, quantiles_of(np.full(9, np.nan))) is None
