from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.reports.charts import svg
from kftrain.reports.charts.classification import MAX_CLASSES, draw_confusion_chart, find_mistakes
from kftrain.reports.charts.interval import Guide, IntervalRow, SliceRow, draw_interval_chart, draw_slice_chart
from kftrain.reports.charts.line import (
    NUM_COLUMNS,
    ReferenceLine,
    Series,
    compute_running_mean,
    draw_line_chart,
    thin_points,
)

quick = settings(derandomize=True, max_examples=60, deadline=None)
values = st.one_of(st.floats(), st.sampled_from([0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, 1.0]))
NUMERIC_ATTRIBUTES = {"x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "dx", "width", "height", "fill-opacity"}


def parse(drawing: str) -> ElementTree.Element:
    """The drawing as XML, after checking that every coordinate in it is a finite number."""
    root = ElementTree.fromstring(drawing)
    for node in root.iter():
        for name in NUMERIC_ATTRIBUTES & set(node.attrib):
            assert math.isfinite(float(node.attrib[name].removesuffix("%")))
        assert all(math.isfinite(float(part)) for part in re.findall(r"[^ML ]+", node.attrib.get("d", "")))
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in root.iter("text")]


def of_class(root: ElementTree.Element, tag: str, name: str) -> list[ElementTree.Element]:
    return [node for node in root.iter(tag) if name in node.attrib.get("class", "").split()]


@quick
@given(st.lists(st.lists(values, max_size=30), min_size=1, max_size=3), st.lists(values, max_size=2), st.booleans())
def test_a_line_chart_of_any_values_is_well_formed(
    curves: list[list[float]], levels: list[float], from_zero: bool
) -> None:
    series = [Series(f"s{i}", list(enumerate(curve)), smooth=True) for i, curve in enumerate(curves)]
    parse(draw_line_chart(series, [ReferenceLine("level", v) for v in levels], description="d", from_zero=from_zero))


@quick
@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=5), values)
def test_interval_and_slice_charts_of_any_values_are_well_formed(
    rows: list[tuple[float, float, float]], level: float
) -> None:
    parse(
        draw_interval_chart([IntervalRow("r", *row) for row in rows], [Guide("g", level)], description="d", signed=True)
    )
    parse(draw_slice_chart([SliceRow("s", value, 3, worse=True) for value, _, _ in rows], level, description="d"))


def test_a_curve_goes_through_its_points() -> None:
    root = parse(draw_line_chart([Series("", [(0, 0.0), (50, 10.0), (100, 5.0)])], description="d", height=100))
    (path,) = root.iter("path")
    assert path.attrib["d"] == "M0.0 100.0L500.0 0.0L1000.0 50.0"


def test_a_value_that_is_not_finite_interrupts_the_curve_and_is_marked() -> None:
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, math.inf), (5, 2.0)]
    root = parse(draw_line_chart([Series("", points)], description="d"))
    (path,) = root.iter("path")
    assert path.attrib["d"].count("M") == 3
    assert [node.attrib["x1"] for node in of_class(root, "line", "not-finite")] == ["40%", "80%"]


def test_a_chart_without_a_finite_value_says_so() -> None:
    assert "No finite value" in draw_line_chart([Series("", [(0, math.nan)])], description="d")
    assert "No finite value" in draw_line_chart([Series("", [])], description="d")


def test_one_point_is_a_dot_within_the_axis() -> None:
    root = parse(draw_line_chart([Series("", [(7, 2.5)])], description="d", height=100))
    (dot,) = root.iter("circle")
    assert (dot.attrib["cx"], dot.attrib["cy"]) == ("50%", "50")
    assert "7" in texts(root)


def test_several_curves_are_named_at_their_ends_without_overlap() -> None:
    series = [Series(name, [(0, 3.0), (9, last)]) for name, last in (("training", 2.0), ("validation", 2.001))]
    root = parse(draw_line_chart(series, description="d"))
    names = of_class(root, "text", "name")
    assert [node.text for node in names] == ["training 2.00", "validation 2.00"]
    assert abs(float(names[0].attrib["y"]) - float(names[1].attrib["y"])) >= svg.MIN_LABEL_GAP_PX


def test_small_multiples_share_one_axis() -> None:
    root = parse(draw_line_chart([Series("", [(200, 1.0), (400, 2.0)])], description="d", x_range=(0, 400)))
    (path,) = root.iter("path")
    assert path.attrib["d"].startswith("M500.0 ")


def test_a_long_curve_is_drawn_with_bounded_size_and_all_its_extremes() -> None:
    points = [(step, math.sin(step / 5000)) for step in range(100_000)]
    points[77_700] = (77_700, 9.0)
    kept = thin_points(points)
    assert len(kept) <= 4 * (NUM_COLUMNS + 1)
    assert (77_700, 9.0) in kept
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert kept == sorted(kept)
    assert len(draw_line_chart([Series("", points, smooth=True)], description="d")) < 60_000


def test_a_long_curve_with_a_gap_at_every_second_value_stays_small() -> None:
    points = [(step, 1.0 + step % 7 if step % 2 else math.nan) for step in range(100_000)]
    assert len(draw_line_chart([Series("", points)], description="d")) < 150_000


def test_a_running_mean_is_a_mean_and_starts_with_the_first_value() -> None:
    points = [(step, float(step % 4)) for step in range(40)]
    means = dict(compute_running_mean(points, 5))
    assert means[0] == 0.0
    assert means[10] == pytest.approx(sum(points[i][1] for i in range(8, 13)) / 5)
    assert means[39] == pytest.approx(sum(points[i][1] for i in range(37, 40)) / 3)


def test_an_interval_spans_its_ends_on_the_axis() -> None:
    root = parse(draw_interval_chart([IntervalRow("a", 0.5, 0.0, 1.0), IntervalRow("b", 1.0)], description="d"))
    (bar,) = of_class(root, "line", "interval")
    first, second = of_class(root, "circle", "dot")
    middle = (float(bar.attrib["x1"][:-1]) + float(bar.attrib["x2"][:-1])) / 2
    assert float(first.attrib["cx"][:-1]) == pytest.approx(middle, abs=0.02)
    assert second.attrib["cx"] == bar.attrib["x2"]
    assert texts(root)[-4:] == ["0.50", "0.00 to 1.00", "b", "1.000"]


def test_slices_are_tied_to_the_whole_and_coloured_by_which_side_is_worse() -> None:
    rows = [SliceRow("bad", 3.0, 10, worse=True), SliceRow("good", 1.0, 2000, worse=False)]
    root = parse(draw_slice_chart(rows, 2.0, description="d"))
    (worse,), (better,) = of_class(root, "circle", "worse"), of_class(root, "circle", "better")
    assert float(worse.attrib["cx"][:-1]) > 50 > float(better.attrib["cx"][:-1])
    assert {"bad", "3.000", "good", "2,000", "all"} <= set(texts(root))


def test_a_confusion_matrix_shows_counts_recall_and_two_hues() -> None:
    root = parse(draw_confusion_chart(["a", "b"], [[1000, 10], [0, 5]], description="d"))
    assert {"1,000", "10", "\u00b7", "5", "99.0%", "100.0%"} <= set(texts(root))
    assert [node.attrib["x"] for node in of_class(root, "rect", "right")] == ["0%", "50%"]
    (wrong,) = of_class(root, "rect", "wrong")
    assert 0.12 < float(wrong.attrib["fill-opacity"]) < 0.55


def test_a_class_without_samples_has_no_recall() -> None:
    assert "\u2013" in texts(parse(draw_confusion_chart(["a", "b"], [[0, 0], [1, 1]], description="d")))


def test_the_largest_confusion_matrix_is_small() -> None:
    matrix = [[row * column for column in range(MAX_CLASSES)] for row in range(MAX_CLASSES)]
    drawing = draw_confusion_chart(
        [f"a class with a long name {i}" for i in range(MAX_CLASSES)], matrix, description="d"
    )
    parse(drawing)
    assert len(drawing) < 200_000


def test_the_most_frequent_confusions_come_first() -> None:
    found = find_mistakes(["a", "b", "c"], [[5, 1, 4], [9, 1, 0], [0, 0, 3]], 2)
    assert [(m.true, m.predicted, m.count, m.num_true) for m in found] == [("b", "a", 9, 10), ("a", "c", 4, 10)]


@quick
@given(st.lists(st.floats(min_value=0, max_value=200), max_size=8))
def test_spread_labels_keep_their_order_and_distance(positions: list[float]) -> None:
    placed = svg.spread_labels(positions, 0, 200)
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    ordered = [placed[index] for index in order]
    assert all(after - before >= svg.MIN_LABEL_GAP_PX - 1e-9 for before, after in pairwise(ordered))
    assert all(-1e-9 <= place <= 200 + 1e-9 for place in placed)


def test_text_and_attributes_of_elements_are_escaped() -> None:
    drawn = svg.make_element("text", '<b>"&', aria_label='"><script>', class_="x")
    assert drawn == '<text aria-label="&#34;&gt;&lt;script&gt;" class="x">&lt;b&gt;&#34;&amp;</text>'
