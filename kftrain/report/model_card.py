"""The card of a registered model: what it was made of, how good it is and where not, what its figures do not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kftrain.config import Config
from kftrain.report import evaluation as evaluations
from kftrain.report import markdown, shards, wording
from kftrain.report.content import ReportSection, Table
from kftrain.report.training import SHOWN_SECTIONS
from kftrain.run.documents import Completion, Evaluation, Slice

MAX_SLICES = 10
"""The worst ones; the report of the run has more."""

MAX_VALUE_CHARACTERS = 80


def render(config: Config, manifest: Mapping[str, Any], completion: Completion, evaluation: Evaluation) -> str:
    """Markdown, short enough for the description of a version in MLflow."""
    sections = [
        _data(config, manifest),
        _training(config, completion),
        _metrics(config, evaluation),
        *_slices(config, evaluation),
        _limits(config, completion, evaluation),
    ]
    return f"# {markdown.escape(config.model_name)}\n\n" + "\n".join(markdown.render(each) for each in sections)


def _data(config: Config, manifest: Mapping[str, Any]) -> ReportSection:
    splits = ", ".join(f"{shards.amount(manifest, split)} for {purpose}" for split, purpose in shards.PURPOSES.items())
    source = wording.ellipsis(wording.clean(manifest.get("source", "")), MAX_VALUE_CHARACTERS)
    digest = f"Dataset {wording.short(str(manifest.get('dataset_digest', '')))}: {splits}."
    share = f"Of the source, {wording.percent(config.data.validation_fraction)} were kept for validation."
    return ReportSection("Data", source, sentences=[digest, share])


def _training(config: Config, completion: Completion) -> ReportSection:
    sections = config.to_dict()
    known = {f"{name}.{key}": value for name in ("task", *SHOWN_SECTIONS) for key, value in sections[name].items()}
    known |= {"train.steps": config.train.steps, "train.global_batch_size": config.train.global_batch_size}
    rows = [
        [wording.clean(key), wording.ellipsis(wording.clean(value), MAX_VALUE_CHARACTERS)]
        for key, value in known.items()
        if value not in (None, "", [], {})
    ]
    headline = (
        f"{wording.plural(completion.step, 'step')}, {wording.large_count(completion.num_parameters)} parameters, "
        f"seed {config.run.seed}"
    )
    chosen = completion.chosen(config.train.steps)
    sentences = [f"How the checkpoint was chosen: {chosen}."] if chosen else []
    return ReportSection(
        "Training", headline, sentences=sentences, tables=[Table("Settings", ["setting", "value"], rows)]
    )


def _metrics(config: Config, evaluation: Evaluation) -> ReportSection:
    metric, goal = evaluations.primary_metric(config, evaluation)
    rows = [
        [name, *wording.interval(found.value, found.low, found.high), _baselines(evaluation, name)]
        for name, found in evaluation.metrics.items()
    ]
    level = f"{wording.number(100 * evaluation.confidence, 3).removesuffix('.0')}%"
    return ReportSection(
        title="Metrics",
        headline=f"measured on {wording.plural(evaluation.num_samples, 'validation sample')}",
        sentences=[f"The gate compares {metric}: {evaluations.direction(goal)}."] if goal else [],
        tables=[Table("Evaluation", ["metric", "value", f"{level} interval", "baselines"], rows)],
    )


def _baselines(evaluation: Evaluation, metric: str) -> str:
    known = evaluation.baselines.get(metric, {})
    return ", ".join(f"{wording.clean(name)} {wording.number(float(value))}" for name, value in known.items())


def _slices(config: Config, evaluation: Evaluation) -> list[ReportSection]:
    """The worst slices in the gate's metric; none where there are none, or nobody knows what is worse."""
    metric, goal = evaluations.primary_metric(config, evaluation)
    known = {name: each for name, each in evaluation.slices.items() if metric in each.metrics}
    if metric is None or not goal or not known:
        return []

    def badness(pair: tuple[str, Slice]) -> float:
        value = pair[1].metrics[metric]
        return -value if goal == "maximize" else value

    worst = sorted(known.items(), key=badness, reverse=True)[:MAX_SLICES]
    rows = [
        [wording.clean(name), wording.number(each.metrics[metric]), wording.count(each.num_samples)]
        for name, each in worst
    ]
    headline = f"the {len(worst)} worst of {len(known)}"
    return [ReportSection("Slices", headline, tables=[Table("By slice", ["slice", metric, "samples"], rows)])]


def _limits(config: Config, completion: Completion, evaluation: Evaluation) -> ReportSection:
    left_out = int(completion.metrics.get("bad_samples", 0))
    groups = wording.plural(evaluation.num_groups, "independent group")
    sentences = [
        f"The intervals hold the noise of a validation sample of {groups}, not that of the seed.",
        "Validation data come from the same source as training data: other data may be harder.",
        f"{wording.plural(left_out, 'training sample')} could not be decoded and were left out." if left_out else "",
        f"Fewer than {config.registry.min_groups} groups: a person decides about promotions."
        if evaluation.num_groups < config.registry.min_groups
        else "",
    ]
    return ReportSection("Limits", "what these figures do not say", sentences=[each for each in sentences if each])
