"""The report of an evaluation: metrics with intervals beside their baselines, slices, and confusions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeGuard

from kftrain.config import Config
from kftrain.report import classes, content, wording
from kftrain.report.charts.confusion import MAX_CLASSES, confusion_chart, mistakes
from kftrain.report.charts.interval import IntervalRow, SliceRow, interval_chart, slice_chart
from kftrain.report.content import Chart, Fact, Gallery, ReportSection, Sample, Table
from kftrain.run.documents import Confusion, Evaluation, Example, Interval, Performance, Slice

MAX_SLICES = 30
"""Slices that are drawn; of more, two thirds worst and one third best."""

MIN_SLICE_SAMPLES = 10
"""A slice of fewer samples never heads the list: its value is chance."""

_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")

MAX_BASELINES = 12
MAX_MISTAKES = 12
DIRECTIONS = {"minimize": "lower is better", "maximize": "higher is better"}


def section(
    config: Config,
    evaluation: Evaluation,
    performance: Performance | None = None,
    reference: Evaluation | None = None,
) -> ReportSection:
    """The section of an evaluation. Which direction is better is known of the gate's metric alone."""
    metric, goal = primary_metric(config, evaluation)
    if metric is None:
        return ReportSection("Evaluation", "The evaluation has no metrics.", facts=_facts(evaluation))
    found = evaluation.metrics[metric]
    baselines = evaluation.baselines.get(metric, {})
    charts = [_metric_chart(name, evaluation, goal if name == metric else "") for name in _charted(metric, evaluation)]
    slices = _slice_chart(metric, goal, evaluation)
    confusion = evaluation.confusion if _is_square(evaluation.confusion) else None
    drawn = confusion is not None and len(confusion.labels) <= MAX_CLASSES
    return ReportSection(
        title="Evaluation",
        headline=_headline(metric, goal, found),
        sentences=[_against(found, goal, baselines), _sample_size(found, evaluation)],
        figures=[*_figures(metric, evaluation), *classes.figures(evaluation), *classes.costs(performance)],
        charts=[
            *charts,
            *([slices] if slices else []),
            *([_confusion_chart(confusion)] if confusion and drawn else []),
            *classes.charts(evaluation),
        ],
        tables=[
            *_reference(reference),
            *([_frequent_mistakes(confusion)] if confusion and not drawn else []),
            *classes.tables(evaluation),
        ],
        galleries=_galleries(evaluation),
        facts=_facts(evaluation),
    )


def _reference(reference: Evaluation | None) -> list[Table]:
    if reference is None:
        return []
    shown = {n: wording.interval(each.value, each.low, each.high) for n, each in reference.metrics.items()}
    rows = [[wording.label(name), value, edges] for name, (value, edges) in shown.items()]
    samples = wording.plural(reference.num_samples, "sample")
    return [Table(f"On the reference set, {samples}", ["", "value", "interval"], rows)]


def primary_metric(config: Config, evaluation: Evaluation) -> tuple[str | None, str]:
    """The metric that the gate compares, with its goal; where that is missing another one, its goal unknown (empty)."""
    if config.registry.metric in evaluation.metrics:
        return config.registry.metric, config.registry.goal
    return next(iter(evaluation.metrics), None), ""


def is_better(value: float, other: float, goal: str) -> bool | None:
    """Whether a value is better than another; None where the goal is unknown or they are equal or not numbers."""
    if goal not in DIRECTIONS or not (value < other or value > other):
        return None
    return (value < other) == (goal == "minimize")


def direction(goal: str) -> str:
    """`lower is better`, or nothing where the goal is unknown."""
    return DIRECTIONS.get(goal, "")


def _headline(metric: str, goal: str, found: Interval) -> str:
    better = f", {direction(goal)}" if goal else ""
    return f"{wording.label(metric)} {wording.interval(found.value, found.low, found.high)[0]}{better}."


def _against(found: Interval, goal: str, baselines: Mapping[str, float]) -> str:
    """How the value stands to each baseline; within the interval there is nothing to tell."""
    said = [_relation(found, goal, name, value) for name, value in list(baselines.items())[:MAX_BASELINES]]
    if not said:
        return ""
    sentence = "; ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _relation(found: Interval, goal: str, name: str, baseline: float) -> str:
    name, shown = wording.clean(name), wording.number(float(baseline))
    if wording.finite(baseline) is None or wording.finite(found.value) is None:
        return f"{name} is {shown}"
    if found.low <= baseline <= found.high:
        return f"not distinguishable from {name} ({shown})"
    better = is_better(found.value, baseline, goal)
    word = {True: "better", False: "worse", None: "lower" if found.value < baseline else "higher"}[better]
    return f"{word} than {name} ({shown}) by {wording.number(abs(found.value - baseline), 3)}"


def _sample_size(found: Interval, evaluation: Evaluation) -> str:
    edges = wording.interval(found.value, found.low, found.high)[1]
    groups = wording.plural(evaluation.num_groups, "independent group")
    samples = wording.plural(evaluation.num_samples, "sample")
    size = samples if evaluation.num_groups == evaluation.num_samples else f"{groups} with {samples}"
    return f"The {_level(evaluation)} interval is {edges}, from {size}."


def _level(evaluation: Evaluation) -> str:
    return f"{wording.number(100 * evaluation.confidence, 3).removesuffix('.0')}%"


def _figures(primary: str, evaluation: Evaluation) -> list[Fact]:
    """The metrics that get no chart of their own."""
    charted = _charted(primary, evaluation)
    shown = {
        name: wording.interval(found.value, found.low, found.high)
        for name, found in evaluation.metrics.items()
        if name not in charted
    }
    return [Fact(wording.label(name), value, edges) for name, (value, edges) in shown.items()]


def _charted(primary: str, evaluation: Evaluation) -> list[str]:
    return [primary, *(n for n in evaluation.metrics if n != primary and evaluation.baselines.get(n))]


def _metric_chart(metric: str, evaluation: Evaluation, goal: str) -> Chart:
    found = evaluation.metrics[metric]
    baselines = list(evaluation.baselines.get(metric, {}).items())[:MAX_BASELINES]
    rows = [IntervalRow("this model", found.value, found.low, found.high)]
    rows += [IntervalRow(wording.clean(name), float(value), style="plain") for name, value in baselines]
    title = wording.label(metric)
    table = Table(title, ["", "value", "interval"], [[row.name, *row.shown] for row in rows])
    description = f"{title}: " + ", ".join(f"{row.name} {' '.join(row.shown)}".strip() for row in rows)
    return Chart(title, interval_chart(rows, description=description), direction(goal), table)


def _slice_chart(metric: str, goal: str, evaluation: Evaluation) -> Chart | None:
    whole = evaluation.metrics[metric].value
    rows = [
        SliceRow(
            wording.clean(name),
            each.metrics[metric],
            each.num_samples,
            _worse(each, metric, whole, goal),
            each.intervals.get(metric),
        )
        for name, each in evaluation.slices.items()
        if metric in each.metrics
    ]
    if not rows:
        return None
    shown = _shown_slices(rows, goal)
    title = f"{wording.label(metric)} by slice"
    first = "worst first" if goal else "highest first"
    if any(row.num_samples < MIN_SLICE_SAMPLES for row in shown):
        first += f", those of fewer than {MIN_SLICE_SAMPLES} samples last: they say little"
    left_out = (
        "" if len(shown) == len(rows) else f", {len(shown)} of {wording.count(len(rows))}: the first and the last"
    )
    if any(row.bounds for row in shown):
        first += f"; bars: {_level(evaluation)} intervals, coloured where the whole is outside"
    table = Table(
        title,
        ["slice", metric, "interval", "samples"],
        [[r.name, *r.shown, wording.count(r.num_samples)] for r in shown],
    )
    description = f"{title}, {first}: " + ", ".join(f"{row.name} {wording.number(float(row.value))}" for row in shown)
    return Chart(title, slice_chart(shown, whole, description=description), first + left_out, table)


def _shown_slices(rows: list[SliceRow], goal: str) -> list[SliceRow]:
    """In the order in which they are drawn: the worst ones first, but what has hardly any samples after all others.

    Of more than there is room for the small ones go first, then those in the middle.
    """
    ordered = sorted(rows, key=lambda row: _badness(row.value, goal), reverse=True)
    large = [row for row in ordered if row.num_samples >= MIN_SLICE_SAMPLES]
    small = [row for row in ordered if row.num_samples < MIN_SLICE_SAMPLES]
    if not large:
        large, small = small, []
    if len(large) > MAX_SLICES:
        return [*large[: MAX_SLICES * 2 // 3], *large[-(MAX_SLICES // 3) :]]
    return [*large, *small][:MAX_SLICES]


def _worse(each: Slice, metric: str, whole: float, goal: str) -> bool | None:
    """Whether a slice is worse than the whole; None where that cannot be told, as within its interval."""
    bounds = each.intervals.get(metric)
    if bounds is not None and bounds.low <= whole <= bounds.high:
        return None
    better = is_better(each.metrics[metric], whole, goal)
    return None if better is None else not better


def _galleries(evaluation: Evaluation) -> list[Gallery]:
    """Sample predictions, in the order in which they were chosen."""
    found = {
        "Samples spread over the data": [each for each in evaluation.examples if not each.is_worst],
        "Samples with the largest loss": [each for each in evaluation.examples if each.is_worst],
    }
    measured = {name for each in evaluation.examples for name, value in each.metrics.items() if value not in (0, 1)}
    return [Gallery(title, [_sample(each, measured) for each in shown]) for title, shown in found.items() if shown]


def _sample(example: Example, measured: set[str]) -> Sample:
    """`measured`: what is more than right or wrong of a single sample, which it shows itself."""
    shown = content.sample_facts(example.shown, example.names)
    metrics = {name: value for name, value in example.metrics.items() if name in measured}
    figures = [Fact(wording.label(name).lower(), wording.number(value)) for name, value in metrics.items()]
    picture = example.picture if _BASE64.fullmatch(example.picture) else ""
    return Sample(wording.clean(example.key), [*shown, *figures], picture)


def _badness(value: float, goal: str) -> float:
    if wording.finite(value) is None:
        return float("-inf")
    return -value if goal == "maximize" else value


def _confusion_chart(confusion: Confusion) -> Chart:
    often = "; ".join(_often(confusion, 3)) or "no class was taken for another"
    drawing = confusion_chart(confusion.labels, confusion.matrix, description=f"Confusion matrix: {often}")
    note = f"rows: true class, columns: predicted; most frequent: {often}"
    return Chart("Confusion matrix", drawing, note, _confusion_table(confusion), wide=True)


def _frequent_mistakes(confusion: Confusion) -> Table:
    """What is told of a matrix that is too large to draw."""
    found = mistakes(confusion.labels, confusion.matrix, MAX_MISTAKES)
    rows = [
        [wording.clean(m.true), wording.clean(m.predicted), wording.count(m.count), wording.count(m.num_true)]
        for m in found
    ]
    return Table("Most frequent confusions", ["true class", "taken for", "times", "of"], rows)


def _often(confusion: Confusion, max_mistakes: int) -> list[str]:
    return [
        f"{wording.clean(each.true)} taken for {wording.clean(each.predicted)} "
        f"({wording.count(each.count)} of {wording.count(each.num_true)})"
        for each in mistakes(confusion.labels, confusion.matrix, max_mistakes)
    ]


def _is_square(confusion: Confusion | None) -> TypeGuard[Confusion]:
    """Whether there is a matrix with a row and a column per label."""
    if confusion is None or not confusion.labels:
        return False
    size = len(confusion.labels)
    return len(confusion.matrix) == size and all(len(row) == size for row in confusion.matrix)


def _confusion_table(confusion: Confusion) -> Table:
    rows = [
        [wording.clean(name), *map(wording.count, counts)]
        for name, counts in zip(confusion.labels, confusion.matrix, strict=True)
    ]
    return Table("Confusion matrix", ["true \\ predicted", *map(wording.clean, confusion.labels)], rows)


def _facts(evaluation: Evaluation) -> list[Fact]:
    return [
        content.digest("Evaluation digest", evaluation.evaluation_digest),
        content.digest("Dataset digest", evaluation.dataset_digest),
        content.digest("Checkpoint digest", evaluation.checkpoint_digest),
        content.digest("Export digest", evaluation.export_digest),
        content.uri("Export", evaluation.export_uri),
        content.digest("Statistics digest", evaluation.statistics_sha256),
    ]
