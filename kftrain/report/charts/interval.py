"""Values on a common axis: metrics with intervals beside their baselines, and the slices of one metric.

Both are dot charts, one row per value, names on the left and figures on the right: differences between rows
matter here, and bars from zero would hide them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kftrain.report import wording
from kftrain.report.charts import svg
from kftrain.report.charts.ticks import Scale, linear_scale
from kftrain.run.documents import Interval

ROW_PX = 34
SLICE_ROW_PX = 21
BOTTOM_PX = 26
MAX_NAME_CHARACTERS = 28
BOLD_PX = 7.6
"""Width of a character of the bold figures."""


@dataclass(frozen=True)
class IntervalRow:
    """A value, with its interval if it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    style: str = "series-0"
    """CSS class: `series-<n>` for what the chart is about, `plain` for what it is compared with."""

    @property
    def shown(self) -> tuple[str, str]:
        """The figure and, below it, its interval."""
        if self.low is None or self.high is None:
            return wording.number(float(self.value)), ""
        return wording.interval(self.value, self.low, self.high)


@dataclass(frozen=True)
class Guide:
    """A vertical line across all rows."""

    name: str
    value: float


@dataclass(frozen=True)
class SliceRow:
    """One slice: its value of the metric and whether that is worse than the whole (None: cannot be told)."""

    name: str
    value: float
    num_samples: int
    worse: bool | None = None
    bounds: Interval | None = None
    """Its interval; bounds that are not known are infinite."""

    @property
    def shown(self) -> tuple[str, str]:
        """The figure, and its interval where that is known."""
        if self.bounds is None or not (math.isfinite(self.bounds.low) and math.isfinite(self.bounds.high)):
            return wording.number(float(self.value)), ""
        return wording.interval(self.value, self.bounds.low, self.bounds.high)


def interval_chart(
    rows: Sequence[IntervalRow], guides: Sequence[Guide] = (), *, description: str, signed: bool = False
) -> Markup:
    """A row per value: a dot, its interval as a bar, its figure on the right. `signed` figures have a plus sign."""
    figures = [_signed(row) if signed else row.shown for row in rows]
    names = [wording.ellipsis(row.name, MAX_NAME_CHARACTERS) for row in rows]
    scale = _scale([v for row in rows for v in (row.value, row.low, row.high)] + [g.value for g in guides])
    height = ROW_PX * len(rows)
    left = _names_px(names)
    parts = svg.horizontal_axis(scale, height, grid_top=0)
    parts += [part for guide in guides for part in _guide(guide, scale, height)]
    for index, row in enumerate(rows):
        y = ROW_PX * (index + 0.5)
        parts += [svg.text(names[index], 0, y, style="row", dx=-left), *_interval(row, scale, y)]
        parts += _figure(*figures[index], y)
    right = 22 + max(max(wording.width_px(value, BOLD_PX), wording.width_px(below)) for value, below in figures)
    padding = svg.Padding(18 if guides else 4, right, BOTTOM_PX, left)
    return svg.drawing(parts, height, padding, description)


def slice_chart(rows: Sequence[SliceRow], whole: float, *, description: str) -> Markup:
    """A row per slice: a dot on its interval; the whole is a vertical line; colour tells worse from better."""
    names = [wording.ellipsis(row.name, MAX_NAME_CHARACTERS) for row in rows]
    values = [row.shown[0] for row in rows]
    counts = [wording.count(row.num_samples) for row in rows]
    value_px = 16 + max(wording.width_px(value, BOLD_PX) for value in values)
    right = value_px + 14 + max(wording.width_px(count) for count in [*counts, "samples"])
    edges = [edge for row in rows if row.bounds for edge in (row.bounds.low, row.bounds.high)]
    scale = _scale([row.value for row in rows] + [whole] + edges)
    height = SLICE_ROW_PX * len(rows)
    left = _names_px(names)
    parts = [*svg.horizontal_axis(scale, height, grid_top=0), *_guide(Guide("all", whole), scale, height)]
    parts.append(svg.text("samples", "100%", -10, anchor="end", dx=right))
    for index, row in enumerate(rows):
        y = SLICE_ROW_PX * (index + 0.5)
        parts += [svg.text(names[index], 0, y, style="row", dx=-left), *_slice(row, whole, scale, y)]
        parts.append(svg.text(values[index], "100%", y, style="figure", anchor="end", dx=value_px))
        parts.append(svg.text(counts[index], "100%", y, anchor="end", dx=right))
    return svg.drawing(parts, height, svg.Padding(18, right, BOTTOM_PX, left), description)


def _names_px(names: Sequence[str]) -> float:
    return 18 + max(wording.width_px(name, 7.2) for name in names)


def _scale(values: Sequence[float | None]) -> Scale:
    """An axis from the lowest to the highest value with a little room, so that no dot stands on the edge."""
    held = [v for v in values if v is not None and wording.finite(v) is not None] or [0.0]
    room = (max(held) - min(held)) / 25
    return linear_scale([min(held) - room, max(held) + room], 7, loose=False)


def _guide(guide: Guide, scale: Scale, height: float) -> list[Markup]:
    if wording.finite(guide.value) is None:
        return []
    at = scale.fraction(guide.value)
    name = wording.ellipsis(guide.name, MAX_NAME_CHARACTERS)
    anchor = "start" if at < 0.15 else "end" if at > 0.85 else "middle"
    return [
        svg.line(svg.across(at), -2, svg.across(at), height, "guide"),
        svg.text(name, svg.across(at), -10, anchor=anchor),
    ]


def _interval(row: IntervalRow, scale: Scale, y: float) -> list[Markup]:
    if wording.finite(row.value) is None:
        return []
    parts = []
    if row.low is not None and row.high is not None and None not in (wording.finite(row.low), wording.finite(row.high)):
        low, high = (svg.across(scale.fraction(edge)) for edge in (row.low, row.high))
        parts.append(svg.line(low, y, high, y, f"interval {row.style}"))
    dot = svg.element("circle", cx=svg.across(scale.fraction(row.value)), cy=y, r=4.5, class_=f"dot {row.style}")
    return [*parts, dot]


def _figure(value: str, below: str, y: float) -> list[Markup]:
    if not below:
        return [svg.text(value, "100%", y, style="figure", dx=16)]
    return [svg.text(value, "100%", y - 6, style="figure", dx=16), svg.text(below, "100%", y + 8, dx=16)]


def _slice(row: SliceRow, whole: float, scale: Scale, y: float) -> list[Markup]:
    """A dot on its interval; without one, tied to the value of the whole."""
    if wording.finite(row.value) is None:
        return []
    style = {True: "worse", False: "better", None: "plain"}[row.worse]
    at = svg.across(scale.fraction(row.value))
    parts = []
    if row.bounds is not None:
        low, high = (
            edge if wording.finite(bound) is None else scale.fraction(bound)
            for bound, edge in ((row.bounds.low, 0.0), (row.bounds.high, 1.0))
        )
        parts.append(svg.line(svg.across(low), y, svg.across(high), y, f"interval {style}"))
    elif wording.finite(whole) is not None:
        parts.append(svg.line(svg.across(scale.fraction(whole)), y, at, y, f"stem {style}"))
    return [*parts, svg.element("circle", cx=at, cy=y, r=4, class_=f"dot {style}")]


def _signed(row: IntervalRow) -> tuple[str, str]:
    if row.low is None or row.high is None:
        return f"{'+' if row.value > 0 else ''}{wording.number(float(row.value))}", ""
    return wording.interval(row.value, row.low, row.high, signed=True)
