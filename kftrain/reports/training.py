"""The report of a training: its figures, settings and curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kftrain.config import Config
from kftrain.reports import content, wording
from kftrain.reports.charts.line import ReferenceLine, Series, draw_line_chart, is_logarithmic
from kftrain.reports.content import Chart, Fact, ReportSection, Table
from kftrain.run.documents import Completion

VALIDATION = "validation/"
MAX_VALIDATION_CHARTS = 8

SHOWN_SECTIONS = ("model", "optimizer", "precision")
"""Sections of the configuration in the table of settings; the page holds the whole configuration folded away."""

MAX_REFERENCE_CHARACTERS = 32
"""Length of a baseline's name in a chart; the narrowest page has room for so many characters."""

History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """Number of training samples and of samples that the evaluation scored; 0 if unknown."""

    num_train: int = 0
    num_evaluated: int = 0


def describe_training(
    config: Config,
    completion: Completion | None,
    history: History,
    baselines: Mapping[str, Mapping[str, float]] | None = None,
    sizes: Sizes | None = None,
) -> ReportSection:
    """Return the section of a training, complete or not; `baselines` (metric -> name -> value) cross its curves."""
    sizes = sizes or Sizes()
    return ReportSection(
        title="Training",
        headline=_write_headline(config, completion, history),
        tone="neutral",
        sentences=_explain_validation_curves(config, history, sizes),
        figures=_list_figures(config, completion, sizes) if completion else (),
        charts=_draw_charts(config, completion, history, baselines or {}),
        tables=[_list_settings(config)],
        facts=_list_facts(config, completion) if completion else (),
    )


def select_points(history: History, key: str) -> list[tuple[float, float]]:
    """Return `(step, value)` of one quantity, steps ascending; of a repeated step the later record counts."""
    recorded: dict[float, float] = {}
    for record in history:
        step, value = wording.to_finite(record.get("step")), record.get(key)
        if step is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
            recorded[step] = float(value)
    return sorted(recorded.items())


def _write_headline(config: Config, completion: Completion | None, history: History) -> str:
    if completion is not None:
        loss = completion.metrics.get("loss")
        reached = "" if loss is None else f" to a loss of {wording.format_number(loss)}"
        if chosen := completion.explain_choice(config.train.steps):
            return f"{chosen[0].upper()}{chosen[1:]}."
        return f"Trained {wording.format_plural(completion.step, 'step')}{reached}."
    steps = [step for step in (wording.to_finite(record.get("step")) for record in history) if step is not None]
    if not steps:
        return "Training has not recorded anything yet."
    last, target = wording.format_count(int(max(steps))), wording.format_count(config.train.steps)
    return f"Training is not complete: last recorded step {last} of {target}."


def _explain_validation_curves(config: Config, history: History, sizes: Sizes) -> list[str]:
    """Explain why a validation curve and the evaluation show two values of one metric."""
    num_quick = config.evaluate.max_interval_samples
    if not any(key.startswith(VALIDATION) for record in history for key in record) or sizes.num_evaluated <= num_quick:
        return []
    return [
        f"The validation curves are of the first {wording.format_count(num_quick)} samples of the validation split "
        "(evaluate.max_interval_samples), the evaluation is of all "
        f"{wording.format_count(sizes.num_evaluated)}: they differ."
    ]


def _list_settings(config: Config) -> Table:
    """Tabulate what a reader compares between runs: the model's own options, the optimizer and the batch."""
    sections = config.to_dict()
    known = {f"{name}.{key}": value for name in SHOWN_SECTIONS for key, value in sections[name].items()}
    known["train.global_batch_size"] = config.train.global_batch_size
    rows = [[wording.clean(key), wording.clean(value)] for key, value in known.items() if value not in (None, [])]
    return Table("Settings", ["setting", "value"], rows)


def _format_epochs(config: Config, completion: Completion, sizes: Sizes) -> str:
    if config.data.components:
        return "of a mixture"
    if not sizes.num_train:
        return ""
    return f"{wording.format_number(completion.samples_consumed / sizes.num_train, 3)} epochs"


def _list_figures(config: Config, completion: Completion, sizes: Sizes) -> list[Fact]:
    speed = completion.metrics.get("samples_per_second")
    loss = completion.metrics.get("loss")
    left_out = completion.metrics.get("bad_samples")
    figures = [
        Fact("Final loss", "" if loss is None else wording.format_number(loss), completion.loss_unit),
        Fact("Steps", wording.format_count(completion.num_trained), f"of {wording.format_count(config.train.steps)}"),
        Fact("Best checkpoint", f"step {wording.format_count(completion.step)}" if completion.is_best else ""),
        Fact(
            "Samples seen",
            wording.format_large_count(completion.samples_consumed),
            _format_epochs(config, completion, sizes),
        ),
        Fact("Samples left out", "" if left_out is None else wording.format_count(int(left_out)), "cannot be decoded"),
        Fact("Speed", "" if speed is None else wording.format_number(speed, 3), "samples/s"),
        Fact("Wall time", wording.format_duration(completion.seconds), "last attempt"),
        Fact("Parameters", wording.format_large_count(completion.num_parameters)),
        Fact("Processes", wording.format_count(completion.world_size), config.parallel.strategy),
    ]
    return [figure for figure in figures if figure.value]


def _list_facts(config: Config, completion: Completion) -> list[Fact]:
    return [
        Fact("Run", completion.run_id, code=True),
        Fact("Seed", str(config.run.seed)),
        *([Fact("Starts with", config.train.initial_weights.origin)] if config.train.initial_weights.origin else []),
        Fact("Processes", str(completion.world_size)),
        Fact("Attempt", str(completion.attempt)),
        content.make_digest_fact("Dataset digest", completion.dataset_digest),
        content.make_digest_fact("Training digest", completion.training_digest),
        content.make_digest_fact("Checkpoint digest", completion.checkpoint_digest),
        content.make_uri_fact("Checkpoint", completion.checkpoint_uri),
        content.make_digest_fact("Export digest", completion.export_digest),
        content.make_uri_fact("Export", completion.export_uri),
    ]


def _draw_charts(
    config: Config,
    completion: Completion | None,
    history: History,
    baselines: Mapping[str, Mapping[str, float]],
) -> list[Chart]:
    clip = config.train.gradient_clip_norm
    limit = [ReferenceLine(f"clipped above {clip:g}", clip)] if clip > 0 else []
    quantities = [
        _draw_loss(history, completion.loss_unit if completion else ""),
        *_draw_validation_metrics(history, baselines),
        _draw_quantity("Learning rate", "learning_rate", history, from_zero=True),
        _draw_quantity("Gradient norm", "gradient_norm", history, limit, smooth=True),
        _draw_quantity("Speed, samples per second", "samples_per_second", history, from_zero=True),
    ]
    return [chart for chart in quantities if chart is not None]


def _draw_loss(history: History, unit: str) -> Chart | None:
    series = [
        Series(name, curve, smooth=name == "training")
        for name, curve in (
            ("training", select_points(history, "loss")),
            ("validation", select_points(history, f"{VALIDATION}loss")),
        )
        if curve
    ]
    if not series:
        return None
    drawing = draw_line_chart(
        series, description=_describe_series("Loss", series), x_range=_find_x_range(history), height=210, max_x_ticks=6
    )
    note = ", ".join(
        part for part in (wording.clean(unit), _write_note(series, logarithmic=is_logarithmic(series))) if part
    )
    return Chart("Loss", drawing, note, _tabulate_series("Loss", series), wide=True)


def _draw_validation_metrics(history: History, baselines: Mapping[str, Mapping[str, float]]) -> Iterable[Chart | None]:
    names = sorted({key for record in history for key in record if key.startswith(VALIDATION)} - {f"{VALIDATION}loss"})
    for name in names[:MAX_VALIDATION_CHARTS]:
        metric = name.removeprefix(VALIDATION)
        references = [
            ReferenceLine(
                f"{wording.cut_text(wording.clean(base), MAX_REFERENCE_CHARACTERS)} {wording.format_number(value, 3)}",
                value,
            )
            for base, value in baselines.get(metric, {}).items()
        ]
        yield _draw_quantity(f"{wording.format_label(metric)}, validation", name, history, references)


def _draw_quantity(
    title: str,
    key: str,
    history: History,
    references: Sequence[ReferenceLine] = (),
    *,
    from_zero: bool = False,
    smooth: bool = False,
) -> Chart | None:
    series = [Series("", select_points(history, key), smooth)]
    if not series[0].points:
        return None
    drawing = draw_line_chart(
        series,
        references,
        description=_describe_series(title, series),
        x_range=_find_x_range(history),
        from_zero=from_zero,
    )
    return Chart(
        title,
        drawing,
        _write_note(series, logarithmic=is_logarithmic(series, references, from_zero=from_zero)),
        _tabulate_series(title, series),
    )


def _find_x_range(history: History) -> tuple[float, float] | None:
    """Return the range of steps that all charts share; it starts at 0 if the first step is near 0."""
    steps = [step for step in (wording.to_finite(record.get("step")) for record in history) if step is not None]
    if not steps:
        return None
    first, last = min(steps), max(steps)
    return (0.0 if 0 < first <= last / 5 else first), last


def _write_note(series: Sequence[Series], *, logarithmic: bool) -> str:
    """Return the caption: last value, smoothing, logarithmic scale, and the number of values that cannot be drawn."""
    notes = []
    if len(series) == 1 and series[0].finite_points:
        notes.append(f"last {wording.format_number(series[0].finite_points[-1][1], 3)}")
    if any(curve.window for curve in series):
        notes.append(f"bold: mean of {wording.format_count(max(curve.window for curve in series))} points")
    if logarithmic:
        notes.append("log scale")
    missing = sum(len(curve.points) - len(curve.finite_points) for curve in series)
    if missing:
        notes.append(f"{wording.format_plural(missing, 'value')} not finite")
    return ", ".join(notes)


def _describe_series(title: str, series: Sequence[Series]) -> str:
    parts = []
    for curve in series:
        values = curve.finite_points
        if values:
            first, last = values[0], values[-1]
            name = f"{curve.name} " if len(series) > 1 else ""
            parts.append(
                f"{name}from {wording.format_number(first[1])} at step {wording.format_count(int(first[0]))} "
                f"to {wording.format_number(last[1])} at step {wording.format_count(int(last[0]))}"
            )
    return f"{title}: {'; '.join(parts) or 'no finite value'}"


def _tabulate_series(title: str, series: Sequence[Series]) -> Table:
    """Return a table with the first, lowest, highest and last value of every curve."""
    rows = []
    for curve in series:
        values = [y for _, y in curve.finite_points] or [math.nan]
        name = curve.name if len(series) > 1 else title
        rows.append([name, *(wording.format_number(v) for v in (values[0], min(values), max(values), values[-1]))])
    return Table(title, ["", "first", "lowest", "highest", "last"], rows)
