"""The report of a training: how far it came, and its curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kftrain.config import Config
from kftrain.contracts import Completion
from kftrain.report import content, wording
from kftrain.report.content import Chart, Fact, Section, Table
from kftrain.report.line_chart import MAX_NAME_CHARACTERS, Reference, Series, is_logarithmic, line_chart

VALIDATION = "validation/"
MAX_VALIDATION_CHARTS = 8

History = Sequence[Mapping[str, Any]]


def section(
    config: Config,
    completion: Completion | None,
    history: History,
    baselines: Mapping[str, Mapping[str, float]] | None = None,
) -> Section:
    """The section of a training, complete or not. `baselines` (metric -> name -> value) go into validation curves."""
    return Section(
        title="Training",
        headline=_headline(config, completion, history),
        tone="neutral",
        figures=_figures(config, completion) if completion else (),
        charts=_charts(config, history, baselines or {}),
        facts=_facts(config, completion) if completion else (),
    )


def points(history: History, key: str) -> list[tuple[float, float]]:
    """`(step, value)` of one quantity, steps ascending; of a step that a restart repeated, the later record."""
    recorded: dict[float, float] = {}
    for record in history:
        step, value = wording.finite(record.get("step")), record.get(key)
        if step is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
            recorded[step] = float(value)
    return sorted(recorded.items())


def _headline(config: Config, completion: Completion | None, history: History) -> str:
    if completion is not None:
        loss = completion.metrics.get("loss")
        reached = "" if loss is None else f" to a loss of {wording.number(loss)}"
        return f"Trained {wording.plural(completion.step, 'step')}{reached}."
    steps = [step for step in (wording.finite(record.get("step")) for record in history) if step is not None]
    if not steps:
        return "Training has not recorded anything yet."
    last, target = wording.count(int(max(steps))), wording.count(config.train.steps)
    return f"Training is not complete: last recorded step {last} of {target}."


def _figures(config: Config, completion: Completion) -> list[Fact]:
    speed = completion.metrics.get("samples_per_second")
    loss = completion.metrics.get("loss")
    figures = [
        Fact("Final loss", "" if loss is None else wording.number(loss)),
        Fact("Steps", wording.count(completion.step), f"of {wording.count(config.train.steps)}"),
        Fact("Samples seen", wording.large_count(completion.samples_consumed)),
        Fact("Speed", "" if speed is None else wording.number(speed, 3), "samples/s"),
        Fact("Wall time", wording.duration(completion.seconds), "last attempt"),
        Fact("Parameters", wording.large_count(completion.num_parameters)),
        Fact("Processes", wording.count(completion.world_size), config.parallel.strategy),
    ]
    return [figure for figure in figures if figure.value]


def _facts(config: Config, completion: Completion) -> list[Fact]:
    return [
        Fact("Run", completion.run_id, code=True),
        Fact("Seed", str(config.run.seed)),
        Fact("Processes", str(completion.world_size)),
        Fact("Attempt", str(completion.attempt)),
        content.digest("Dataset digest", completion.dataset_digest),
        content.digest("Training digest", completion.training_digest),
        content.digest("Checkpoint digest", completion.checkpoint_digest),
        content.uri("Checkpoint", completion.checkpoint_uri),
        content.digest("Export digest", completion.export_digest),
        content.uri("Export", completion.export_uri),
    ]


def _charts(config: Config, history: History, baselines: Mapping[str, Mapping[str, float]]) -> list[Chart]:
    clip = config.train.gradient_clip_norm
    limit = [Reference(f"clipped above {clip:g}", clip)] if clip > 0 else []
    quantities = [
        _loss_chart(history),
        *_validation_charts(history, baselines),
        _chart("Learning rate", "learning_rate", history, from_zero=True),
        _chart("Gradient norm", "gradient_norm", history, limit, smooth=True),
        _chart("Speed, samples per second", "samples_per_second", history, from_zero=True),
    ]
    return [chart for chart in quantities if chart is not None]


def _loss_chart(history: History) -> Chart | None:
    series = [
        Series(name, found, smooth=name == "training")
        for name, found in (
            ("training", points(history, "loss")),
            ("validation", points(history, f"{VALIDATION}loss")),
        )
        if found
    ]
    if not series:
        return None
    drawing = line_chart(
        series, description=_description("Loss", series), x_range=_x_range(history), height=210, max_x_ticks=6
    )
    return Chart("Loss", drawing, _note(series, logarithmic=is_logarithmic(series)), _table("Loss", series), wide=True)


def _validation_charts(history: History, baselines: Mapping[str, Mapping[str, float]]) -> Iterable[Chart | None]:
    names = sorted({key for record in history for key in record if key.startswith(VALIDATION)} - {f"{VALIDATION}loss"})
    for name in names[:MAX_VALIDATION_CHARTS]:
        metric = name.removeprefix(VALIDATION)
        references = [
            Reference(
                f"{wording.ellipsis(wording.clean(base), MAX_NAME_CHARACTERS)} {wording.number(value, 3)}",
                value,
            )
            for base, value in baselines.get(metric, {}).items()
        ]
        yield _chart(f"{wording.label(metric)}, validation", name, history, references)


def _chart(
    title: str,
    key: str,
    history: History,
    references: Sequence[Reference] = (),
    *,
    from_zero: bool = False,
    smooth: bool = False,
) -> Chart | None:
    series = [Series("", points(history, key), smooth)]
    if not series[0].points:
        return None
    drawing = line_chart(
        series,
        references,
        description=_description(title, series),
        x_range=_x_range(history),
        from_zero=from_zero,
    )
    return Chart(
        title,
        drawing,
        _note(series, logarithmic=is_logarithmic(series, references, from_zero=from_zero)),
        _table(title, series),
    )


def _x_range(history: History) -> tuple[float, float] | None:
    """One horizontal axis for all charts, from zero where the first step is near it."""
    steps = [step for step in (wording.finite(record.get("step")) for record in history) if step is not None]
    if not steps:
        return None
    first, last = min(steps), max(steps)
    return (0.0 if 0 < first <= last / 5 else first), last


def _note(series: Sequence[Series], *, logarithmic: bool) -> str:
    """What one must know to read the curve: its last value, smoothing, scale, and values that cannot be drawn."""
    notes = []
    if len(series) == 1 and series[0].finite_points:
        notes.append(f"last {wording.number(series[0].finite_points[-1][1], 3)}")
    if any(each.window for each in series):
        notes.append(f"bold: mean of {wording.count(max(each.window for each in series))} points")
    if logarithmic:
        notes.append("log scale")
    missing = sum(len(each.points) - len(each.finite_points) for each in series)
    if missing:
        notes.append(f"{wording.plural(missing, 'value')} not finite")
    return ", ".join(notes)


def _description(title: str, series: Sequence[Series]) -> str:
    parts = []
    for each in series:
        values = each.finite_points
        if values:
            first, last = values[0], values[-1]
            name = f"{each.name} " if len(series) > 1 else ""
            parts.append(
                f"{name}from {wording.number(first[1])} at step {wording.count(int(first[0]))} "
                f"to {wording.number(last[1])} at step {wording.count(int(last[0]))}"
            )
    return f"{title}: {'; '.join(parts) or 'no finite value'}"


def _table(title: str, series: Sequence[Series]) -> Table:
    """First, lowest, highest and last value of each curve."""
    rows = []
    for each in series:
        values = [y for _, y in each.finite_points] or [math.nan]
        name = each.name if len(series) > 1 else title
        rows.append([name, *(wording.number(v) for v in (values[0], min(values), max(values), values[-1]))])
    return Table(title, ["", "first", "lowest", "highest", "last"], rows)
