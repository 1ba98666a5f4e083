"""The page of a comparison of versions: which is better, where, how they learned, what they took, what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kftrain.report import content, training, wording
from kftrain.report.charts.interval import Guide, IntervalRow, interval_chart
from kftrain.report.charts.line import Series, line_chart, running_mean, thin
from kftrain.report.content import Chart, Fact, ReportSection, Table
from kftrain.report.evaluation import direction
from kftrain.report.page import Page
from kftrain.report.versions import ReportedVersion, VersionComparison, called, cost, differing
from kftrain.run.documents import Interval

MAX_CURVES = 8
"""Versions whose curves are drawn: there are so many colours."""

MAX_SLICES = 30
"""Slices that are shown, the largest."""

MAX_CURVE_COLUMNS = 120
"""Columns to which each curve is thinned: there are many."""

MAX_VALUE_CHARACTERS = 60
MAX_SLICE_CHARTS = 4

MISSING = "\u2013"

UNDECIDED = (
    "A slice counts as better or worse where its interval leaves zero out. One of a few groups has no interval: many "
    "resamples would hold none of them."
)

Axis = tuple[str, bool, Callable[[ReportedVersion, Mapping[str, Any]], float]]
"""Name of a horizontal axis, whether its numbers are whole, and where a point of a curve stands on it."""


def page(found: VersionComparison, written: Sequence[Fact] = ()) -> Page:
    """The page of a comparison. `written`: where and with what it is written, see `environment.facts`."""
    metrics = _metrics(found)
    sections = [metrics, _slices(found), _curves(found), _cost(found), _settings(found), _data(found)]
    return Page(
        eyebrow=f"Comparison \u00b7 {wording.clean(found.model_name)}",
        headline=metrics.headline,
        tone=metrics.tone,
        sections=[section for section in sections if section is not None],
        facts=[*_facts(found), *written],
    )


def section(found: VersionComparison) -> ReportSection:
    """All of it as one section, for Markdown: tables instead of charts."""
    parts = [part for part in (_slices(found), _cost(found), _settings(found), _data(found)) if part is not None]
    metrics = _metrics(found)
    return ReportSection(
        title="Comparison",
        headline=metrics.headline,
        tone=metrics.tone,
        sentences=metrics.sentences,
        tables=[*metrics.tables, *(table for part in parts for table in part.tables)],
        facts=_facts(found),
    )


def headline(found: VersionComparison) -> str:
    """Which version is better than the baseline by more than the noise of the validation sample, in one sentence."""
    base, metric = called(found.base), wording.label(found.metric).lower()
    if not found.others:
        return f"There is only {base}: nothing to compare it with."
    compared = [(each, gain) for each in found.others if (gain := found.improvement(_primary(found, each)))]
    if not compared:
        return f"No version can be compared with {base}."
    best, gain = max(compared, key=lambda pair: pair[1].value)
    if gain.low > 0:
        return f"{_capital(called(best))} is better than {base} in {metric}, by {' '.join(_shown_interval(gain))}."
    if all(each.high < 0 for _, each in compared):
        worse = "is worse than" if len(compared) == 1 else "and all others are worse than"
        lost = " ".join(_shown_interval(Interval(value=-gain.value, low=-gain.high, high=-gain.low)))
        return f"{_capital(called(best))} {worse} {base} in {metric}, by {lost}."
    nobody = _capital(called(best)) if len(compared) == 1 else "No version"
    is_better = "is not distinguishable from" if len(compared) == 1 else "is distinguishably better than"
    return f"{nobody} {is_better} {base} in {metric}."


def _metrics(found: VersionComparison) -> ReportSection:
    compared = [each for each in found.others if _primary(found, each) is not None]
    better = any(found.judged(_primary(found, each)) for each in compared)
    notes = [f"{_capital(called(each))}: {each.problem}." for each in found.versions if each.problem]
    level = _level(found)
    meaning = (
        f"Differences are paired: the same groups of the validation split are resampled for both, {level} intervals. "
        "They hold the noise of that sample, not that of the seed."
    )
    return ReportSection(
        title="Metrics",
        headline=headline(found),
        tone="good" if better else "neutral",
        sentences=[*([meaning] if compared else []), *notes],
        charts=_metric_charts(found, compared),
        tables=_metric_tables(found),
    )


def _metric_charts(found: VersionComparison, compared: Sequence[ReportedVersion]) -> list[Chart]:
    title = wording.label(found.metric)
    known = {each.version: each.evaluation.metrics.get(found.metric) for each in found.versions if each.evaluation}
    rows = [
        IntervalRow(_named(each), value.value, value.low, value.high, _style(found, each))
        for each in found.versions
        if (value := known.get(each.version)) is not None
    ]
    charts = [Chart(title, interval_chart(rows, description=title), direction(found.goal))] if rows else []
    gains = [(each, gain) for each in compared if (gain := found.improvement(_primary(found, each)))]
    if gains:
        title = f"Improvement over {called(found.base)}"
        drawn = [_gain_row(_named(each), gain) for each, gain in gains]
        guides = [Guide("no change", 0.0)]
        drawing = interval_chart(drawn, guides, description=title, signed=True)
        charts.append(Chart(title, drawing, f"paired, {_level(found)} interval, right is better"))
    return charts


def _metric_tables(found: VersionComparison) -> list[Table]:
    names = list(dict.fromkeys(name for each in found.versions if each.evaluation for name in each.evaluation.metrics))
    names.sort(key=lambda name: name != found.metric)
    rows = [
        [name, *(_value(each.evaluation.metrics.get(name) if each.evaluation else None) for each in found.versions)]
        for name in names
    ]
    tables = [Table("Metrics", ["metric", *map(_named, found.versions)], rows)] if rows else []
    compared = [each for each in found.others if each.differences]
    if compared:
        rows = [[name, *(_value(each.differences.get(name), signed=True) for each in compared)] for name in names]
        tables.append(Table(f"Difference to {called(found.base)}", ["metric", *map(_named, compared)], rows))
    return tables


def _slices(found: VersionComparison) -> ReportSection | None:
    sizes = {
        name: each.num_samples
        for version in reversed(found.versions)
        if version.evaluation
        for name, each in version.evaluation.slices.items()
        if found.metric in each.metrics
    }
    if not sizes:
        return None
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[:MAX_SLICES]
    left_out = len(sizes) - len(names)
    compared = [each for each in found.others if each.slice_differences]
    title = wording.label(found.metric)
    columns = ["slice", "samples", *map(_named, found.versions)]
    rows = [
        [wording.clean(name), wording.count(sizes[name]), *(_slice_value(each, name, found) for each in found.versions)]
        for name in names
    ]
    return ReportSection(
        title="Slices",
        headline=_slice_headline(found, compared, names),
        sentences=[
            *([f"The {MAX_SLICES} largest of {len(sizes)} slices."] if left_out else []),
            *([UNDECIDED] if compared else []),
        ],
        charts=[chart for each in compared[:MAX_SLICE_CHARTS] if (chart := _slice_chart(found, each, names))],
        tables=[
            Table(f"{title} by slice", columns, rows),
            *([_slice_differences(found, compared, names)] if compared else []),
        ],
    )


def _slice_headline(found: VersionComparison, compared: Sequence[ReportedVersion], names: Sequence[str]) -> str:
    if not compared:
        return "The slices of each version."
    said = []
    for each in compared[:MAX_SLICE_CHARTS]:
        judged = [found.judged(_slice_difference(found, each, name)) for name in names]
        said.append(f"{each.name} is better in {judged.count(True)} and worse in {judged.count(False)}")
    return f"Of {wording.plural(len(names), 'slice')}, {'; '.join(said)} than {called(found.base)}."


def _slice_chart(found: VersionComparison, version: ReportedVersion, names: Sequence[str]) -> Chart | None:
    gains = {name: found.improvement(_slice_difference(found, version, name)) for name in names}
    known = sorted(((gain, name) for name, gain in gains.items() if gain is not None), key=lambda pair: pair[0].value)
    title = f"Improvement of {version.name} over {found.base.name} by slice"
    if not known:
        return None
    rows = [_gain_row(wording.clean(name), gain) for gain, name in known]
    drawing = interval_chart(rows, [Guide("no change", 0.0)], description=title, signed=True)
    return Chart(title, drawing, "worst first, right is better; coloured where the interval leaves zero out")


def _slice_differences(found: VersionComparison, compared: Sequence[ReportedVersion], names: Sequence[str]) -> Table:
    rows = [
        [wording.clean(name), *(_value(_slice_difference(found, each, name), signed=True) for each in compared)]
        for name in names
    ]
    return Table(f"Difference to {called(found.base)} by slice", ["slice", *map(_named, compared)], rows)


def _curves(found: VersionComparison) -> ReportSection | None:
    drawn = [each for each in found.versions if each.history and each.completion][:MAX_CURVES]
    if not drawn:
        return None
    charts = []
    for title, key in (("Loss", "loss"), (wording.label(found.metric), f"{training.VALIDATION}{found.metric}")):
        for axis in _axes(drawn):
            chart = _curve_chart(title, key, axis, drawn)
            charts += [chart] if chart else []
    if not charts:
        return None
    text = "What each version had learned after so many samples, tokens and hours of training, all attempts together."
    return ReportSection("Training", "How they learned.", sentences=[text], charts=charts)


def _axes(versions: Sequence[ReportedVersion]) -> list[Axis]:
    longest_seconds = max(float(point.get("seconds", 0.0)) for each in versions for point in each.history)
    unit, seconds = "hours" if longest_seconds >= 3600 else "minutes", 3600 if longest_seconds >= 3600 else 60
    axes: list[Axis] = [("samples", True, _samples)]
    if all(each.tokens_per_sample for each in versions):
        axes.append(("tokens", True, lambda each, point: _samples(each, point) * each.tokens_per_sample))
    axes.append((unit, False, lambda each, point: float(point.get("seconds", 0.0)) / seconds))
    return axes


def _samples(version: ReportedVersion, point: Mapping[str, Any]) -> float:
    assert version.completion is not None
    return float(point["step"]) * version.completion.samples_consumed / max(version.completion.step, 1)


def _curve_chart(title: str, key: str, axis: Axis, versions: Sequence[ReportedVersion]) -> Chart | None:
    name, is_whole, place = axis
    series = [Series(each.name, _curve(each, key, place)) for each in versions]
    if not any(each.finite_points for each in series):
        return None
    full = f"{title} over {name}"
    drawing = line_chart(series, description=full, height=170, x_name="", x_is_whole=is_whole)
    return Chart(full, drawing, "running mean" if _is_smoothed(versions, key) else "")


def _curve(
    version: ReportedVersion, key: str, place: Callable[[ReportedVersion, Mapping[str, Any]], float]
) -> list[tuple[float, float]]:
    """A curve with ascending x: noisy ones as their running mean, since several in one chart cannot be told apart."""
    known = {float(point["step"]): point for point in version.history if wording.finite(point.get(key)) is not None}
    points = sorted((place(version, point), float(point[key])) for point in known.values())
    smoothed = Series("", points, smooth=not key.startswith(training.VALIDATION))
    return thin(running_mean(points, smoothed.window) if smoothed.window else points, MAX_CURVE_COLUMNS)


def _is_smoothed(versions: Sequence[ReportedVersion], key: str) -> bool:
    is_noisy = not key.startswith(training.VALIDATION)
    return is_noisy and any(Series("", training.points(each.history, key), smooth=True).window for each in versions)


def _cost(found: VersionComparison) -> ReportSection | None:
    versions = found.versions
    rows = [[name, *(_of_completion(each, key, shown) for each in versions)] for name, key, shown in OF_COMPLETION]
    rows.append(["tokens", *map(_tokens, versions)])
    rows += [[name, *(_of_timeline(each, key, shown) for each in versions)] for name, key, shown in OF_TIMELINE]
    known = [row for row in rows if any(cell != MISSING for cell in row[1:])]
    if not known:
        return None
    return ReportSection(
        title="Cost",
        headline="What their training took.",
        sentences=["Goodput is the share of the time that made steps which were kept. Pauses between attempts count."],
        tables=[Table("Training", ["", *map(_named, versions)], known)],
    )


OF_COMPLETION: Sequence[tuple[str, str, Callable[[int], str]]] = (
    ("parameters", "num_parameters", wording.large_count),
    ("steps", "step", wording.count),
    ("processes", "world_size", wording.count),
    ("samples", "samples_consumed", wording.large_count),
)
"""Rows of the table: name, field of the completion, how it is shown."""

OF_TIMELINE: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("attempts", "attempts", wording.count),
    ("time, all attempts", "wall_seconds", wording.duration),
    ("in steps that were kept", "step_seconds", wording.duration),
    ("in validations and checkpoints", "around_seconds", wording.duration),
    ("in starts, lost steps, pauses", "lost_seconds", wording.duration),
    ("goodput", "goodput", wording.percent),
    ("GPU hours", "gpu_hours", wording.number),
    ("process hours", "process_hours", wording.number),
)
"""The same of what `cost` gives."""


def _of_completion(version: ReportedVersion, name: str, shown: Callable[[int], str]) -> str:
    return shown(getattr(version.completion, name)) if version.completion else MISSING


def _of_timeline(version: ReportedVersion, name: str, shown: Callable[[Any], str]) -> str:
    found = cost(version).get(name)
    return MISSING if found is None else shown(found)


def _tokens(version: ReportedVersion) -> str:
    if version.completion is None or not version.tokens_per_sample:
        return MISSING
    return wording.large_count(version.completion.samples_consumed * version.tokens_per_sample)


def _settings(found: VersionComparison) -> ReportSection | None:
    return _diff(found, "Configuration", "setting", [each.settings for each in found.versions])


def _data(found: VersionComparison) -> ReportSection | None:
    return _diff(found, "Data", "", [each.data for each in found.versions])


def _diff(
    found: VersionComparison, title: str, column: str, documents: Sequence[Mapping[str, str]]
) -> ReportSection | None:
    """Only what differs; nothing where there is but one version, or nothing is known of one."""
    if len(found.versions) < 2 or not all(documents):
        return None
    rows = [
        [wording.clean(key), *(wording.ellipsis(wording.clean(v), MAX_VALUE_CHARACTERS) or MISSING for v in values)]
        for key, values in differing(documents).items()
    ]
    said = f"{wording.plural(len(rows), 'value')} differ{'s' if len(rows) == 1 else ''}." if rows else "It is the same."
    tables = [Table(title, [column, *map(_named, found.versions)], rows)] if rows else []
    return ReportSection(title, said, tables=tables)


def _facts(found: VersionComparison) -> list[Fact]:
    facts = [content.digest("Evaluation digest", found.evaluation_digest)] if found.evaluation_digest else []
    for each in found.versions:
        facts += [content.uri(f"Run of {each.name}", each.run_uri)] if each.run_uri else []
        if each.completion is not None:
            facts.append(content.digest(f"Export of {each.name}", each.completion.export_digest))
    return facts


def _gain_row(name: str, gain: Interval) -> IntervalRow:
    style = "plain" if gain.low <= 0 <= gain.high else "better" if gain.low > 0 else "worse"
    if not (math.isfinite(gain.low) and math.isfinite(gain.high)):
        return IntervalRow(name, gain.value, style=style)
    return IntervalRow(name, gain.value, gain.low, gain.high, style)


def _primary(found: VersionComparison, version: ReportedVersion) -> Interval | None:
    return version.differences.get(found.metric)


def _slice_difference(found: VersionComparison, version: ReportedVersion, name: str) -> Interval | None:
    return version.slice_differences.get(name, {}).get(found.metric)


def _slice_value(version: ReportedVersion, name: str, found: VersionComparison) -> str:
    each = version.evaluation.slices.get(name) if version.evaluation else None
    value = each.metrics.get(found.metric) if each else None
    return MISSING if value is None else wording.number(value)


def _style(found: VersionComparison, version: ReportedVersion) -> str:
    judged = found.judged(_primary(found, version))
    return {True: "better", False: "worse", None: "plain"}[judged]


def _named(version: ReportedVersion) -> str:
    return f"{version.name} champion" if "champion" in version.aliases else version.name


def _value(found: Interval | None, signed: bool = False) -> str:
    return MISSING if found is None else " ".join(_shown_interval(found, signed)).strip()


def _shown_interval(found: Interval, signed: bool = False) -> tuple[str, str]:
    """The value and its interval; without one where its bounds are not known, as for a single document."""
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return f"{'+' if signed and found.value > 0 else ''}{wording.number(found.value)}", ""
    value, edges = wording.interval(found.value, found.low, found.high, signed)
    return value, f"({edges})"


def _level(found: VersionComparison) -> str:
    return f"{wording.number(100 * found.confidence, 3).removesuffix('.0')}%"


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
