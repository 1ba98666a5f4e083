"""The report of a training: how far it came, and its curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kftrain.config import Config
from kftrain.report import content, wording
from kftrain.report.charts.line import ReferenceLine, Series, is_logarithmic, line_chart
from kftrain.report.content import Chart, Fact, ReportSection, Table
from kftrain.run.documents import Completion

VALIDATION = "validation/"
MAX_VALIDATION_CHARTS = 8

SHOWN_SECTIONS = ("model", "optimizer", "precision")
"""Of the configuration, what is in sight; the whole is folded away below."""

MAX_REFERENCE_CHARACTERS = 32
"""Of the name of a baseline in a chart of curves; the narrowest page has room for so many."""

History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """Samples for training, and samples that the evaluation has scored; 0 where that is not known."""

    num_train: int = 0
    num_evaluated: int = 0


def section(
    config: Config,
    completion: Completion | None,
    history: History,
    baselines: Mapping[str, Mapping[str, float]] | None = None,
    sizes: Sizes | None = None,
) -> ReportSection:
    """The section of a training, complete or not. `baselines` (metric -> name -> value) go into validation curves."""
    sizes = sizes or Sizes()
    return ReportSection(
        title="Training",
        headline=_headline(config, completion, history),
        tone="neutral",
        sentences=_why_validations_differ(config, history, sizes),
        figures=_figures(config, completion, sizes) if completion else (),
        charts=_charts(config, completion, history, baselines or {}),
        tables=[_settings(config)],
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
        if chosen := completion.chosen(config.train.steps):
            return f"{chosen[0].upper()}{chosen[1:]}."
        return f"Trained {wording.plural(completion.step, 'step')}{reached}."
    steps = [step for step in (wording.finite(record.get("step")) for record in history) if step is not None]
    if not steps:
        return "Training has not recorded anything yet."
    last, target = wording.count(int(max(steps))), wording.count(config.train.steps)
    return f"Training is not complete: last recorded step {last} of {target}."


def _why_validations_differ(config: Config, history: History, sizes: Sizes) -> list[str]:
    """Two figures of one name stand on the page of a run: which is which."""
    num_quick = config.evaluate.max_interval_samples
    if not any(key.startswith(VALIDATION) for record in history for key in record) or sizes.num_evaluated <= num_quick:
        return []
    return [
        f"The validation curves are of the first {wording.count(num_quick)} samples of the validation split "
        f"(evaluate.max_interval_samples), the evaluation is of all {wording.count(sizes.num_evaluated)}: they differ."
    ]


def _settings(config: Config) -> Table:
    """What a reader compares between runs: the model's own options, the optimizer and the batch."""
    sections = config.to_dict()
    known = {f"{name}.{key}": value for name in SHOWN_SECTIONS for key, value in sections[name].items()}
    known["train.global_batch_size"] = config.train.global_batch_size
    rows = [[wording.clean(key), wording.clean(value)] for key, value in known.items() if value not in (None, [])]
    return Table("Settings", ["setting", "value"], rows)


def _epochs(config: Config, completion: Completion, sizes: Sizes) -> str:
    if config.data.components:
        return "of a mixture"
    if not sizes.num_train:
        return ""
    return f"{wording.number(completion.samples_consumed / sizes.num_train, 3)} epochs"


def _figures(config: Config, completion: Completion, sizes: Sizes) -> list[Fact]:
    speed = completion.metrics.get("samples_per_second")
    loss = completion.metrics.get("loss")
    left_out = completion.metrics.get("bad_samples")
    figures = [
        Fact("Final loss", "" if loss is None else wording.number(loss), completion.loss_unit),
        Fact("Steps", wording.count(completion.num_trained), f"of {wording.count(config.train.steps)}"),
        Fact("Best checkpoint", f"step {wording.count(completion.step)}" if completion.is_best else ""),
        Fact("Samples seen", wording.large_count(completion.samples_consumed), _epochs(config, completion, sizes)),
        Fact("Samples left out", "" if left_out is None else wording.count(int(left_out)), "cannot be decoded"),
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
        *([Fact("Starts with", config.train.initial_weights.origin)] if config.train.initial_weights.origin else []),
        Fact("Processes", str(completion.world_size)),
        Fact("Attempt", str(completion.attempt)),
        content.digest("Dataset digest", completion.dataset_digest),
        content.digest("Training digest", completion.training_digest),
        content.digest("Checkpoint digest", completion.checkpoint_digest),
        content.uri("Checkpoint", completion.checkpoint_uri),
        content.digest("Export digest", completion.export_digest),
        content.uri("Export", completion.export_uri),
    ]


def _charts(
    config: Config,
    completion: Completion | None,
    history: History,
    baselines: Mapping[str, Mapping[str, float]],
) -> list[Chart]:
    clip = config.train.gradient_clip_norm
    limit = [ReferenceLine(f"clipped above {clip:g}", clip)] if clip > 0 else []
    quantities = [
        _loss_chart(history, completion.loss_unit if completion else ""),
        *_validation_charts(history, baselines),
        _chart("Learning rate", "learning_rate", history, from_zero=True),
        _chart("Gradient norm", "gradient_norm", history, limit, smooth=True),
        _chart("Speed, samples per second", "samples_per_second", history, from_zero=True),
    ]
    return [chart for chart in quantities if chart is not None]


def _loss_chart(history: History, unit: str) -> Chart | None:
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
    note = ", ".join(part for part in (wording.clean(unit), _note(series, logarithmic=is_logarithmic(series))) if part)
    return Chart("Loss", drawing, note, _table("Loss", series), wide=True)


def _validation_charts(history: History, baselines: Mapping[str, Mapping[str, float]]) -> Iterable[Chart | None]:
    names = sorted({key for record in history for key in record if key.startswith(VALIDATION)} - {f"{VALIDATION}loss"})
    for name in names[:MAX_VALIDATION_CHARTS]:
        metric = name.removeprefix(VALIDATION)
        references = [
            ReferenceLine(
                f"{wording.ellipsis(wording.clean(base), MAX_REFERENCE_CHARACTERS)} {wording.number(value, 3)}",
                value,
            )
            for base, value in baselines.get(metric, {}).items()
        ]
        yield _chart(f"{wording.label(metric)}, validation", name, history, references)


def _chart(
    title: str,
    key: str,
    history: History,
    references: Sequence[ReferenceLine] = (),
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
