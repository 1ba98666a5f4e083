"""Axes: ranges and ticks at 1, 2 or 5 times a power of ten, linear or logarithmic.

All functions are pure and total for finite values within 1e300: equal ends, tiny spans on large numbers and
negative ranges give a sane axis. Ticks are integer multiples of a decimal step, computed with one rounding
each, so that labels are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kftrain.reports.wording import LARGE_UNITS, MINUS, format_decimals

LOG_SCALE_FROM_RATIO = 50.0
"""Positive values that span more than this are drawn on a logarithmic scale."""

MIN_RELATIVE_SPAN = 1e-6
"""A narrower range is rounding noise and is drawn as a constant."""

ZERO_BELOW = 1e-290
"""Magnitudes below this are drawn as zero; steps between them would not be normal numbers."""


@dataclass(frozen=True)
class Scale:
    """A range of values with its ticks; `fraction` places a value on it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    @property
    def labels(self) -> list[str]:
        """Labels of the ticks."""
        if self.logarithmic:
            return [format_ticks([tick])[0] for tick in self.ticks]
        return format_ticks(self.ticks)

    def fraction(self, value: float) -> float:
        """Return a value's position: 0 at the low end, 1 at the high end; values outside are held at the ends."""
        low, high, at = (
            (_log10(v) for v in (self.low, self.high, value)) if self.logarithmic else (self.low, self.high, value)
        )
        return min(max((at - low) / (high - low), 0.0), 1.0)


def make_linear_scale(
    values: Iterable[float], max_ticks: int = 5, *, loose: bool = True, smallest_step: float = 0.0
) -> Scale:
    """Return an axis that holds the values: its ends are ticks (`loose`), or the extreme values with ticks between.

    `smallest_step` is 1 where a fraction makes no sense, as for optimizer steps.
    """
    low, high = _widen_range(values)
    ticks = choose_ticks(low, high, max_ticks, smallest_step)
    if loose:
        return Scale(ticks[0], ticks[-1], ticks)
    return Scale(low, high, tuple(tick for tick in ticks if low <= tick <= high))


def make_log_scale(values: Iterable[float], max_ticks: int = 5) -> Scale:
    """Return a logarithmic axis: ticks at powers of ten, and at 2 and 5 times them if there is room.

    `max_ticks`: 3 or more.
    """
    positive = [v for v in values if v > 0] or [1.0]
    first, last = math.floor(_log10(min(positive))), math.ceil(_log10(max(positive)))
    last = max(last, first + 1)
    if last - first <= max(1, (max_ticks - 1) // 3):
        ticks = [mantissa * 10.0**power for power in range(first, last) for mantissa in (1, 2, 5)] + [10.0**last]
        scale = _trim_ticks(ticks, min(positive), max(positive))
        if len(scale.ticks) <= max_ticks:
            return scale
    stride = math.ceil((last - first) / (max_ticks - 1))
    last = first + stride * math.ceil((last - first) / stride)
    ticks = [10.0**power for power in range(first, last + 1, stride)]
    return Scale(ticks[0], ticks[-1], tuple(ticks), logarithmic=True)


def choose_scale(values: Sequence[float], max_ticks: int = 5, *, from_zero: bool = False) -> Scale:
    """Choose the axis for these values: logarithmic where they are positive and span a large ratio, else linear.

    `from_zero` extends a linear axis to zero, for amounts whose ratio matters.
    """
    if not from_zero and len(values) > 1 and min(values) > 0 and max(values) / min(values) > LOG_SCALE_FROM_RATIO:
        return make_log_scale(values, max_ticks)
    return make_linear_scale([*values, 0.0] if from_zero else values, max_ticks)


def choose_ticks(low: float, high: float, max_ticks: int = 5, smallest_step: float = 0.0) -> tuple[float, ...]:
    """Return ascending multiples of 1, 2 or 5 times a power of ten that enclose `low` < `high`, in the smallest step.

    At least two; at most `max_ticks` (which is at least 3).
    """
    wanted = max((high - low) / (max_ticks - 1), smallest_step)
    power = math.floor(math.log10(wanted)) - 1
    while True:
        for mantissa in (1, 2, 5):
            first, last = (_count_steps(edge, mantissa, power) for edge in (low, high))
            first, last = math.floor(first), math.ceil(last)
            large_enough = _make_decimal(mantissa, power) >= smallest_step
            if large_enough and last - first < max_ticks:
                return tuple(_make_decimal(index * mantissa, power) for index in range(first, last + 1))
        power += 1


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Label evenly spaced ticks with the decimals that tell them apart; millions as `2M`, small ones as `2e-5`."""
    largest = max(abs(tick) for tick in ticks)
    step = min((after - before for before, after in pairwise(ticks)), default=largest) or 1.0
    if 1e6 <= largest < 1e15:
        unit, suffix = next(unit for unit in LARGE_UNITS if largest >= unit[0])
        return [
            "0" if tick == 0 else format_decimals(tick / unit, count_decimals(step / unit)) + suffix for tick in ticks
        ]
    if largest == 0 or (1e-3 <= largest < 1e6 and step >= 1e-6):
        return ["0" if tick == 0 else format_decimals(tick, count_decimals(step)) for tick in ticks]
    return [_format_scientific(tick, step) for tick in ticks]


def count_decimals(step: float) -> int:
    """Count the decimals that multiples of a step need."""
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _widen_range(values: Iterable[float]) -> tuple[float, float]:
    numbers = [0.0 if abs(v) < ZERO_BELOW else v for v in values] or [0.0, 1.0]
    low, high = min(numbers), max(numbers)
    size = max(abs(low), abs(high))
    if high - low > MIN_RELATIVE_SPAN * size:
        return low, high
    margin = size / 10 or 1.0
    return low - margin, high + margin


def _count_steps(value: float, mantissa: int, power: int) -> float:
    """Divide a value by the step `mantissa * 10**power`; whole numbers of steps come out exactly."""
    exact = value / _make_decimal(mantissa, power)
    nearest = round(exact)
    return nearest if abs(exact - nearest) < 1e-12 * max(1.0, abs(exact)) else exact


def _make_decimal(digits: int, power: int) -> float:
    return float(digits * 10**power) if power >= 0 else digits / 10**-power


def _log10(value: float) -> float:
    return math.log10(value) if value > ZERO_BELOW else math.log10(ZERO_BELOW)


def _trim_ticks(ticks: list[float], low: float, high: float) -> Scale:
    first = max(index for index, tick in enumerate(ticks) if tick <= low or index == 0)
    last = min(index for index, tick in enumerate(ticks) if tick >= high or index == len(ticks) - 1)
    kept = ticks[first : max(last, first + 1) + 1]
    return Scale(kept[0], kept[-1], tuple(kept), logarithmic=True)


def _format_scientific(value: float, step: float) -> str:
    if value == 0:
        return "0"
    decimals = max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9))
    mantissa, exponent = f"{abs(value):.{decimals}e}".split("e")
    return f"{MINUS if value < 0 else ''}{mantissa}e{int(exponent)}"
