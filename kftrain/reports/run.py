"""The one page of a run: the outcome first, then every stage that has happened, then what it was."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kftrain.config import Config
from kftrain.reports import content, wording
from kftrain.reports.content import Fact, ReportSection
from kftrain.reports.evaluation import choose_metric, describe_evaluation
from kftrain.reports.page import Page
from kftrain.reports.registration import describe_registration
from kftrain.reports.shards import count_samples, describe_shards
from kftrain.reports.training import History, Sizes, describe_training
from kftrain.run.documents import Completion, Evaluation, Performance, Registration
from kftrain.run.drift import Drift


def compose_run_page(
    config: Config,
    *,
    manifest: Mapping[str, Any] | None = None,
    overview: Mapping[str, Any] | None = None,
    completion: Completion | None = None,
    history: History = (),
    evaluation: Evaluation | None = None,
    registration: Registration | None = None,
    performance: Performance | None = None,
    drift: Drift | None = None,
    reference: Evaluation | None = None,
    written: Sequence[Fact] = (),
) -> Page:
    """Return the page of a run; parts that are None or empty are left out, provenance stands once at the end.

    Args:
        config: The run's configuration.
        manifest: The dataset's manifest as JSON.
        overview: Some samples of the dataset as JSON.
        completion: How the training ended.
        history: Recorded points of the training curve.
        evaluation: Metrics of the run's own export.
        registration: The gate's decision.
        performance: Latency, memory and size of the export.
        drift: Changes since the dataset before.
        reference: Metrics of the run's own export on the reference set.
        written: Where and with what the page is written, see `page.describe_environment`.
    """
    baselines = evaluation.baselines if evaluation else {}
    sizes = count_sizes(manifest, completion, evaluation)
    sections = [
        *([describe_registration(config, registration)] if registration else []),
        *([describe_evaluation(config, evaluation, performance, reference)] if evaluation else []),
        *([describe_training(config, completion, history, baselines, sizes)] if completion or history else []),
        *([describe_shards(manifest, overview, drift)] if manifest is not None else []),
        *([_describe_use(registration)] if registration else []),
    ]
    outcome = sections[0] if sections else ReportSection("Run", "Nothing has been recorded yet.")
    run_id = completion.run_id if completion else registration.run_id if registration else ""
    return Page(
        eyebrow=" \u00b7 ".join(part for part in ("Run", config.run.name, run_id) if part),
        headline=outcome.headline,
        tone=outcome.tone,
        figures=_list_figures(config, evaluation, registration),
        sections=[replace(section, facts=()) for section in sections],
        facts=_list_provenance(config, sections, written),
        config_yaml=config.to_yaml(),
    )


def count_sizes(
    manifest: Mapping[str, Any] | None, completion: Completion | None, evaluation: Evaluation | None
) -> Sizes:
    """Count the samples to train on and the samples that the evaluation scored; 0 where a document is missing."""
    num_train = completion.num_training_samples if completion else 0
    num_train = num_train or (count_samples(manifest, "train") if manifest else 0)
    return Sizes(num_train, evaluation.num_samples if evaluation else 0)


def _list_figures(config: Config, evaluation: Evaluation | None, registration: Registration | None) -> list[Fact]:
    """Return the two figures that a reader asks for first: the gate's metric and the gain over the champion."""
    figures = []
    metric = choose_metric(config, evaluation)[0] if evaluation else None
    if evaluation and metric is not None:
        value = evaluation.metrics[metric]
        interval = wording.format_interval(value.value, value.low, value.high)
        figures.append(Fact(wording.format_label(metric), *interval))
    if registration and registration.improvement:
        gain = registration.improvement
        figures.append(Fact("Improvement", *wording.format_interval(gain.value, gain.low, gain.high, signed=True)))
    return figures


def _describe_use(registration: Registration) -> ReportSection:
    """Return the command that loads the model; the arguments of `predict` depend on the task."""
    model = f"models:/{registration.model_name}/{registration.version}"
    where = f"mlflow.set_tracking_uri({registration.tracking_uri!r})"
    code = f"import mlflow; {where}; model = mlflow.pyfunc.load_model({model!r})"
    return ReportSection(
        "Use", "Load the model where kftrain is installed.", command=shlex.join(["python", "-ic", code])
    )


def _list_provenance(config: Config, sections: Sequence[ReportSection], written: Sequence[Fact]) -> list[Fact]:
    """Return all sections' facts in the order in which a run makes them; the first of equal names wins."""
    facts = [
        Fact("Name", config.run.name, code=True),
        Fact("Storage", config.run.storage_root, code=True),
        Fact("Seed", str(config.run.seed)),
        content.make_digest_fact("Config digest", config.digest()),
        *written,
        *(fact for section in reversed(sections) for fact in section.facts),
    ]
    by_name: dict[str, Fact] = {}
    for fact in facts:
        by_name.setdefault(fact.name, fact)
    return list(by_name.values())
