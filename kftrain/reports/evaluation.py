"""The report of an evaluation: metrics with intervals beside their baselines, slices, and confusions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from kftrain.config import Config
from kftrain.reports import content, wording
from kftrain.reports.charts.classification import (
    MAX_CLASSES,
    draw_confusion_chart,
    draw_reliability_chart,
    find_mistakes,
)
from kftrain.reports.charts.interval import Guide, IntervalRow, SliceRow, draw_interval_chart, draw_slice_chart
from kftrain.reports.charts.line import Series, draw_line_chart
from kftrain.reports.content import Chart, Fact, Gallery, ReportSection, Sample, Table
from kftrain.run.documents import (
    Calibration,
    Confusion,
    Curve,
    Evaluation,
    Example,
    Interval,
    Performance,
    Slice,
    Spread,
)

MAX_SLICES = 30
"""Number of slices in a chart; of more, two thirds are the worst and one third the best."""

MIN_SLICE_SAMPLES = 10
"""A slice of fewer samples never heads the list: its value is chance."""

_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")

MAX_BASELINES = 12
MAX_MISTAKES = 12
MAX_CLASS_ROWS = 30
"""Rows of the table of classes; of more classes it holds those with the lowest F1."""

CURVES = {
    "roc": ("ROC", "false positives", "area under the curve"),
    "precision_recall": ("Precision and recall", "recall", "average precision"),
}

DIRECTIONS = {"minimize": "lower is better", "maximize": "higher is better"}


def describe_evaluation(
    config: Config,
    evaluation: Evaluation,
    performance: Performance | None = None,
    reference: Evaluation | None = None,
) -> ReportSection:
    """Return the section of an evaluation; only the gate's metric has a goal, so only its values are called better."""
    metric, goal = choose_metric(config, evaluation)
    if metric is None:
        return ReportSection("Evaluation", "The evaluation has no metrics.", facts=_list_facts(evaluation))
    score = evaluation.metrics[metric]
    baselines = evaluation.baselines.get(metric, {})
    charts = [
        _draw_metric(name, evaluation, goal if name == metric else "") for name in _list_charted(metric, evaluation)
    ]
    slices = _draw_slices(metric, goal, evaluation)
    confusion = evaluation.confusion if _is_square(evaluation.confusion) else None
    drawn = confusion is not None and len(confusion.labels) <= MAX_CLASSES
    return ReportSection(
        title="Evaluation",
        headline=_write_headline(metric, goal, score),
        sentences=[_compare_with_baselines(score, goal, baselines), _describe_sample_size(score, evaluation)],
        figures=[*_list_figures(metric, evaluation), *_list_class_figures(evaluation), *_list_costs(performance)],
        charts=[
            *charts,
            *([slices] if slices else []),
            *([_draw_confusion(confusion)] if confusion and drawn else []),
            *_draw_classes(evaluation),
        ],
        tables=[
            *_tabulate_reference(reference),
            *([_tabulate_mistakes(confusion)] if confusion and not drawn else []),
            *_tabulate_classes(evaluation),
        ],
        galleries=_make_galleries(evaluation),
        facts=_list_facts(evaluation),
    )


def _tabulate_reference(reference: Evaluation | None) -> list[Table]:
    if reference is None:
        return []
    intervals = {
        n: wording.format_interval(score.value, score.low, score.high) for n, score in reference.metrics.items()
    }
    rows = [[wording.format_label(name), value, edges] for name, (value, edges) in intervals.items()]
    samples = wording.format_plural(reference.num_samples, "sample")
    return [Table(f"On the reference set, {samples}", ["", "value", "interval"], rows)]


def choose_metric(config: Config, evaluation: Evaluation) -> tuple[str | None, str]:
    """Return the gate's metric and goal; if the evaluation lacks it, another metric and an empty goal."""
    if config.registry.metric in evaluation.metrics:
        return config.registry.metric, config.registry.goal
    return next(iter(evaluation.metrics), None), ""


def is_better(value: float, other: float, goal: str) -> bool | None:
    """Return True if `value` beats `other`; None for equal values, NaN, or an unknown goal."""
    if goal not in DIRECTIONS or not (value < other or value > other):
        return None
    return (value < other) == (goal == "minimize")


def describe_direction(goal: str) -> str:
    """Return `lower is better` or `higher is better`; empty for an unknown goal."""
    return DIRECTIONS.get(goal, "")


def _write_headline(metric: str, goal: str, score: Interval) -> str:
    better = f", {describe_direction(goal)}" if goal else ""
    return f"{wording.format_label(metric)} {wording.format_interval(score.value, score.low, score.high)[0]}{better}."


def _compare_with_baselines(score: Interval, goal: str, baselines: Mapping[str, float]) -> str:
    """Say for every baseline whether the value is better; a baseline inside the interval is not distinguishable."""
    relations = [
        _compare_with_baseline(score, goal, name, value) for name, value in list(baselines.items())[:MAX_BASELINES]
    ]
    return f"{wording.capitalize('; '.join(relations))}." if relations else ""


def _compare_with_baseline(score: Interval, goal: str, name: str, baseline: float) -> str:
    name, figure = wording.clean(name), wording.format_number(float(baseline))
    if wording.to_finite(baseline) is None or wording.to_finite(score.value) is None:
        return f"{name} is {figure}"
    if score.low <= baseline <= score.high:
        return f"not distinguishable from {name} ({figure})"
    better = is_better(score.value, baseline, goal)
    word = {True: "better", False: "worse", None: "lower" if score.value < baseline else "higher"}[better]
    return f"{word} than {name} ({figure}) by {wording.format_number(abs(score.value - baseline), 3)}"


def _describe_sample_size(score: Interval, evaluation: Evaluation) -> str:
    edges = wording.format_interval(score.value, score.low, score.high)[1]
    groups = wording.format_plural(evaluation.num_groups, "independent group")
    samples = wording.format_plural(evaluation.num_samples, "sample")
    size = samples if evaluation.num_groups == evaluation.num_samples else f"{groups} with {samples}"
    return f"The {wording.format_level(evaluation.confidence)} interval is {edges}, from {size}."


def _list_figures(primary: str, evaluation: Evaluation) -> list[Fact]:
    """Return the metrics that get no chart of their own."""
    charted = _list_charted(primary, evaluation)
    intervals = {
        name: wording.format_interval(score.value, score.low, score.high)
        for name, score in evaluation.metrics.items()
        if name not in charted
    }
    return [Fact(wording.format_label(name), value, edges) for name, (value, edges) in intervals.items()]


def _list_charted(primary: str, evaluation: Evaluation) -> list[str]:
    return [primary, *(n for n in evaluation.metrics if n != primary and evaluation.baselines.get(n))]


def _draw_metric(metric: str, evaluation: Evaluation, goal: str) -> Chart:
    score = evaluation.metrics[metric]
    baselines = list(evaluation.baselines.get(metric, {}).items())[:MAX_BASELINES]
    rows = [IntervalRow("this model", score.value, score.low, score.high)]
    rows += [IntervalRow(wording.clean(name), float(value), style="plain") for name, value in baselines]
    return make_interval_chart(wording.format_label(metric), rows, describe_direction(goal))


def make_interval_chart(
    title: str, rows: Sequence[IntervalRow], note: str, guides: Sequence[Guide] = (), *, signed: bool = False
) -> Chart:
    """Draw values with their intervals, and tabulate the same for where there are no drawings."""
    table = Table(title, ["", "value", "interval"], [[row.name, *row.figures] for row in rows])
    description = f"{title}: " + ", ".join(f"{row.name} {' '.join(row.figures)}".strip() for row in rows)
    return Chart(title, draw_interval_chart(rows, guides, description=description, signed=signed), note, table)


def _draw_slices(metric: str, goal: str, evaluation: Evaluation) -> Chart | None:
    whole = evaluation.metrics[metric].value
    rows = [
        SliceRow(
            wording.clean(name),
            part.metrics[metric],
            part.num_samples,
            _is_worse(part, metric, whole, goal),
            part.intervals.get(metric),
        )
        for name, part in evaluation.slices.items()
        if metric in part.metrics
    ]
    if not rows:
        return None
    drawn = _choose_slices(rows, goal)
    title = f"{wording.format_label(metric)} by slice"
    first = "worst first" if goal else "highest first"
    if any(row.num_samples < MIN_SLICE_SAMPLES for row in drawn):
        first += f", those of fewer than {MIN_SLICE_SAMPLES} samples last: they say little"
    left_out = (
        ""
        if len(drawn) == len(rows)
        else f", {len(drawn)} of {wording.format_count(len(rows))}: the first and the last"
    )
    if any(row.bounds for row in drawn):
        first += f"; bars: {wording.format_level(evaluation.confidence)} intervals, coloured where the whole is outside"
    table = Table(
        title,
        ["slice", metric, "interval", "samples"],
        [[r.name, *r.figures, wording.format_count(r.num_samples)] for r in drawn],
    )
    description = f"{title}, {first}: " + ", ".join(
        f"{row.name} {wording.format_number(float(row.value))}" for row in drawn
    )
    return Chart(title, draw_slice_chart(drawn, whole, description=description), first + left_out, table)


def _choose_slices(rows: list[SliceRow], goal: str) -> list[SliceRow]:
    """Order slices for the chart: the worst first, but slices of hardly any samples last.

    If there are too many, the small ones are dropped first, then those in the middle.
    """
    ordered = sorted(rows, key=lambda row: _measure_badness(row.value, goal), reverse=True)
    large = [row for row in ordered if row.num_samples >= MIN_SLICE_SAMPLES]
    small = [row for row in ordered if row.num_samples < MIN_SLICE_SAMPLES]
    if not large:
        large, small = small, []
    if len(large) > MAX_SLICES:
        return [*large[: MAX_SLICES * 2 // 3], *large[-(MAX_SLICES // 3) :]]
    return [*large, *small][:MAX_SLICES]


def _is_worse(part: Slice, metric: str, whole: float, goal: str) -> bool | None:
    """Return True if a slice is worse than the whole; None if the whole lies in its interval or the goal is unknown."""
    bounds = part.intervals.get(metric)
    if bounds is not None and bounds.low <= whole <= bounds.high:
        return None
    better = is_better(part.metrics[metric], whole, goal)
    return None if better is None else not better


def _make_galleries(evaluation: Evaluation) -> list[Gallery]:
    """Return the sample predictions in the order in which the evaluation chose them."""
    examples = {
        "Samples spread over the data": [example for example in evaluation.examples if not example.is_worst],
        "Samples with the largest loss": [example for example in evaluation.examples if example.is_worst],
    }
    measured = {
        name for example in evaluation.examples for name, value in example.metrics.items() if value not in (0, 1)
    }
    return [
        Gallery(title, [_make_sample(example, measured) for example in chosen])
        for title, chosen in examples.items()
        if chosen
    ]


def _make_sample(example: Example, measured: set[str]) -> Sample:
    """`measured`: metrics that say more of one sample than right or wrong, which the sample shows itself."""
    facts = content.make_sample_facts(example.shown, example.names)
    metrics = {name: value for name, value in example.metrics.items() if name in measured}
    figures = [
        Fact(wording.format_label(name).lower(), wording.format_number(value)) for name, value in metrics.items()
    ]
    picture = example.picture if _BASE64.fullmatch(example.picture) else ""
    return Sample(wording.clean(example.key), [*facts, *figures], picture)


def _measure_badness(value: float, goal: str) -> float:
    if wording.to_finite(value) is None:
        return float("-inf")
    return -value if goal == "maximize" else value


def _draw_confusion(confusion: Confusion) -> Chart:
    often = "; ".join(_list_mistakes(confusion, 3)) or "no class was taken for another"
    drawing = draw_confusion_chart(confusion.labels, confusion.matrix, description=f"Confusion matrix: {often}")
    note = f"rows: true class, columns: predicted; most frequent: {often}"
    return Chart("Confusion matrix", drawing, note, _tabulate_confusion(confusion), wide=True)


def _tabulate_mistakes(confusion: Confusion) -> Table:
    """List the most frequent confusions, in place of a matrix that is too large to draw."""
    mistakes = find_mistakes(confusion.labels, confusion.matrix, MAX_MISTAKES)
    rows = [
        [
            wording.clean(m.true),
            wording.clean(m.predicted),
            wording.format_count(m.count),
            wording.format_count(m.num_true),
        ]
        for m in mistakes
    ]
    return Table("Most frequent confusions", ["true class", "taken for", "times", "of"], rows)


def _list_mistakes(confusion: Confusion, max_mistakes: int) -> list[str]:
    return [
        f"{wording.clean(mistake.true)} taken for {wording.clean(mistake.predicted)} "
        f"({wording.format_count(mistake.count)} of {wording.format_count(mistake.num_true)})"
        for mistake in find_mistakes(confusion.labels, confusion.matrix, max_mistakes)
    ]


def _is_square(confusion: Confusion | None) -> TypeGuard[Confusion]:
    """Return True if there is a matrix with a row and a column per label."""
    if confusion is None or not confusion.labels:
        return False
    size = len(confusion.labels)
    return len(confusion.matrix) == size and all(len(row) == size for row in confusion.matrix)


def _tabulate_confusion(confusion: Confusion) -> Table:
    rows = [
        [wording.clean(name), *map(wording.format_count, counts)]
        for name, counts in zip(confusion.labels, confusion.matrix, strict=True)
    ]
    return Table("Confusion matrix", ["true \\ predicted", *map(wording.clean, confusion.labels)], rows)


def _list_facts(evaluation: Evaluation) -> list[Fact]:
    return [
        content.make_digest_fact("Evaluation digest", evaluation.evaluation_digest),
        content.make_digest_fact("Dataset digest", evaluation.dataset_digest),
        content.make_digest_fact("Checkpoint digest", evaluation.checkpoint_digest),
        content.make_digest_fact("Export digest", evaluation.export_digest),
        content.make_uri_fact("Export", evaluation.export_uri),
        content.make_digest_fact("Statistics digest", evaluation.statistics_sha256),
    ]


def _list_class_figures(evaluation: Evaluation) -> list[Fact]:
    """Return the figures of the whole split that have no interval."""
    return [
        Fact(wording.format_label(name), wording.format_number(value)) for name, value in evaluation.figures.items()
    ]


def _list_costs(performance: Performance | None) -> list[Fact]:
    """Return latency, memory and size of the export, with their spread."""
    if performance is None:
        return []
    threads = wording.format_plural(performance.cpu_threads, "thread")
    where = performance.device if performance.device != "CPU" else f"CPU, {threads}"
    one, batch = performance.latency_seconds, performance.batch_latency_seconds
    facts = [
        Fact("Latency of one sample", _format_milliseconds(one.median), f"{_format_range(one)}; {where}"),
        Fact(f"Latency of {performance.batch_size}", _format_milliseconds(batch.median), _format_range(batch)),
    ]
    memory = performance.memory_bytes
    if memory is not None:
        note = f"{wording.format_size(memory.low)} to {wording.format_size(memory.high)}"
        facts.append(Fact("Memory", wording.format_size(memory.median), note))
    return [*facts, Fact("Export", wording.format_size(performance.export_bytes))]


def _draw_classes(evaluation: Evaluation) -> list[Chart]:
    """Return the reliability diagram and the ROC and precision-recall curves that the evaluation holds."""
    charts = (
        [_draw_reliability(evaluation.calibration)] if evaluation.calibration and evaluation.calibration.bins else []
    )
    for kind in CURVES:
        of_kind = [curve for curve in evaluation.curves if curve.kind == kind and curve.points]
        charts += [_draw_curves(kind, of_kind, len(evaluation.classes))] if of_kind else []
    return charts


def _tabulate_classes(evaluation: Evaluation) -> list[Table]:
    """Return a table with a row per class, or of very many classes the worst."""
    if not evaluation.classes:
        return []
    worst = sorted(evaluation.classes, key=lambda scores: 2.0 if scores.f1 is None else scores.f1)[:MAX_CLASS_ROWS]
    listed = evaluation.classes if len(evaluation.classes) <= MAX_CLASS_ROWS else worst
    rows = [
        [
            wording.clean(scores.label),
            wording.format_count(scores.num_samples),
            *map(
                wording.format_number,
                (scores.precision, scores.recall, scores.f1, scores.roc_auc, scores.average_precision),
            ),
        ]
        for scores in listed
    ]
    left_out = "" if len(listed) == len(evaluation.classes) else f", the {MAX_CLASS_ROWS} with the lowest F1"
    columns = ["class", "samples", "precision", "recall", "F1", "ROC AUC", "average precision"]
    return [Table(f"By class{left_out}", columns, rows)]


def _format_range(spread: Spread) -> str:
    return f"{_format_milliseconds(spread.low)} to {_format_milliseconds(spread.high)}"


def _format_milliseconds(seconds: float) -> str:
    return f"{wording.format_number(1000 * seconds, 3)} ms"


def _draw_reliability(calibration: Calibration) -> Chart:
    error = wording.format_number(calibration.error, 3)
    title = f"Calibration: expected error {error}"
    rows = [
        [
            f"{wording.format_decimals(bin.low, 2)} to {wording.format_decimals(bin.high, 2)}",
            wording.format_number(bin.confidence),
            wording.format_number(bin.accuracy),
            wording.format_count(bin.num_samples),
        ]
        for bin in calibration.bins
    ]
    table = Table("Calibration", ["confidence", "mean", "accuracy", "samples"], rows)
    description = f"{title}; " + ", ".join(f"at {row[1]} right {row[2]}" for row in rows)
    note = "bars: share that is right, by confidence; the diagonal is a calibrated model"
    return Chart(title, draw_reliability_chart(calibration.bins, description=description), note, table)


def _draw_curves(kind: str, curves: list[Curve], num_classes: int) -> Chart:
    title, across, area = CURVES[kind]
    series = [
        Series(wording.clean(curve.label), curve.points, figure=wording.format_number(curve.area)) for curve in curves
    ]
    areas = ", ".join(f"{wording.clean(curve.label)} {wording.format_number(curve.area)}" for curve in curves)
    fewer = num_classes > len(curves) > 1
    note = f"one class against the others{', the hardest ones' if fewer else ''}; {area}: {areas}"
    drawing = draw_line_chart(
        series, description=f"{title}, {note}", x_range=(0.0, 1.0), from_zero=True, x_name=across, x_is_whole=False
    )
    rows = [[wording.clean(curve.label), wording.format_number(curve.area)] for curve in curves]
    return Chart(title, drawing, note, Table(title, ["class", area], rows))
