"""A confusion matrix as a heat map: true classes in rows, predicted ones in columns, counts in the cells.

Right and wrong have two hues, so that errors stand out beside a diagonal that holds nearly everything. The
shade grows with the square root of a cell's share of its row, and for errors faster: one of 1% must be
visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kftrain.report import wording
from kftrain.report.charts import svg

CELL_PX = 27
MAX_CLASSES = 24
"""More classes than this do not fit a page with readable counts; the most frequent confusions are told instead."""

CELL_WIDTH_PX = 34
"""Width of a cell on the narrowest page; longer labels of columns are turned."""

MAX_CELL_WIDTH_PX = 56
MAX_NAME_CHARACTERS = 14

MIN_OPACITY, MAX_OPACITY = 0.12, 0.55
"""The darkest shade still lets type in the page's colour be read, in light and in dark."""

FULL_SHADE_ERROR_SHARE = 0.2
"""An error in this share of a class's samples has the darkest shade."""


@dataclass(frozen=True)
class Mistake:
    """How often one class was taken for another."""

    true: str
    predicted: str
    count: int
    num_true: int


def confusion_chart(labels: Sequence[str], matrix: Sequence[Sequence[int]], *, description: str) -> Markup:
    """The heat map, with each class's recall on the right. At most `MAX_CLASSES` classes; the matrix is square."""
    names = [wording.ellipsis(wording.clean(name), MAX_NAME_CHARACTERS) for name in labels]
    num_classes = len(names)
    longest = max(wording.width_px(name) for name in names)
    turned = longest > min(CELL_WIDTH_PX, 340 / num_classes)
    parts = [_column_name(name, (index + 0.5) / num_classes, turned) for index, name in enumerate(names)]
    parts.append(svg.text("recall", "100%", -10, anchor="end", dx=48))
    for index, (name, counts) in enumerate(zip(names, matrix, strict=True)):
        parts += _row(index, name, counts, num_classes)
    top = 12 + longest * math.sin(math.radians(45)) if turned else 20
    padding = svg.Padding(top, 50, 4, 14 + longest)
    max_width = padding.left + MAX_CELL_WIDTH_PX * num_classes + padding.right
    return svg.drawing(parts, CELL_PX * num_classes, padding, description, max_width)


def mistakes(labels: Sequence[str], matrix: Sequence[Sequence[int]], max_mistakes: int) -> list[Mistake]:
    """The most frequent confusions of two classes, most frequent first; equal ones in the order of classes."""
    found = [
        Mistake(labels[true], labels[predicted], count, sum(row))
        for true, row in enumerate(matrix)
        for predicted, count in enumerate(row)
        if count > 0 and true != predicted
    ]
    return sorted(found, key=lambda mistake: -mistake.count)[:max_mistakes]


def _column_name(name: str, at: float, turned: bool) -> Markup:
    if not turned:
        return svg.text(name, svg.across(at), -10, anchor="middle")
    label = svg.element("text", name, transform="rotate(-45)", class_="tick")
    return svg.element("svg", label, x=svg.across(at), y=-6, width=1, height=1)


def _row(index: int, name: str, counts: Sequence[int], num_classes: int) -> list[Markup]:
    y = CELL_PX * (index + 0.5)
    total = sum(counts)
    parts = [svg.text(name, 0, y, anchor="end", dx=-8)]
    for column, count in enumerate(counts):
        parts += _cell(index, column, count, total, num_classes)
    recall = wording.percent(counts[index] / total) if total else "\u2013"
    return [*parts, svg.text(recall, "100%", y, anchor="end", dx=48)]


def _cell(row: int, column: int, count: int, total: int, num_classes: int) -> list[Markup]:
    y = CELL_PX * row
    middle = svg.across((column + 0.5) / num_classes)
    if count <= 0:
        return [svg.text("\u00b7", middle, y + CELL_PX / 2, style="zero", anchor="middle")]
    right = row == column
    share = count / total / (1.0 if right else FULL_SHADE_ERROR_SHARE)
    area = svg.element(
        "rect",
        x=svg.across(column / num_classes),
        y=y,
        width=svg.across(1 / num_classes),
        height=CELL_PX,
        class_="cell right" if right else "cell wrong",
        fill_opacity=MIN_OPACITY + (MAX_OPACITY - MIN_OPACITY) * math.sqrt(min(share, 1.0)),
    )
    return [area, svg.text(wording.count(count), middle, y + CELL_PX / 2, style="count", anchor="middle")]
