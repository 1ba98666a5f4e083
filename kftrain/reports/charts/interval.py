"""Values on a common axis: metrics with intervals beside their baselines, and the slices of one metric.

Both are dot charts, one row per value, names on the left and figures on the right: differences between rows
matter here, and bars from zero would hide them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kftrain.reports import wording
from kftrain.reports.charts import svg
from kftrain.reports.charts.ticks import Scale, make_linear_scale
from kftrain.run.documents import Interval

ROW_PX = 34
SLICE_ROW_PX = 21
BOTTOM_PX = 26
MAX_NAME_CHARACTERS = 28
BOLD_PX = 7.6
"""Width of a character in bold figures."""


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
    def figures(self) -> tuple[str, str]:
        """The figure, and the interval that stands below it."""
        if self.low is None or self.high is None:
            return wording.format_number(float(self.value)), ""
        return wording.format_interval(self.value, self.low, self.high)


@dataclass(frozen=True)
class Guide:
    """A vertical line across all rows."""

    name: str
    value: float


@dataclass(frozen=True)
class SliceRow:
    """A slice's value of the metric; `worse` than the whole may be None, if that cannot be told."""

    name: str
    value: float
    num_samples: int
    worse: bool | None = None
    bounds: Interval | None = None
    """Interval of the value; unknown bounds are infinite."""

    @property
    def figures(self) -> tuple[str, str]:
        """The figure, and its interval if that is known."""
        if self.bounds is None or not (math.isfinite(self.bounds.low) and math.isfinite(self.bounds.high)):
            return wording.format_number(float(self.value)), ""
        return wording.format_interval(self.value, self.bounds.low, self.bounds.high)


def draw_interval_chart(
    rows: Sequence[IntervalRow], guides: Sequence[Guide] = (), *, description: str, signed: bool = False
) -> Markup:
    """Draw a row per value: a dot, its interval as a bar, its figure on the right; `signed` figures get a plus sign."""
    figures = [_format_signed(row) if signed else row.figures for row in rows]
    names = [wording.cut_text(row.name, MAX_NAME_CHARACTERS) for row in rows]
    scale = _choose_scale([v for row in rows for v in (row.value, row.low, row.high)] + [g.value for g in guides])
    height = ROW_PX * len(rows)
    left = _measure_names_px(names)
    parts = svg.draw_horizontal_axis(scale, height, grid_top=0)
    parts += [part for guide in guides for part in _draw_guide(guide, scale, height)]
    for index, row in enumerate(rows):
        y = ROW_PX * (index + 0.5)
        parts += [svg.draw_text(names[index], 0, y, style="row", dx=-left), *_draw_interval(row, scale, y)]
        parts += _draw_figure(*figures[index], y)
    right = 22 + max(
        max(wording.estimate_width_px(value, BOLD_PX), wording.estimate_width_px(below)) for value, below in figures
    )
    padding = svg.Padding(18 if guides else 4, right, BOTTOM_PX, left)
    return svg.frame_drawing(parts, height, padding, description)


def draw_slice_chart(rows: Sequence[SliceRow], whole: float, *, description: str) -> Markup:
    """Draw a row per slice: a dot on its interval; the whole is a vertical line, colour tells worse from better."""
    names = [wording.cut_text(row.name, MAX_NAME_CHARACTERS) for row in rows]
    values = [row.figures[0] for row in rows]
    counts = [wording.format_count(row.num_samples) for row in rows]
    value_px = 16 + max(wording.estimate_width_px(value, BOLD_PX) for value in values)
    right = value_px + 14 + max(wording.estimate_width_px(count) for count in [*counts, "samples"])
    edges = [edge for row in rows if row.bounds for edge in (row.bounds.low, row.bounds.high)]
    scale = _choose_scale([row.value for row in rows] + [whole] + edges)
    height = SLICE_ROW_PX * len(rows)
    left = _measure_names_px(names)
    parts = [*svg.draw_horizontal_axis(scale, height, grid_top=0), *_draw_guide(Guide("all", whole), scale, height)]
    parts.append(svg.draw_text("samples", "100%", -10, anchor="end", dx=right))
    for index, row in enumerate(rows):
        y = SLICE_ROW_PX * (index + 0.5)
        parts += [svg.draw_text(names[index], 0, y, style="row", dx=-left), *_draw_slice(row, whole, scale, y)]
        parts.append(svg.draw_text(values[index], "100%", y, style="figure", anchor="end", dx=value_px))
        parts.append(svg.draw_text(counts[index], "100%", y, anchor="end", dx=right))
    return svg.frame_drawing(parts, height, svg.Padding(18, right, BOTTOM_PX, left), description)


def _measure_names_px(names: Sequence[str]) -> float:
    return 18 + max(wording.estimate_width_px(name, 7.2) for name in names)


def _choose_scale(values: Sequence[float | None]) -> Scale:
    """Return an axis from the lowest to the highest value with a little room, so that no dot stands on the edge."""
    finite = [v for v in values if v is not None and wording.to_finite(v) is not None] or [0.0]
    room = (max(finite) - min(finite)) / 25
    return make_linear_scale([min(finite) - room, max(finite) + room], 7, loose=False)


def _draw_guide(guide: Guide, scale: Scale, height: float) -> list[Markup]:
    if wording.to_finite(guide.value) is None:
        return []
    at = scale.fraction(guide.value)
    name = wording.cut_text(guide.name, MAX_NAME_CHARACTERS)
    anchor = "start" if at < 0.15 else "end" if at > 0.85 else "middle"
    return [
        svg.draw_line(svg.place_across(at), -2, svg.place_across(at), height, "guide"),
        svg.draw_text(name, svg.place_across(at), -10, anchor=anchor),
    ]


def _draw_interval(row: IntervalRow, scale: Scale, y: float) -> list[Markup]:
    if wording.to_finite(row.value) is None:
        return []
    parts = []
    if (
        row.low is not None
        and row.high is not None
        and None not in (wording.to_finite(row.low), wording.to_finite(row.high))
    ):
        low, high = (svg.place_across(scale.fraction(edge)) for edge in (row.low, row.high))
        parts.append(svg.draw_line(low, y, high, y, f"interval {row.style}"))
    dot = svg.make_element(
        "circle", cx=svg.place_across(scale.fraction(row.value)), cy=y, r=4.5, class_=f"dot {row.style}"
    )
    return [*parts, dot]


def _draw_figure(value: str, below: str, y: float) -> list[Markup]:
    if not below:
        return [svg.draw_text(value, "100%", y, style="figure", dx=16)]
    return [svg.draw_text(value, "100%", y - 6, style="figure", dx=16), svg.draw_text(below, "100%", y + 8, dx=16)]


def _draw_slice(row: SliceRow, whole: float, scale: Scale, y: float) -> list[Markup]:
    """Draw a dot on its interval; a dot without interval is tied to the value of the whole."""
    if wording.to_finite(row.value) is None:
        return []
    style = {True: "worse", False: "better", None: "plain"}[row.worse]
    at = svg.place_across(scale.fraction(row.value))
    parts = []
    if row.bounds is not None:
        low, high = (
            edge if wording.to_finite(bound) is None else scale.fraction(bound)
            for bound, edge in ((row.bounds.low, 0.0), (row.bounds.high, 1.0))
        )
        parts.append(svg.draw_line(svg.place_across(low), y, svg.place_across(high), y, f"interval {style}"))
    elif wording.to_finite(whole) is not None:
        parts.append(svg.draw_line(svg.place_across(scale.fraction(whole)), y, at, y, f"stem {style}"))
    return [*parts, svg.make_element("circle", cx=at, cy=y, r=4, class_=f"dot {style}")]


def _format_signed(row: IntervalRow) -> tuple[str, str]:
    if row.low is None or row.high is None:
        return f"{'+' if row.value > 0 else ''}{wording.format_number(float(row.value))}", ""
    return wording.format_interval(row.value, row.low, row.high, signed=True)
