from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kftrain.reports.charts.ticks import choose_scale, choose_ticks, format_ticks, make_linear_scale, make_log_scale

finite = st.floats(min_value=-1e300, max_value=1e300, allow_subnormal=False)
several = st.lists(finite, min_size=1, max_size=8)
quick = settings(derandomize=True, max_examples=150, deadline=None)


def leading_digits(step: float) -> float:
    return step / 10 ** math.floor(math.log10(step) + 1e-9)


@quick
@given(several, st.integers(min_value=3, max_value=9))
def test_a_loose_axis_holds_all_values_between_ascending_nice_ticks(values: list[float], max_ticks: int) -> None:
    scale = make_linear_scale(values, max_ticks)
    steps = [after - before for before, after in pairwise(scale.ticks)]
    assert 2 <= len(scale.ticks) <= max_ticks
    assert all(step > 0 for step in steps)
    assert scale.low <= min(values) + steps[0] * 1e-9
    assert max(values) - steps[0] * 1e-9 <= scale.high
    assert all(0.0 <= scale.fraction(value) <= 1.0 for value in values)


@example(-4.952837954403293e-07, 4.875, 4)
@quick
@given(
    st.floats(min_value=-1e6, max_value=1e6, allow_subnormal=False),
    st.floats(min_value=1e-3, max_value=1e6),
    st.integers(min_value=3, max_value=9),
)
def test_steps_are_one_two_or_five_times_a_power_of_ten_and_the_smallest_that_fit(
    low: float, span: float, max_ticks: int
) -> None:
    ticks = choose_ticks(low, low + span, max_ticks)
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    assert min(abs(leading_digits(step) - nice) for nice in (1, 2, 5, 10)) < 1e-6
    power = math.floor(math.log10(step) + 1e-9)
    digits = round(step / 10.0**power)
    # In fractions: an edge that lies a millionth of a step beyond a tick needs one more.
    finer = {1: Fraction(1, 2), 2: 1, 5: 2, 10: 5}[digits] * Fraction(10) ** power
    assert math.ceil(Fraction(low + span) / finer) - math.floor(Fraction(low) / finer) >= max_ticks


@quick
@given(several)
def test_labels_of_neighbouring_ticks_differ_and_read_back_as_the_tick(values: list[float]) -> None:
    scale = make_linear_scale(values)
    labels = scale.labels
    assert len(set(labels)) == len(labels)
    step = scale.ticks[1] - scale.ticks[0]
    for tick, label in zip(scale.ticks, labels, strict=True):
        assert number_in(label) == pytest.approx(tick, abs=step * 1e-3)


def number_in(label: str) -> float:
    units = {"T": 1e12, "B": 1e9, "M": 1e6}
    text = label.replace("\u2212", "-").replace(",", "")
    return float(text[:-1]) * units[text[-1]] if text[-1] in units else float(text)


@quick
@given(
    st.lists(st.floats(min_value=1e-280, max_value=1e300), min_size=2, max_size=8),
    st.integers(min_value=3, max_value=9),
)
@example([1.0, 6.0], 3)  # 1, 2, 5 and 10 are one too many
def test_a_log_axis_holds_all_positive_values(values: list[float], max_ticks: int) -> None:
    scale = make_log_scale(values, max_ticks)
    assert scale.low <= min(values) * (1 + 1e-9)
    assert max(values) * (1 - 1e-9) <= scale.high
    assert list(scale.ticks) == sorted(set(scale.ticks))
    assert 2 <= len(scale.ticks) <= max_ticks
    assert len(set(scale.labels)) == len(scale.labels)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 400], ["0", "100", "200", "300", "400"]),
        ([1.55, 6.07], ["0", "2", "4", "6", "8"]),
        ([0.0, 1e-3], ["0", "0.0005", "0.0010"]),
        ([0, 100_000], ["0", "50,000", "100,000"]),
        ([0, 3_200_000], ["0", "1M", "2M", "3M", "4M"]),
        ([-0.03, 0.02], ["\u22120.04", "\u22120.02", "0", "0.02"]),
        ([2e-5, 9e-5], ["2e-5", "4e-5", "6e-5", "8e-5", "1.0e-4"]),
        ([5.0], ["4.5", "5.0", "5.5"]),
    ],
)
def test_ticks_are_what_a_person_would_write(values: list[float], labels: list[str]) -> None:
    assert make_linear_scale(values).labels == labels


def test_steps_of_training_have_no_fractions() -> None:
    assert make_linear_scale([1, 3], 6, loose=False, smallest_step=1.0).ticks == (1.0, 2.0, 3.0)


def test_a_tight_axis_ends_at_the_values() -> None:
    scale = make_linear_scale([37, 412], 6, loose=False)
    assert (scale.low, scale.high, scale.ticks) == (37, 412, (100, 200, 300, 400))


def test_only_positive_values_over_a_large_ratio_get_a_log_axis() -> None:
    assert choose_scale([0.1, 10.0]).logarithmic
    assert not choose_scale([0.1, 1.0]).logarithmic
    assert not choose_scale([0.0, 10.0]).logarithmic
    assert not choose_scale([0.1, 10.0], from_zero=True).logarithmic
    assert choose_scale([3.0, 8.0], from_zero=True).low == 0


def test_a_log_axis_places_powers_at_equal_distances() -> None:
    scale = make_log_scale([1, 1000])
    assert [scale.fraction(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert format_ticks([0.01]) == ["0.01"]
