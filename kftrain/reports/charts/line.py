"""Curves over steps, samples, tokens or hours: one or several series, directly labelled, with reference lines.

A curve of any length costs a bounded number of bytes: per pixel column its first, lowest, highest and last
value are kept, so no spike is lost. Long noisy curves get a running mean on top. Values that are not finite
interrupt the curve and are marked on the axis. Positive values over a large ratio get a logarithmic axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from kftrain.reports import wording
from kftrain.reports.charts import svg
from kftrain.reports.charts.ticks import Scale, choose_scale, make_linear_scale

NUM_COLUMNS = 360
"""Number of pixel columns to which long curves are thinned."""

SMOOTH_FROM_POINTS = 80
"""Curves with fewer points are drawn as they are."""

WINDOWS_PER_CURVE = 25
"""The running mean goes over this fraction of a curve."""

MAX_NAME_CHARACTERS = 18
MAX_DOTS = 12
"""Curves with more points show only their last one as a dot."""

TICK_PX = 30
"""Height per tick of the vertical axis."""

MIN_LEFT_PX = 53
"""Room for tick labels, equal in all charts of a page unless one needs more."""

NARROW_PX = 330
"""Width of the narrowest chart, for which names of references are kept off the curves."""

FREE_PX = 10
"""Distance from the middle of a name to a curve that leaves the name readable."""

BOLD_PX = 7.3
PADDING_TOP_PX, PADDING_BOTTOM_PX = 8, 26


@dataclass(frozen=True)
class Series:
    """A curve: points `(x, value)`, x ascending; values may be NaN or infinite."""

    name: str
    points: Sequence[tuple[float, float]]
    smooth: bool = False
    """True: a running mean is drawn once there are enough points."""
    figure: str = ""
    """Figure beside the name at the right end; empty: the last value."""

    @cached_property
    def finite_points(self) -> list[tuple[float, float]]:
        """Points with finite x and value, which can be drawn."""
        return [(x, y) for x, y in self.points if wording.to_finite(x) is not None and wording.to_finite(y) is not None]

    @property
    def window(self) -> int:
        """Number of points that the running mean goes over; 0 for none."""
        many = self.smooth and len(self.points) >= SMOOTH_FROM_POINTS
        return 2 * (len(self.points) // WINDOWS_PER_CURVE // 2) + 1 if many else 0


@dataclass(frozen=True)
class ReferenceLine:
    """A level to read the curve against: a baseline, a limit."""

    label: str
    value: float


@dataclass(frozen=True)
class _Frame:
    """The two axes of one chart and its height."""

    across: Scale
    up: Scale
    height: float

    def x(self, value: float) -> float:
        return svg.CURVE_WIDTH * self.across.fraction(value)

    def y(self, value: float) -> float:
        return self.height * (1 - self.up.fraction(value))


def draw_line_chart(
    series: Sequence[Series],
    references: Sequence[ReferenceLine] = (),
    *,
    description: str,
    x_range: tuple[float, float] | None = None,
    height: float = 120,
    from_zero: bool = False,
    max_x_ticks: int = 5,
    x_name: str = "step",
    x_is_whole: bool = True,
) -> Markup:
    """Draw the curves, or return one sentence if no value can be drawn.

    Several curves are named at their right ends; a single one is named by the caption. `x_range` gives small
    multiples one axis; `x_is_whole`: fractions make no sense on it.
    """
    drawn = [curve for curve in series if curve.finite_points]
    if not drawn:
        return Markup('<p class="empty">No finite value was recorded.</p>')
    levels = [curve for curve in references if wording.to_finite(curve.value) is not None]
    across = _choose_x_scale(drawn, x_range, max_x_ticks, x_is_whole)
    frame = _Frame(across, _choose_y_scale(drawn, levels, height, from_zero), height)
    parts = [
        *svg.draw_vertical_axis(frame.up, height),
        *svg.draw_horizontal_axis(frame.across, height),
        _draw_x_title(x_name, frame),
    ]
    parts += [svg.draw_line(0, frame.y(level.value), "100%", frame.y(level.value), "reference") for level in levels]
    curves = [part for index, curve in enumerate(drawn) for part in _draw_curve(curve, index, frame)]
    parts.append(svg.stretch_curves(curves, height))
    parts += [part for index, curve in enumerate(drawn) for part in _draw_marks(curve, index, frame)]
    parts += _draw_reference_names(levels, drawn, frame)
    names = [_make_end_name(curve) for curve in drawn] if len(series) > 1 else []
    parts += _draw_end_names(names, drawn, frame)
    left = max(MIN_LEFT_PX, 12 + max(wording.estimate_width_px(label) for label in frame.up.labels))
    right = max([18, *(16 + wording.estimate_width_px(name, BOLD_PX) for name in names)])
    return svg.frame_drawing(parts, height, svg.Padding(PADDING_TOP_PX, right, PADDING_BOTTOM_PX, left), description)


def is_logarithmic(
    series: Sequence[Series], references: Sequence[ReferenceLine] = (), *, from_zero: bool = False
) -> bool:
    """Return True if `draw_line_chart` takes a logarithmic axis, which the caption should say."""
    return _choose_y_scale(series, references, TICK_PX, from_zero).logarithmic


def thin_points(points: Sequence[tuple[float, float]], num_columns: int = NUM_COLUMNS) -> list[tuple[float, float]]:
    """Keep at most four points per column of x: first, lowest, highest and last. Short curves stay as they are."""
    if len(points) <= 4 * num_columns:
        return list(points)
    low, high = points[0][0], points[-1][0]
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        column = int((point[0] - low) / (high - low) * num_columns) if high > low else 0
        columns.setdefault(column, []).append(point)
    return [point for column in columns.values() for point in _keep_extremes(column)]


def compute_running_mean(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Return the centred mean over `window` points (odd); x values stay.

    At the start the window shrinks on both sides, or a steep beginning would be drawn too low; at the end on one
    side only, so that the last value is a mean as well.
    """
    half = window // 2
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    means = []
    for index, (x, _) in enumerate(points):
        reach = min(half, index)
        stop = min(index + reach + 1, len(points))
        means.append((x, (sums[stop] - sums[index - reach]) / (stop - index + reach)))
    return means


def _keep_extremes(column: list[tuple[float, float]]) -> list[tuple[float, float]]:
    kept = {0, len(column) - 1}
    kept.add(min(range(len(column)), key=lambda index: column[index][1]))
    kept.add(max(range(len(column)), key=lambda index: column[index][1]))
    return [column[index] for index in sorted(kept)]


def _choose_x_scale(
    series: list[Series], x_range: tuple[float, float] | None, max_x_ticks: int, x_is_whole: bool
) -> Scale:
    ends = x_range or [x for curve in series for x, _ in curve.finite_points]
    return make_linear_scale(ends, max_x_ticks, loose=False, smallest_step=1.0 if x_is_whole else 0.0)


def _choose_y_scale(series: Sequence[Series], levels: Sequence[ReferenceLine], height: float, from_zero: bool) -> Scale:
    values = [y for curve in series for _, y in curve.finite_points]
    values += [level.value for level in levels if wording.to_finite(level.value) is not None]
    return choose_scale(values, max(3, round(height / TICK_PX)), from_zero=from_zero)


def _draw_x_title(name: str, frame: _Frame) -> Markup:
    """Draw the name of the horizontal axis, left of its first tick label."""
    first, label = frame.across.ticks[:1], frame.across.labels[:1]
    near_edge = first and frame.across.fraction(first[0]) < 0.1
    dx = -8 - (wording.estimate_width_px(label[0]) / 2 if near_edge else 0)
    return svg.draw_text(name, 0, frame.height + 14, anchor="end", dx=dx)


def _draw_curve(series: Series, index: int, frame: _Frame) -> list[Markup]:
    raw = "curve faint" if series.window else "curve"
    parts = [_draw_path(_split_at_gaps(series), frame, f"{raw} series-{index}")]
    if series.window:
        mean = thin_points(compute_running_mean(series.finite_points, series.window))
        parts.append(_draw_path([mean], frame, f"curve series-{index}"))
    return parts


def _split_at_gaps(series: Series) -> list[list[tuple[float, float]]]:
    """Split the thinned curve wherever a value between two of its points is not finite."""
    gaps = [x for x, y in series.points if wording.to_finite(y) is None]
    segments: list[list[tuple[float, float]]] = [[]]
    passed = 0
    for point in thin_points(series.finite_points):
        if passed < len(gaps) and gaps[passed] < point[0]:
            segments.append([])
            while passed < len(gaps) and gaps[passed] < point[0]:
                passed += 1
        segments[-1].append(point)
    return [segment for segment in segments if segment]


def _draw_path(segments: list[list[tuple[float, float]]], frame: _Frame, style: str) -> Markup:
    """Draw segments as one path; a lone point becomes a line of no length, which round caps show as a dot."""
    data = []
    for segment in segments:
        places = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in segment]
        data.append("M" + "L".join(places if len(places) > 1 else places * 2))
    return svg.make_element("path", d="".join(data), class_=style, vector_effect="non-scaling-stroke")


def _draw_marks(series: Series, index: int, frame: _Frame) -> list[Markup]:
    """Draw every point of a short curve as a dot, the last of a long one, and axis ticks at values not finite."""
    points = series.finite_points
    dots = [(x, y, 2) for x, y in points[:-1]] if len(points) <= MAX_DOTS else []
    parts = [
        svg.make_element(
            "circle",
            cx=svg.place_across(frame.across.fraction(x)),
            cy=frame.y(y),
            r=r,
            class_=f"dot series-{index}",
        )
        for x, y, r in [*dots, (*points[-1], 3)]
    ]
    gaps = sorted({round(frame.x(x)) for x, y in series.points if wording.to_finite(y) is None})
    for place in gaps:
        at = svg.place_across(place / svg.CURVE_WIDTH)
        parts.append(svg.draw_line(at, frame.height - 7, at, frame.height, "not-finite"))
    return parts


def _make_end_name(series: Series) -> str:
    name = wording.cut_text(series.name, MAX_NAME_CHARACTERS)
    return f"{name} {series.figure or wording.format_number(series.finite_points[-1][1], 3)}"


def _draw_end_names(names: list[str], series: list[Series], frame: _Frame) -> list[Markup]:
    ends = [frame.y(curve.finite_points[-1][1]) for curve in series[: len(names)]]
    places = svg.spread_labels(ends, 0, frame.height)
    return [
        svg.draw_text(name, "100%", y, style=f"name series-{index}", dx=9)
        for index, (name, y) in enumerate(zip(names, places, strict=True))
    ]


@dataclass(frozen=True)
class _Place:
    """A place for the name of a reference: at one end of its line, above or below it."""

    at_end: bool
    y: float


def _draw_reference_names(levels: list[ReferenceLine], drawn: Sequence[Series], frame: _Frame) -> list[Markup]:
    """Draw names of references at the end of their lines, above or below, where no curve crosses them."""
    chosen = [_choose_place(level, drawn, frame) for level in levels]
    parts = []
    for at_end in (False, True):
        group = [index for index, place in enumerate(chosen) if place.at_end == at_end]
        rows = svg.spread_labels([chosen[index].y for index in group], 4, frame.height - 6)
        x, anchor, dx = ("100%", "end", -4) if at_end else (0, "start", 4)
        parts += [
            svg.draw_text(levels[index].label, x, y, style="tick halo", anchor=anchor, dx=dx)
            for index, y in zip(group, rows, strict=True)
        ]
    return parts


def _choose_place(level: ReferenceLine, drawn: Sequence[Series], frame: _Frame) -> _Place:
    """Return the first place that no curve comes near, else the place that is farthest from all curves."""
    line = frame.y(level.value)
    rows = [y for y in (line - 9, line + 9) if 4 <= y <= frame.height - 6]
    places = [_Place(at_end, y) for at_end in (False, True) for y in rows]
    share = min(1.0, (wording.estimate_width_px(level.label) + 8) / NARROW_PX)
    clear = {place: _measure_clearance_px(place, share, drawn, frame) for place in places}
    return next((place for place in places if clear[place] >= FREE_PX), max(places, key=lambda place: clear[place]))


def _measure_clearance_px(place: _Place, share: float, drawn: Sequence[Series], frame: _Frame) -> float:
    """Return the distance of the nearest curve to a name in this place; `share`: its part of the chart's width."""
    first, last = (1.0 - share, 1.0) if place.at_end else (0.0, share)
    nearest = frame.height
    for curve in drawn:
        points = [(frame.across.fraction(x), frame.y(y)) for x, y in curve.finite_points]
        for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
            if x1 < first or x0 > last:
                continue
            ends = [_interpolate(max(x0, first), x0, y0, x1, y1), _interpolate(min(x1, last), x0, y0, x1, y1)]
            crosses = min(ends) <= place.y <= max(ends)
            nearest = min(nearest, 0.0 if crosses else min(abs(end - place.y) for end in ends))
    return nearest


def _interpolate(x: float, x0: float, y0: float, x1: float, y1: float) -> float:
    """Return the height at `x` of the line between two points."""
    return y0 if x1 <= x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
