"""What reports say of classes and costs: the figures that were measured, and nothing that is not there."""

import pytest

from kftrain.config import Config
from kftrain.reports import describe_evaluation, render_markdown, render_section
from kftrain.reports.evaluation import MAX_CLASS_ROWS
from kftrain.run.documents import Calibration, CalibrationBin, ClassFigures, Curve, Example, Performance, Spread

HOSTILE = "<script>alert(1)</script>"


def figures_of(label, f1):
    return ClassFigures(label=label, num_samples=7, precision=0.5, recall=0.25, f1=f1, roc_auc=None)


@pytest.fixture
def classified(evaluation):
    bins = [CalibrationBin(low=0.8, high=1.0, num_samples=60, confidence=0.95, accuracy=0.75)]
    curve = Curve(kind="roc", label=HOSTILE, points=[(0.0, 0.0), (0.1, 0.9), (1.0, 1.0)], area=0.9125)
    return evaluation.model_copy(
        update={
            "figures": {"calibration_error": 0.2, "macro_f1": 0.4},
            "calibration": Calibration(error=0.2, bins=bins),
            "curves": [curve],
            "classes": [figures_of(HOSTILE, 0.3), figures_of("b", None)],
        }
    )


def test_calibration_curves_and_classes_are_on_the_page_and_nothing_of_theirs_is_markup(classified):
    page = render_section(describe_evaluation(Config(), classified), Config().run.name)
    assert HOSTILE not in page and "alert(1)" in page
    for said in ("Calibration: expected error 0.200", "Macro f1", "By class", "ROC", "at 0.9500 right 0.7500"):
        assert said in page, said


def test_the_same_is_in_the_text(classified):
    text = render_markdown(describe_evaluation(Config(), classified))
    assert "| 0.80 to 1.00 | 0.9500 | 0.7500 | 60 |" in text
    assert "| b | 7 | 0.5000 | 0.2500 | \u2013 | \u2013 | \u2013 |" in text


def test_a_curve_is_named_with_the_area_below_it_and_not_with_where_it_ends(classified):
    curves = [
        Curve(kind="roc", label=name, area=area, points=[(0.0, 0.0), (0.4, 0.9), (1.0, 1.0)]) for name, area in AREAS
    ]
    (roc,) = [
        c
        for c in describe_evaluation(Config(), classified.model_copy(update={"curves": curves})).charts
        if c.title == "ROC"
    ]
    assert "cat 0.9270<" in roc.drawing and "dog 0.8000<" in roc.drawing and "1.00<" not in roc.drawing.split("cat")[1]


AREAS = (("cat", 0.927), ("dog", 0.8))


def test_right_or_wrong_of_one_sample_is_no_metric_of_it(evaluation):
    metrics = [{"accuracy": 0.0, "cross_entropy": 2.5}, {"accuracy": 1.0, "cross_entropy": 0.0}]
    examples = [Example(key=str(n), is_worst=False, metrics=each) for n, each in enumerate(metrics)]
    text = render_markdown(describe_evaluation(Config(), evaluation.model_copy(update={"examples": examples})))
    assert "accuracy" not in text and "cross entropy" in text
    documents = [Example(key="d", is_worst=False, metrics={"accuracy": 0.07})]
    assert "accuracy" in render_markdown(
        describe_evaluation(Config(), evaluation.model_copy(update={"examples": documents}))
    )


def test_of_very_many_classes_the_worst_are_told(classified):
    many = [figures_of(f"c{number}", number / 100) for number in range(100)]
    (table,) = describe_evaluation(Config(), classified.model_copy(update={"classes": many})).tables
    assert len(table.rows) == MAX_CLASS_ROWS and table.rows[0][0] == "c0" and "lowest F1" in table.title


def test_latency_and_memory_stand_with_their_spread(evaluation):
    cost = Performance(
        export_digest="d",
        export_bytes=414419,
        device="CPU",
        cpu_threads=1,
        num_passes=30,
        batch_size=32,
        latency_seconds=Spread(median=0.00045, low=0.0004, high=0.0006),
        batch_latency_seconds=Spread(median=0.0027, low=0.0026, high=0.0066),
    )
    text = render_markdown(describe_evaluation(Config(), evaluation, cost))
    assert "0.450 ms (0.400 ms to 0.600 ms; CPU, 1 thread)" in text and "Latency of 32" in text
    assert "414 kB" in text and "Memory" not in text
    assert "Latency" not in render_markdown(describe_evaluation(Config(), evaluation))
