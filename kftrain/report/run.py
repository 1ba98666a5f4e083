"""The one page of a run: the outcome first, then every stage that has happened, then what it was."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from kftrain.config import Config
from kftrain.report import content, evaluation, registration, shards, training, wording
from kftrain.report.content import Fact, ReportSection
from kftrain.report.page import Page
from kftrain.run.documents import Completion, Evaluation, Performance, Registration
from kftrain.run.drift import Drift


def page(
    config: Config,
    *,
    manifest: shards.Manifest | None,
    overview: shards.Manifest | None = None,
    completion: Completion | None,
    history: training.History,
    evaluated: Evaluation | None,
    registered: Registration | None,
    performance: Performance | None = None,
    drift: Drift | None = None,
    reference: Evaluation | None = None,
    written: Sequence[Fact] = (),
) -> Page:
    """A page of the parts that are there. Provenance is gathered at its end, each fact once."""
    baselines = evaluated.baselines if evaluated else {}
    counted = sizes(manifest, completion, evaluated)
    sections = [
        *([registration.section(config, registered)] if registered else []),
        *([evaluation.section(config, evaluated, performance, reference)] if evaluated else []),
        *([training.section(config, completion, history, baselines, counted)] if completion or history else []),
        *([shards.section(manifest, overview, drift)] if manifest is not None else []),
        *([_use(registered)] if registered else []),
    ]
    outcome = sections[0] if sections else ReportSection("Run", "Nothing has been recorded yet.")
    run_id = completion.run_id if completion else registered.run_id if registered else ""
    return Page(
        eyebrow=" \u00b7 ".join(part for part in ("Run", config.run.name, run_id) if part),
        headline=outcome.headline,
        tone=outcome.tone,
        figures=_figures(config, evaluated, registered),
        sections=[replace(section, facts=()) for section in sections],
        facts=_provenance(config, sections, written),
        config_yaml=config.to_yaml(),
    )


def _figures(config: Config, evaluated: Evaluation | None, registered: Registration | None) -> list[Fact]:
    """The figures that a reader asks for first: how good, and how much better than before."""
    figures = []
    if evaluated:
        metric, _ = evaluation.primary_metric(config, evaluated)
        if metric is not None:
            found = evaluated.metrics[metric]
            figures.append(Fact(wording.label(metric), *wording.interval(found.value, found.low, found.high)))
    if registered and registered.improvement:
        gain = registered.improvement
        shown = wording.interval(gain.value, gain.low, gain.high, signed=True)
        figures.append(Fact("Improvement", *shown))
    return figures


def sizes(
    manifest: shards.Manifest | None, completion: Completion | None, evaluated: Evaluation | None
) -> training.Sizes:
    """How many samples there are to train on, and how many the evaluation has scored; 0 where that is not known."""
    num_train = completion.num_training_samples if completion else 0
    num_train = num_train or (shards.num_samples(manifest, "train") if manifest else 0)
    return training.Sizes(num_train, evaluated.num_samples if evaluated else 0)


def _use(registered: Registration) -> ReportSection:
    """How to load the model; what it is asked depends on the task."""
    model = f"models:/{registered.model_name}/{registered.version}"
    where = f"mlflow.set_tracking_uri({registered.tracking_uri!r})"
    code = f"import mlflow; {where}; model = mlflow.pyfunc.load_model({model!r})"
    return ReportSection(
        "Use", "Load the model where kftrain is installed.", command=shlex.join(["python", "-ic", code])
    )


def _provenance(config: Config, sections: Sequence[ReportSection], written: Sequence[Fact]) -> list[Fact]:
    """All sections' facts, in the order in which a run makes them; of equal names the first."""
    own = [
        Fact("Name", config.run.name, code=True),
        Fact("Storage", config.run.storage_root, code=True),
        Fact("Seed", str(config.run.seed)),
        content.digest("Config digest", config.digest()),
    ]
    facts: dict[str, Fact] = {}
    for fact in [*own, *written, *(fact for section in reversed(sections) for fact in section.facts)]:
        facts.setdefault(fact.name, fact)
    return list(facts.values())
