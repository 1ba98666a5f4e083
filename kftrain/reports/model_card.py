"""The card of a registered model: its data, training, metrics, worst slices and limits, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kftrain.config import Config
from kftrain.reports import evaluation as evaluations
from kftrain.reports import markdown, shards, wording
from kftrain.reports.content import ReportSection, Table
from kftrain.reports.training import SHOWN_SECTIONS
from kftrain.run.documents import Completion, Evaluation, Slice

MAX_SLICES = 10
"""Number of slices on the card, the worst; the run's report has more."""

MAX_VALUE_CHARACTERS = 80


def render_model_card(
    config: Config, manifest: Mapping[str, Any], completion: Completion, evaluation: Evaluation
) -> str:
    """Return Markdown short enough for the description of a version in MLflow; `manifest` is the dataset's, as JSON."""
    sections = [
        _describe_data(config, manifest),
        _describe_training(config, completion),
        _describe_metrics(config, evaluation),
        *_describe_slices(config, evaluation),
        _describe_limits(config, completion, evaluation),
    ]
    return f"# {markdown.escape(config.model_name)}\n\n" + "\n".join(
        markdown.render_markdown(section) for section in sections
    )


def _describe_data(config: Config, manifest: Mapping[str, Any]) -> ReportSection:
    splits = ", ".join(
        f"{shards.format_amount(manifest, split)} for {purpose}" for split, purpose in shards.PURPOSES.items()
    )
    source = wording.cut_text(wording.clean(manifest.get("source", "")), MAX_VALUE_CHARACTERS)
    digest = f"Dataset {wording.shorten_digest(str(manifest.get('dataset_digest', '')))}: {splits}."
    share = f"Of the source, {wording.format_percent(config.data.validation_fraction)} were kept for validation."
    return ReportSection("Data", source, sentences=[digest, share])


def _describe_training(config: Config, completion: Completion) -> ReportSection:
    sections = config.to_dict()
    known = {f"{name}.{key}": value for name in ("task", *SHOWN_SECTIONS) for key, value in sections[name].items()}
    known |= {"train.steps": config.train.steps, "train.global_batch_size": config.train.global_batch_size}
    rows = [
        [wording.clean(key), wording.cut_text(wording.clean(value), MAX_VALUE_CHARACTERS)]
        for key, value in known.items()
        if value not in (None, "", [], {})
    ]
    headline = (
        f"{wording.format_plural(completion.step, 'step')}, "
        f"{wording.format_large_count(completion.num_parameters)} parameters, seed {config.run.seed}"
    )
    chosen = completion.explain_choice(config.train.steps)
    sentences = [f"How the checkpoint was chosen: {chosen}."] if chosen else []
    return ReportSection(
        "Training", headline, sentences=sentences, tables=[Table("Settings", ["setting", "value"], rows)]
    )


def _describe_metrics(config: Config, evaluation: Evaluation) -> ReportSection:
    metric, goal = evaluations.choose_metric(config, evaluation)
    rows = [
        [name, *wording.format_interval(score.value, score.low, score.high), _format_baselines(evaluation, name)]
        for name, score in evaluation.metrics.items()
    ]
    level = wording.format_level(evaluation.confidence)
    return ReportSection(
        title="Metrics",
        headline=f"measured on {wording.format_plural(evaluation.num_samples, 'validation sample')}",
        sentences=[f"The gate compares {metric}: {evaluations.describe_direction(goal)}."] if goal else [],
        tables=[Table("Evaluation", ["metric", "value", f"{level} interval", "baselines"], rows)],
    )


def _format_baselines(evaluation: Evaluation, metric: str) -> str:
    known = evaluation.baselines.get(metric, {})
    return ", ".join(f"{wording.clean(name)} {wording.format_number(float(value))}" for name, value in known.items())


def _describe_slices(config: Config, evaluation: Evaluation) -> list[ReportSection]:
    """Return the worst slices in the gate's metric; nothing if there are no slices or the metric has no goal."""
    metric, goal = evaluations.choose_metric(config, evaluation)
    known = {name: part for name, part in evaluation.slices.items() if metric in part.metrics}
    if metric is None or not goal or not known:
        return []

    def badness(pair: tuple[str, Slice]) -> float:
        value = pair[1].metrics[metric]
        return -value if goal == "maximize" else value

    worst = sorted(known.items(), key=badness, reverse=True)[:MAX_SLICES]
    rows = [
        [wording.clean(name), wording.format_number(part.metrics[metric]), wording.format_count(part.num_samples)]
        for name, part in worst
    ]
    headline = f"the {len(worst)} worst of {len(known)}"
    return [ReportSection("Slices", headline, tables=[Table("By slice", ["slice", metric, "samples"], rows)])]


def _describe_limits(config: Config, completion: Completion, evaluation: Evaluation) -> ReportSection:
    left_out = int(completion.metrics.get("bad_samples", 0))
    groups = wording.format_plural(evaluation.num_groups, "independent group")
    sentences = [
        f"The intervals hold the noise of a validation sample of {groups}, not that of the seed.",
        "Validation data come from the same source as training data: other data may be harder.",
        f"{wording.format_plural(left_out, 'training sample')} could not be decoded and were left out."
        if left_out
        else "",
        f"Fewer than {config.registry.min_groups} groups: a person decides about promotions."
        if evaluation.num_groups < config.registry.min_groups
        else "",
    ]
    return ReportSection(
        "Limits", "what these figures do not say", sentences=[sentence for sentence in sentences if sentence]
    )
