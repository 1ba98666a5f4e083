"""A reliability diagram: accuracy by confidence, beside the diagonal on which a calibrated model stands."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from kftrain.report.charts import svg
from kftrain.report.charts.ticks import linear_scale
from kftrain.run.documents import CalibrationBin

HEIGHT_PX = 180
PADDING = svg.Padding(8, 18, 40, 53)
MAX_WIDTH_PX = 420


def reliability_chart(bins: Sequence[CalibrationBin], *, description: str) -> Markup:
    """A bar for each bin up to its accuracy, and what is missing to its confidence, or is too much, in another hue."""
    scale = linear_scale((0.0, 1.0), 6)
    parts = [*svg.vertical_axis(scale, HEIGHT_PX), *svg.horizontal_axis(scale, HEIGHT_PX)]
    for each in bins:
        low, high = sorted((each.accuracy, each.confidence))
        parts.append(_bar(each, 0.0, low, "cell right", 0.5))
        parts.append(_bar(each, low, high, "cell wrong", 0.4))
    diagonal = svg.element(
        "path",
        d=f"M0 {HEIGHT_PX}L{svg.CURVE_WIDTH} 0",
        class_="curve faint series-0",
        vector_effect="non-scaling-stroke",
    )
    parts += [svg.curve_box([diagonal], HEIGHT_PX), svg.text("confidence", "50%", HEIGHT_PX + 30, anchor="middle")]
    return svg.drawing(parts, HEIGHT_PX, PADDING, description, MAX_WIDTH_PX)


def _bar(each: CalibrationBin, bottom: float, top: float, style: str, opacity: float) -> Markup:
    return svg.element(
        "rect",
        x=svg.across(each.low),
        y=HEIGHT_PX * (1 - top),
        width=svg.across(each.high - each.low),
        height=HEIGHT_PX * (top - bottom),
        class_=style,
        fill_opacity=opacity,
    )
