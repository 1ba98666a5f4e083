"""Charts of a classification: the confusion matrix as a heat map, and the reliability diagram.

The heat map has true classes in rows, predicted ones in columns and counts in its cells. Right and wrong have two
hues, so that errors stand out beside a diagonal that holds nearly everything. The shade grows with the square root
of a cell's share of its row, and for errors faster: an error of 1% must be visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kftrain.reports import wording
from kftrain.reports.charts import svg
from kftrain.reports.charts.ticks import make_linear_scale
from kftrain.run.documents import CalibrationBin

CELL_PX = 27
MAX_CLASSES = 24
"""Largest matrix whose counts are readable on a page; of a larger one the most frequent confusions are listed."""

CELL_WIDTH_PX = 34
"""Width of a cell on the narrowest page; longer labels of columns are turned."""

MAX_CELL_WIDTH_PX = 56
MAX_NAME_CHARACTERS = 14

MIN_OPACITY, MAX_OPACITY = 0.12, 0.55
"""The darkest shade still lets type in the page's colour be read, in light and in dark."""

FULL_SHADE_ERROR_SHARE = 0.2
"""An error in this share of a class's samples has the darkest shade."""

RELIABILITY_HEIGHT_PX = 180
RELIABILITY_PADDING = svg.Padding(8, 18, 40, 53)
MAX_RELIABILITY_WIDTH_PX = 420


@dataclass(frozen=True)
class Mistake:
    """A confusion of two classes and its frequency."""

    true: str
    predicted: str
    count: int
    num_true: int


def draw_confusion_chart(labels: Sequence[str], matrix: Sequence[Sequence[int]], *, description: str) -> Markup:
    """Draw the heat map, with recall per class on the right; the matrix is square, of at most `MAX_CLASSES` classes."""
    names = [wording.cut_text(wording.clean(name), MAX_NAME_CHARACTERS) for name in labels]
    num_classes = len(names)
    longest = max(wording.estimate_width_px(name) for name in names)
    turned = longest > min(CELL_WIDTH_PX, 340 / num_classes)
    parts = [_draw_column_name(name, (index + 0.5) / num_classes, turned) for index, name in enumerate(names)]
    parts.append(svg.draw_text("recall", "100%", -10, anchor="end", dx=48))
    for index, (name, counts) in enumerate(zip(names, matrix, strict=True)):
        parts += _draw_row(index, name, counts, num_classes)
    top = 12 + longest * math.sin(math.radians(45)) if turned else 20
    padding = svg.Padding(top, 50, 4, 14 + longest)
    max_width = padding.left + MAX_CELL_WIDTH_PX * num_classes + padding.right
    return svg.frame_drawing(parts, CELL_PX * num_classes, padding, description, max_width)


def find_mistakes(labels: Sequence[str], matrix: Sequence[Sequence[int]], max_mistakes: int) -> list[Mistake]:
    """Return the most frequent confusions of two classes; equally frequent ones keep the order of classes."""
    mistakes = [
        Mistake(labels[true], labels[predicted], count, sum(row))
        for true, row in enumerate(matrix)
        for predicted, count in enumerate(row)
        if count > 0 and true != predicted
    ]
    return sorted(mistakes, key=lambda mistake: -mistake.count)[:max_mistakes]


def _draw_column_name(name: str, at: float, turned: bool) -> Markup:
    if not turned:
        return svg.draw_text(name, svg.place_across(at), -10, anchor="middle")
    label = svg.make_element("text", name, transform="rotate(-45)", class_="tick")
    return svg.make_element("svg", label, x=svg.place_across(at), y=-6, width=1, height=1)


def _draw_row(index: int, name: str, counts: Sequence[int], num_classes: int) -> list[Markup]:
    y = CELL_PX * (index + 0.5)
    total = sum(counts)
    parts = [svg.draw_text(name, 0, y, anchor="end", dx=-8)]
    for column, count in enumerate(counts):
        parts += _draw_cell(index, column, count, total, num_classes)
    recall = wording.format_percent(counts[index] / total) if total else "\u2013"
    return [*parts, svg.draw_text(recall, "100%", y, anchor="end", dx=48)]


def _draw_cell(row: int, column: int, count: int, total: int, num_classes: int) -> list[Markup]:
    y = CELL_PX * row
    middle = svg.place_across((column + 0.5) / num_classes)
    if count <= 0:
        return [svg.draw_text("\u00b7", middle, y + CELL_PX / 2, style="zero", anchor="middle")]
    right = row == column
    share = count / total / (1.0 if right else FULL_SHADE_ERROR_SHARE)
    area = svg.make_element(
        "rect",
        x=svg.place_across(column / num_classes),
        y=y,
        width=svg.place_across(1 / num_classes),
        height=CELL_PX,
        class_="cell right" if right else "cell wrong",
        fill_opacity=MIN_OPACITY + (MAX_OPACITY - MIN_OPACITY) * math.sqrt(min(share, 1.0)),
    )
    return [area, svg.draw_text(wording.format_count(count), middle, y + CELL_PX / 2, style="count", anchor="middle")]


def draw_reliability_chart(bins: Sequence[CalibrationBin], *, description: str) -> Markup:
    """Draw a bar per bin up to its accuracy, and the gap between accuracy and confidence in another hue."""
    scale = make_linear_scale((0.0, 1.0), 6)
    parts = [
        *svg.draw_vertical_axis(scale, RELIABILITY_HEIGHT_PX),
        *svg.draw_horizontal_axis(scale, RELIABILITY_HEIGHT_PX),
    ]
    for bin in bins:
        low, high = sorted((bin.accuracy, bin.confidence))
        parts.append(_draw_bar(bin, 0.0, low, "cell right", 0.5))
        parts.append(_draw_bar(bin, low, high, "cell wrong", 0.4))
    diagonal = svg.make_element(
        "path",
        d=f"M0 {RELIABILITY_HEIGHT_PX}L{svg.CURVE_WIDTH} 0",
        class_="curve faint series-0",
        vector_effect="non-scaling-stroke",
    )
    parts += [
        svg.stretch_curves([diagonal], RELIABILITY_HEIGHT_PX),
        svg.draw_text("confidence", "50%", RELIABILITY_HEIGHT_PX + 30, anchor="middle"),
    ]
    return svg.frame_drawing(parts, RELIABILITY_HEIGHT_PX, RELIABILITY_PADDING, description, MAX_RELIABILITY_WIDTH_PX)


def _draw_bar(bin: CalibrationBin, bottom: float, top: float, style: str, opacity: float) -> Markup:
    return svg.make_element(
        "rect",
        x=svg.place_across(bin.low),
        y=RELIABILITY_HEIGHT_PX * (1 - top),
        width=svg.place_across(bin.high - bin.low),
        height=RELIABILITY_HEIGHT_PX * (top - bottom),
        class_=style,
        fill_opacity=opacity,
    )
