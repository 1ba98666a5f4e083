"""The page that compares versions of a model: metrics, slices, curves, cost, and differing settings and data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kftrain.reports import content, training, wording
from kftrain.reports.charts.interval import Guide, IntervalRow, draw_interval_chart
from kftrain.reports.charts.line import Series, compute_running_mean, draw_line_chart, thin_points
from kftrain.reports.content import Chart, Fact, ReportSection, Table
from kftrain.reports.evaluation import describe_direction
from kftrain.reports.page import Page, render_page
from kftrain.reports.versions import (
    ReportedVersion,
    VersionComparison,
    describe_version,
    find_differences,
    summarize_cost,
)
from kftrain.run.documents import Interval

MAX_CURVES = 8
"""Number of versions whose curves are drawn; the style sheet has as many colours."""

MAX_SLICES = 30
"""Number of slices in the tables; the largest ones are taken."""

MAX_CURVE_COLUMNS = 120
"""Columns to which a curve is thinned; a page holds many curves."""

MAX_VALUE_CHARACTERS = 60
MAX_SLICE_CHARTS = 4

MISSING = "\u2013"

UNDECIDED = (
    "A slice counts as better or worse where its interval leaves zero out. One of a few groups has no interval: many "
    "resamples would hold none of them."
)

Axis = tuple[str, bool, Callable[[ReportedVersion, Mapping[str, Any]], float]]
"""Name of a horizontal axis, whether its numbers are whole, and the function that places a point on it."""


def compose_comparison_page(comparison: VersionComparison, written: Sequence[Fact] = ()) -> Page:
    """Return the page of a comparison; `written` are facts about its writing, see `page.describe_environment`."""
    sections = _describe_parts(comparison)
    return Page(
        eyebrow=f"Comparison \u00b7 {wording.clean(comparison.model_name)}",
        headline=sections[0].headline,
        tone=sections[0].tone,
        sections=sections,
        facts=[*_list_facts(comparison), *written],
    )


def describe_comparison(comparison: VersionComparison) -> ReportSection:
    """Return the comparison as one section for Markdown, with tables instead of charts."""
    parts = _describe_parts(comparison)
    return ReportSection(
        title="Comparison",
        headline=parts[0].headline,
        tone=parts[0].tone,
        sentences=parts[0].sentences,
        tables=[table for part in parts for table in part.tables],
        facts=_list_facts(comparison),
    )


def _describe_parts(comparison: VersionComparison) -> list[ReportSection]:
    """Return the metrics, and those other sections for which the versions have data."""
    versions = comparison.versions
    parts = [
        _describe_metrics(comparison),
        _describe_slices(comparison),
        _describe_curves(comparison),
        _describe_cost(comparison),
        _describe_differences(comparison, "Configuration", "setting", [version.settings for version in versions]),
        _describe_differences(comparison, "Data", "", [version.data for version in versions]),
    ]
    return [part for part in parts if part is not None]


def write_headline(comparison: VersionComparison) -> str:
    """Say in one sentence whether a version beats the baseline by more than the noise of the validation sample."""
    base, metric = describe_version(comparison.base), wording.format_label(comparison.metric).lower()
    if not comparison.others:
        return f"There is only {base}: nothing to compare it with."
    compared = [
        (version, gain)
        for version in comparison.others
        if (gain := comparison.improvement(_find_difference(comparison, version)))
    ]
    if not compared:
        return f"No version can be compared with {base}."
    best, gain = max(compared, key=lambda pair: pair[1].value)
    name = wording.capitalize(describe_version(best))
    if gain.low > 0:
        return f"{name} is better than {base} in {metric}, by {_format_interval(gain)}."
    if all(other.high < 0 for _, other in compared):
        worse = "is worse than" if len(compared) == 1 else "and all others are worse than"
        lost = " ".join(_split_interval(Interval(value=-gain.value, low=-gain.high, high=-gain.low)))
        return f"{name} {worse} {base} in {metric}, by {lost}."
    if len(compared) == 1:
        return f"{name} is not distinguishable from {base} in {metric}."
    return f"No version is distinguishably better than {base} in {metric}."


def _describe_metrics(comparison: VersionComparison) -> ReportSection:
    compared = [version for version in comparison.others if _find_difference(comparison, version) is not None]
    better = any(comparison.is_gain(_find_difference(comparison, version)) for version in compared)
    notes = [
        f"{wording.capitalize(describe_version(version))}: {version.problem}."
        for version in comparison.versions
        if version.problem
    ]
    meaning = (
        "Differences are paired: the same groups of the validation split are resampled for both, "
        f"{wording.format_level(comparison.confidence)} intervals. "
        "They hold the noise of that sample, not that of the seed."
    )
    return ReportSection(
        title="Metrics",
        headline=write_headline(comparison),
        tone="good" if better else "neutral",
        sentences=[*([meaning] if compared else []), *notes],
        charts=_draw_metrics(comparison, compared),
        tables=_tabulate_metrics(comparison),
    )


def _draw_metrics(comparison: VersionComparison, compared: Sequence[ReportedVersion]) -> list[Chart]:
    title = wording.format_label(comparison.metric)
    known = {
        version.version: version.evaluation.metrics.get(comparison.metric)
        for version in comparison.versions
        if version.evaluation
    }
    rows = [
        IntervalRow(_name_column(version), value.value, value.low, value.high, _choose_style(comparison, version))
        for version in comparison.versions
        if (value := known.get(version.version)) is not None
    ]
    charts = (
        [Chart(title, draw_interval_chart(rows, description=title), describe_direction(comparison.goal))]
        if rows
        else []
    )
    gains = [
        (version, gain)
        for version in compared
        if (gain := comparison.improvement(_find_difference(comparison, version)))
    ]
    if gains:
        title = f"Improvement over {describe_version(comparison.base)}"
        drawn = [_make_gain_row(_name_column(version), gain) for version, gain in gains]
        guides = [Guide("no change", 0.0)]
        drawing = draw_interval_chart(drawn, guides, description=title, signed=True)
        level = wording.format_level(comparison.confidence)
        charts.append(Chart(title, drawing, f"paired, {level} interval, right is better"))
    return charts


def _tabulate_metrics(comparison: VersionComparison) -> list[Table]:
    names = list(
        dict.fromkeys(
            name for version in comparison.versions if version.evaluation for name in version.evaluation.metrics
        )
    )
    names.sort(key=lambda name: name != comparison.metric)
    rows = [
        [
            name,
            *(
                _format_interval(version.evaluation.metrics.get(name) if version.evaluation else None)
                for version in comparison.versions
            ),
        ]
        for name in names
    ]
    tables = [Table("Metrics", ["metric", *map(_name_column, comparison.versions)], rows)] if rows else []
    compared = [version for version in comparison.others if version.differences]
    if compared:
        rows = [
            [name, *(_format_interval(version.differences.get(name), signed=True) for version in compared)]
            for name in names
        ]
        tables.append(
            Table(f"Difference to {describe_version(comparison.base)}", ["metric", *map(_name_column, compared)], rows)
        )
    return tables


def _describe_slices(comparison: VersionComparison) -> ReportSection | None:
    sizes = {
        name: scores.num_samples
        for version in reversed(comparison.versions)
        if version.evaluation
        for name, scores in version.evaluation.slices.items()
        if comparison.metric in scores.metrics
    }
    if not sizes:
        return None
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[:MAX_SLICES]
    left_out = len(sizes) - len(names)
    compared = [version for version in comparison.others if version.slice_differences]
    title = wording.format_label(comparison.metric)
    columns = ["slice", "samples", *map(_name_column, comparison.versions)]
    rows = [
        [
            wording.clean(name),
            wording.format_count(sizes[name]),
            *(_format_slice_value(version, name, comparison) for version in comparison.versions),
        ]
        for name in names
    ]
    return ReportSection(
        title="Slices",
        headline=_write_slice_headline(comparison, compared, names),
        sentences=[
            *([f"The {MAX_SLICES} largest of {len(sizes)} slices."] if left_out else []),
            *([UNDECIDED] if compared else []),
        ],
        charts=[
            chart for version in compared[:MAX_SLICE_CHARTS] if (chart := _draw_slices(comparison, version, names))
        ],
        tables=[
            Table(f"{title} by slice", columns, rows),
            *([_tabulate_slice_differences(comparison, compared, names)] if compared else []),
        ],
    )


def _write_slice_headline(
    comparison: VersionComparison, compared: Sequence[ReportedVersion], names: Sequence[str]
) -> str:
    if not compared:
        return "The slices of each version."
    counts = []
    for version in compared[:MAX_SLICE_CHARTS]:
        judged = [comparison.is_gain(_find_slice_difference(comparison, version, name)) for name in names]
        counts.append(f"{version.name} is better in {judged.count(True)} and worse in {judged.count(False)}")
    base = describe_version(comparison.base)
    return f"Of {wording.format_plural(len(names), 'slice')}, {'; '.join(counts)} than {base}."


def _draw_slices(comparison: VersionComparison, version: ReportedVersion, names: Sequence[str]) -> Chart | None:
    gains = {name: comparison.improvement(_find_slice_difference(comparison, version, name)) for name in names}
    known = sorted(((gain, name) for name, gain in gains.items() if gain is not None), key=lambda pair: pair[0].value)
    title = f"Improvement of {version.name} over {comparison.base.name} by slice"
    if not known:
        return None
    rows = [_make_gain_row(wording.clean(name), gain) for gain, name in known]
    drawing = draw_interval_chart(rows, [Guide("no change", 0.0)], description=title, signed=True)
    return Chart(title, drawing, "worst first, right is better; coloured where the interval leaves zero out")


def _tabulate_slice_differences(
    comparison: VersionComparison, compared: Sequence[ReportedVersion], names: Sequence[str]
) -> Table:
    rows = [
        [
            wording.clean(name),
            *(_format_interval(_find_slice_difference(comparison, version, name), signed=True) for version in compared),
        ]
        for name in names
    ]
    return Table(
        f"Difference to {describe_version(comparison.base)} by slice", ["slice", *map(_name_column, compared)], rows
    )


def _describe_curves(comparison: VersionComparison) -> ReportSection | None:
    drawn = [version for version in comparison.versions if version.history and version.completion][:MAX_CURVES]
    if not drawn:
        return None
    charts = []
    for title, key in (
        ("Loss", "loss"),
        (wording.format_label(comparison.metric), f"{training.VALIDATION}{comparison.metric}"),
    ):
        for axis in _choose_axes(drawn):
            chart = _draw_curves(title, key, axis, drawn)
            charts += [chart] if chart else []
    if not charts:
        return None
    text = "What each version had learned after so many samples, tokens and hours of training, all attempts together."
    return ReportSection("Training", "How they learned.", sentences=[text], charts=charts)


def _choose_axes(versions: Sequence[ReportedVersion]) -> list[Axis]:
    longest_seconds = max(float(point.get("seconds", 0.0)) for version in versions for point in version.history)
    unit, seconds = "hours" if longest_seconds >= 3600 else "minutes", 3600 if longest_seconds >= 3600 else 60
    axes: list[Axis] = [("samples", True, _count_samples)]
    if all(version.tokens_per_sample for version in versions):
        axes.append(("tokens", True, lambda version, point: _count_samples(version, point) * version.tokens_per_sample))
    axes.append((unit, False, lambda version, point: float(point.get("seconds", 0.0)) / seconds))
    return axes


def _count_samples(version: ReportedVersion, point: Mapping[str, Any]) -> float:
    assert version.completion is not None
    return float(point["step"]) * version.completion.samples_consumed / max(version.completion.step, 1)


def _draw_curves(title: str, key: str, axis: Axis, versions: Sequence[ReportedVersion]) -> Chart | None:
    name, is_whole, place = axis
    series = [Series(version.name, _make_curve(version, key, place)) for version in versions]
    if not any(curve.finite_points for curve in series):
        return None
    full = f"{title} over {name}"
    drawing = draw_line_chart(series, description=full, height=170, x_name="", x_is_whole=is_whole)
    return Chart(full, drawing, "running mean" if _is_smoothed(versions, key) else "")


def _make_curve(
    version: ReportedVersion, key: str, place: Callable[[ReportedVersion, Mapping[str, Any]], float]
) -> list[tuple[float, float]]:
    """Return a curve with ascending x; a noisy one is smoothed, since several raw ones cannot be told apart."""
    known = {float(point["step"]): point for point in version.history if wording.to_finite(point.get(key)) is not None}
    points = sorted((place(version, point), float(point[key])) for point in known.values())
    smoothed = Series("", points, smooth=not key.startswith(training.VALIDATION))
    return thin_points(compute_running_mean(points, smoothed.window) if smoothed.window else points, MAX_CURVE_COLUMNS)


def _is_smoothed(versions: Sequence[ReportedVersion], key: str) -> bool:
    is_noisy = not key.startswith(training.VALIDATION)
    return is_noisy and any(
        Series("", training.select_points(version.history, key), smooth=True).window for version in versions
    )


def _describe_cost(comparison: VersionComparison) -> ReportSection | None:
    versions = comparison.versions
    rows = [
        [name, *(_format_completion_field(version, key, format_value) for version in versions)]
        for name, key, format_value in OF_COMPLETION
    ]
    rows.append(["tokens", *map(_format_tokens, versions)])
    rows += [
        [name, *(_format_timeline_field(version, key, format_value) for version in versions)]
        for name, key, format_value in OF_TIMELINE
    ]
    known = [row for row in rows if any(cell != MISSING for cell in row[1:])]
    if not known:
        return None
    return ReportSection(
        title="Cost",
        headline="What their training took.",
        sentences=["Goodput is the share of the time that made steps which were kept. Pauses between attempts count."],
        tables=[Table("Training", ["", *map(_name_column, versions)], known)],
    )


OF_COMPLETION: Sequence[tuple[str, str, Callable[[int], str]]] = (
    ("parameters", "num_parameters", wording.format_large_count),
    ("steps", "step", wording.format_count),
    ("processes", "world_size", wording.format_count),
    ("samples", "samples_consumed", wording.format_large_count),
)
"""Rows of the cost table: name, field of `Completion`, formatter."""

OF_TIMELINE: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("attempts", "attempts", wording.format_count),
    ("time, all attempts", "wall_seconds", wording.format_duration),
    ("in steps that were kept", "step_seconds", wording.format_duration),
    ("in validations and checkpoints", "around_seconds", wording.format_duration),
    ("in starts, lost steps, pauses", "lost_seconds", wording.format_duration),
    ("goodput", "goodput", wording.format_percent),
    ("GPU hours", "gpu_hours", wording.format_number),
    ("process hours", "process_hours", wording.format_number),
)
"""Further rows: name, key of `summarize_cost`, formatter."""


def _format_completion_field(version: ReportedVersion, name: str, format_value: Callable[[int], str]) -> str:
    return format_value(getattr(version.completion, name)) if version.completion else MISSING


def _format_timeline_field(version: ReportedVersion, name: str, format_value: Callable[[Any], str]) -> str:
    value = summarize_cost(version).get(name)
    return MISSING if value is None else format_value(value)


def _format_tokens(version: ReportedVersion) -> str:
    if version.completion is None or not version.tokens_per_sample:
        return MISSING
    return wording.format_large_count(version.completion.samples_consumed * version.tokens_per_sample)


def _describe_differences(
    comparison: VersionComparison, title: str, column: str, documents: Sequence[Mapping[str, str]]
) -> ReportSection | None:
    """List the values that differ; None for a single version, or if one version's document is lost."""
    if len(comparison.versions) < 2 or not all(documents):
        return None
    rows = [
        [wording.clean(key), *(wording.cut_text(wording.clean(v), MAX_VALUE_CHARACTERS) or MISSING for v in values)]
        for key, values in find_differences(documents).items()
    ]
    headline = (
        f"{wording.format_plural(len(rows), 'value')} differ{'s' if len(rows) == 1 else ''}."
        if rows
        else "It is the same."
    )
    tables = [Table(title, [column, *map(_name_column, comparison.versions)], rows)] if rows else []
    return ReportSection(title, headline, tables=tables)


def _list_facts(comparison: VersionComparison) -> list[Fact]:
    facts = (
        [content.make_digest_fact("Evaluation digest", comparison.evaluation_digest)]
        if comparison.evaluation_digest
        else []
    )
    for version in comparison.versions:
        facts += [content.make_uri_fact(f"Run of {version.name}", version.run_uri)] if version.run_uri else []
        if version.completion is not None:
            facts.append(content.make_digest_fact(f"Export of {version.name}", version.completion.export_digest))
    return facts


def _make_gain_row(name: str, gain: Interval) -> IntervalRow:
    style = "plain" if gain.low <= 0 <= gain.high else "better" if gain.low > 0 else "worse"
    if not (math.isfinite(gain.low) and math.isfinite(gain.high)):
        return IntervalRow(name, gain.value, style=style)
    return IntervalRow(name, gain.value, gain.low, gain.high, style)


def _find_difference(comparison: VersionComparison, version: ReportedVersion) -> Interval | None:
    return version.differences.get(comparison.metric)


def _find_slice_difference(comparison: VersionComparison, version: ReportedVersion, name: str) -> Interval | None:
    return version.slice_differences.get(name, {}).get(comparison.metric)


def _format_slice_value(version: ReportedVersion, name: str, comparison: VersionComparison) -> str:
    scores = version.evaluation.slices.get(name) if version.evaluation else None
    value = scores.metrics.get(comparison.metric) if scores else None
    return MISSING if value is None else wording.format_number(value)


def _choose_style(comparison: VersionComparison, version: ReportedVersion) -> str:
    judged = comparison.is_gain(_find_difference(comparison, version))
    return {True: "better", False: "worse", None: "plain"}[judged]


def _name_column(version: ReportedVersion) -> str:
    return f"{version.name} champion" if "champion" in version.aliases else version.name


def _format_interval(interval: Interval | None, signed: bool = False) -> str:
    return MISSING if interval is None else " ".join(_split_interval(interval, signed)).strip()


def _split_interval(interval: Interval, signed: bool = False) -> tuple[str, str]:
    """Return a value and its interval; the interval is empty if its bounds are infinite, as for one document."""
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return f"{'+' if signed and interval.value > 0 else ''}{wording.format_number(interval.value)}", ""
    value, edges = wording.format_interval(interval.value, interval.low, interval.high, signed)
    return value, f"({edges})"


def comparison_html(comparison: VersionComparison, written: Sequence[Fact] = ()) -> str:
    """Return the page of a comparison as HTML, as copies of examples/compare.ipynb from 0.2.0 ask for it."""
    return render_page(compose_comparison_page(comparison, written))


headline = write_headline  # its name in 0.2.0, which copies of examples/compare.ipynb import
