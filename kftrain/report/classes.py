"""What a report says of classes: calibration, curves over all thresholds, and a table with a row for each class."""

from __future__ import annotations

from kftrain.report import wording
from kftrain.report.charts.line import Series, line_chart
from kftrain.report.charts.reliability import reliability_chart
from kftrain.report.content import Chart, Fact, Table
from kftrain.run.documents import Calibration, Curve, Evaluation, Performance, Spread

MAX_CLASSES = 30
"""Rows of the table; of more classes those with the lowest F1."""

CURVES = {
    "roc": ("ROC", "false positives", "area under the curve"),
    "precision_recall": ("Precision and recall", "recall", "average precision"),
}


def figures(evaluation: Evaluation) -> list[Fact]:
    """Figures of the whole split that have no interval."""
    return [Fact(wording.label(name), wording.number(value)) for name, value in evaluation.figures.items()]


def costs(performance: Performance | None) -> list[Fact]:
    """Latency and memory of the export with their spread."""
    if performance is None:
        return []
    threads = wording.plural(performance.cpu_threads, "thread")
    where = performance.device if performance.device != "CPU" else f"CPU, {threads}"
    one, batch = performance.latency_seconds, performance.batch_latency_seconds
    found = [
        Fact("Latency of one sample", _milliseconds(one.median), f"{_range(one)}; {where}"),
        Fact(f"Latency of {performance.batch_size}", _milliseconds(batch.median), _range(batch)),
    ]
    memory = performance.memory_bytes
    if memory is not None:
        note = f"{wording.size(memory.low)} to {wording.size(memory.high)}"
        found.append(Fact("Memory", wording.size(memory.median), note))
    return [*found, Fact("Export", wording.size(performance.export_bytes))]


def charts(evaluation: Evaluation) -> list[Chart]:
    """The reliability diagram and the curves, as far as there are any."""
    found = [_reliability(evaluation.calibration)] if evaluation.calibration and evaluation.calibration.bins else []
    for kind in CURVES:
        of_kind = [curve for curve in evaluation.curves if curve.kind == kind and curve.points]
        found += [_curves(kind, of_kind, len(evaluation.classes))] if of_kind else []
    return found


def tables(evaluation: Evaluation) -> list[Table]:
    """A row for each class, or for the worst of very many."""
    if not evaluation.classes:
        return []
    worst = sorted(evaluation.classes, key=lambda each: 2.0 if each.f1 is None else each.f1)[:MAX_CLASSES]
    shown = evaluation.classes if len(evaluation.classes) <= MAX_CLASSES else worst
    rows = [
        [
            wording.clean(each.label),
            wording.count(each.num_samples),
            *map(wording.number, (each.precision, each.recall, each.f1, each.roc_auc, each.average_precision)),
        ]
        for each in shown
    ]
    left_out = "" if len(shown) == len(evaluation.classes) else f", the {MAX_CLASSES} with the lowest F1"
    columns = ["class", "samples", "precision", "recall", "F1", "ROC AUC", "average precision"]
    return [Table(f"By class{left_out}", columns, rows)]


def _range(found: Spread) -> str:
    return f"{_milliseconds(found.low)} to {_milliseconds(found.high)}"


def _milliseconds(seconds: float) -> str:
    return f"{wording.number(1000 * seconds, 3)} ms"


def _reliability(calibration: Calibration) -> Chart:
    error = wording.number(calibration.error, 3)
    title = f"Calibration: expected error {error}"
    rows = [
        [
            f"{wording.fixed(each.low, 2)} to {wording.fixed(each.high, 2)}",
            wording.number(each.confidence),
            wording.number(each.accuracy),
            wording.count(each.num_samples),
        ]
        for each in calibration.bins
    ]
    table = Table("Calibration", ["confidence", "mean", "accuracy", "samples"], rows)
    description = f"{title}; " + ", ".join(f"at {row[1]} right {row[2]}" for row in rows)
    note = "bars: share that is right, by confidence; the diagonal is a calibrated model"
    return Chart(title, reliability_chart(calibration.bins, description=description), note, table)


def _curves(kind: str, curves: list[Curve], num_classes: int) -> Chart:
    title, across, area = CURVES[kind]
    series = [Series(wording.clean(each.label), each.points, figure=wording.number(each.area)) for each in curves]
    said = ", ".join(f"{wording.clean(each.label)} {wording.number(each.area)}" for each in curves)
    fewer = num_classes > len(curves) > 1
    note = f"one class against the others{', the hardest ones' if fewer else ''}; {area}: {said}"
    drawing = line_chart(
        series, description=f"{title}, {note}", x_range=(0.0, 1.0), from_zero=True, x_name=across, x_is_whole=False
    )
    rows = [[wording.clean(each.label), wording.number(each.area)] for each in curves]
    return Chart(title, drawing, note, Table(title, ["class", area], rows))
