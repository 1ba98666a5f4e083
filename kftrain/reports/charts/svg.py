"""SVG elements as escaped strings, and the frame that every chart stands in.

A chart stretches with the page while its type keeps its size, without any script: the drawing is an `<svg>`
as wide as its box whose horizontal positions are percentages, and labels hang over into the box's padding.
Curves lie in a nested `<svg>` that is stretched to the full width (`CURVE_WIDTH` units), with strokes that
do not scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from kftrain.reports.charts.ticks import Scale
from kftrain.reports.wording import clean

CURVE_WIDTH = 1000
"""Horizontal units of a curve, whatever its width on the screen."""

BASELINE_SHIFT_PX = 4
"""Distance from the middle of a line of 11 px type to its baseline."""

MIN_LABEL_GAP_PX = 14
"""Least distance between the middles of two labels in a column."""


@dataclass(frozen=True)
class Padding:
    """Room for labels around a drawing, in pixels."""

    top: float
    right: float
    bottom: float
    left: float


def make_element(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """Return an SVG element; plain strings are cleaned and escaped, Markup stays, attributes of None are left out.

    `class_` is `class`; other underscores become hyphens.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_format_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(child if isinstance(child, Markup) else clean(child) for child in children)
    return Markup(f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>")


def draw_text(
    content: str, x: float | str, y: float, *, style: str = "tick", anchor: str = "start", dx: float = 0
) -> Markup:
    """Return a label whose vertical middle is at `y`."""
    return make_element(
        "text",
        content,
        x=x,
        y=y + BASELINE_SHIFT_PX,
        dx=dx or None,
        class_=style,
        text_anchor=anchor if anchor != "start" else None,
    )


def draw_line(x1: float | str, y1: float, x2: float | str, y2: float, style: str) -> Markup:
    """Return a straight line; `style` is a CSS class."""
    return make_element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style)


def place_across(fraction: float) -> str:
    """Turn a share of the drawing's width into a horizontal position: `25%`."""
    return f"{_format_attribute(100 * fraction)}%"


def frame_drawing(
    content: Iterable[Markup],
    height: float,
    padding: Padding,
    description: str,
    max_width: float | None = None,
) -> Markup:
    """Put a chart into its box; a screen reader says `description`."""
    box = f"padding:{padding.top:.0f}px {padding.right:.0f}px {padding.bottom:.0f}px {padding.left:.0f}px"
    box += f";max-width:{max_width:.0f}px" if max_width else ""
    picture = make_element("svg", *content, width="100%", height=height, role="img", aria_label=description)
    return make_element("div", picture, class_="drawing", style=box)


def stretch_curves(content: Iterable[Markup], height: float) -> Markup:
    """Return the part of a drawing that the browser stretches from `CURVE_WIDTH` units to the drawing's width."""
    return make_element(
        "svg",
        *content,
        viewBox=f"0 0 {CURVE_WIDTH} {_format_attribute(height)}",
        width="100%",
        height=height,
        preserveAspectRatio="none",
    )


def draw_horizontal_axis(scale: Scale, y: float, grid_top: float | None = None) -> list[Markup]:
    """Draw ticks below a drawing of height `y`, with grid lines up to `grid_top` if that is given."""
    parts = [draw_line(0, y, "100%", y, "axis")]
    for tick, label in zip(scale.ticks, scale.labels, strict=True):
        at = place_across(scale.fraction(tick))
        parts.append(
            draw_line(at, y, at, y + 4, "axis") if grid_top is None else draw_line(at, grid_top, at, y + 4, "grid")
        )
        parts.append(draw_text(label, at, y + 14, anchor="middle"))
    return parts


def draw_vertical_axis(scale: Scale, height: float) -> list[Markup]:
    """Draw ticks left of a drawing, with a hairline across it at every tick."""
    parts = []
    for tick, label in zip(scale.ticks, scale.labels, strict=True):
        y = height * (1 - scale.fraction(tick))
        parts += [draw_line(0, y, "100%", y, "grid"), draw_text(label, 0, y, anchor="end", dx=-8)]
    return parts


def spread_labels(positions: Sequence[float], low: float, high: float, gap: float = MIN_LABEL_GAP_PX) -> list[float]:
    """Move positions until neighbours are `gap` apart, within `low` and `high` if they fit; the order stays."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    placed = list(positions)
    floor = low
    for index in order:
        placed[index] = max(placed[index], floor)
        floor = placed[index] + gap
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def _format_attribute(value: str | float) -> str:
    if isinstance(value, str):
        return clean(value)
    return f"{round(value, 2) + 0.0:.7g}"  # adding zero turns -0.0 into 0.0
