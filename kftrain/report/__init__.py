"""Reports of a run, as self-contained HTML and as short Markdown. Pure: plain values in, text out.

HTML pages load nothing and run nothing; every text in them is escaped, so a hostile class label or error
message stays a label or a message. A page stays below 300 kB whatever the length of the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kftrain.config import Config
from kftrain.report import comparison as _comparison
from kftrain.report import evaluation as _evaluation
from kftrain.report import failure as _failure
from kftrain.report import finish as _finish
from kftrain.report import markdown, page
from kftrain.report import model_card as _model_card
from kftrain.report import registration as _registration
from kftrain.report import run as _run
from kftrain.report import shards as _shards
from kftrain.report import skipped as _skipped
from kftrain.report import training as _training
from kftrain.report.content import Fact
from kftrain.report.versions import VersionComparison
from kftrain.run.advice import Situation
from kftrain.run.documents import Completion, Evaluation, Performance, Registration
from kftrain.run.drift import Drift
from kftrain.run.error import ErrorDocument

__all__ = [
    "run_html",
    "shards_html",
    "training_html",
    "evaluation_html",
    "registration_html",
    "failure_html",
    "finish_html",
    "comparison_html",
    "shards_markdown",
    "skipped_html",
    "skipped_markdown",
    "training_markdown",
    "evaluation_markdown",
    "registration_markdown",
    "failure_markdown",
    "finish_markdown",
    "comparison_markdown",
    "model_card",
]


def run_html(
    config: Config,
    *,
    shards: Mapping[str, Any] | None = None,
    overview: Mapping[str, Any] | None = None,
    completion: Completion | None = None,
    history: _training.History = (),
    evaluation: Evaluation | None = None,
    registration: Registration | None = None,
    performance: Performance | None = None,
    drift: Drift | None = None,
    reference: Evaluation | None = None,
    written: Sequence[Fact] = (),
) -> str:
    """The one page of a run; parts that are None or empty are left out.

    Args:
        config: Of the run.
        shards: The manifest as JSON.
        overview: Some samples of the dataset as JSON.
        completion: Of the training.
        history: Recorded points of the training curve.
        evaluation: Of the run's own export.
        registration: What the gate decided.
        performance: What the export costs.
        drift: What has changed since the dataset before.
        reference: Of the run's own export on the reference set.
        written: Where and with what the page is written, see `environment.facts`.
    """
    return page.render(
        _run.page(
            config,
            manifest=shards,
            overview=overview,
            completion=completion,
            history=history,
            evaluated=evaluation,
            registered=registration,
            performance=performance,
            drift=drift,
            reference=reference,
            written=written,
        )
    )


def training_html(config: Config, completion: Completion | None, history: _training.History) -> str:
    """Figures and curves of a training.

    A point of `history` has `step` and any of `loss`, `learning_rate`, `gradient_norm`, `samples_per_second`
    and `validation/<metric>`; other keys are not shown.
    """
    section = _training.section(config, completion, history)
    return page.render(page.single(section, config.run.name, config.to_yaml()))


def training_markdown(config: Config, completion: Completion | None, history: _training.History) -> str:
    """The same with first, lowest, highest and last value instead of curves."""
    return markdown.render(_training.section(config, completion, history))


def evaluation_html(
    config: Config,
    evaluation: Evaluation,
    performance: Performance | None = None,
    reference: Evaluation | None = None,
) -> str:
    """Metrics with intervals beside their baselines, slices, and the confusion matrix."""
    return page.render(page.single(_evaluation.section(config, evaluation, performance, reference), config.run.name))


def evaluation_markdown(
    config: Config,
    evaluation: Evaluation,
    performance: Performance | None = None,
    reference: Evaluation | None = None,
) -> str:
    """The same as tables."""
    return markdown.render(_evaluation.section(config, evaluation, performance, reference))


def registration_html(config: Config, registration: Registration) -> str:
    """The gate's decision, its reason, and champion against challenger."""
    return page.render(page.single(_registration.section(config, registration), config.run.name))


def registration_markdown(config: Config, registration: Registration) -> str:
    """The same as tables."""
    return markdown.render(_registration.section(config, registration))


def shards_html(
    name: str,
    manifest: Mapping[str, Any],
    overview: Mapping[str, Any] | None = None,
    drift: Drift | None = None,
) -> str:
    """What is in a dataset, from its manifest and some of its samples, both as JSON.

    `name`: of the run. `drift`: what has changed since the dataset before.
    """
    return page.render(page.single(_shards.section(manifest, overview, drift), name))


def shards_markdown(
    manifest: Mapping[str, Any], overview: Mapping[str, Any] | None = None, drift: Drift | None = None
) -> str:
    """The same as Markdown."""
    return markdown.render(_shards.section(manifest, overview, drift))


def failure_html(error: ErrorDocument, stage: str, situation: Situation) -> str:
    """What failed, why, where and what to do next. `error` is the content of `error.json`."""
    return page.render(page.single(_failure.section(error, stage, situation), stage))


def failure_markdown(error: ErrorDocument, stage: str, situation: Situation) -> str:
    """The same as Markdown."""
    return markdown.render(_failure.section(error, stage, situation))


def finish_html(run_uri: str, report_uri: str, removed: Sequence[str] = (), warnings: Sequence[str] = ()) -> str:
    """That a run has succeeded, what was removed after it, and where its report is."""
    return page.render(page.single(_finish.section(run_uri, report_uri, removed, warnings), "run"))


def finish_markdown(run_uri: str, report_uri: str, removed: Sequence[str] = (), warnings: Sequence[str] = ()) -> str:
    """The same as Markdown."""
    return markdown.render(_finish.section(run_uri, report_uri, removed, warnings))


def comparison_html(found: VersionComparison, written: Sequence[Fact] = ()) -> str:
    """Versions of a model: which is better and where, their curves, what they took, and what differs between them."""
    return page.render(_comparison.page(found, written))


def comparison_markdown(found: VersionComparison) -> str:
    """The same as tables."""
    return markdown.render(_comparison.section(found))


def skipped_html(run_uri: str, line: str) -> str:
    """That a scheduled run had nothing to do, and why."""
    return page.render(page.single(_skipped.section(run_uri, line), "run"))


def skipped_markdown(run_uri: str, line: str) -> str:
    """The same as Markdown."""
    return markdown.render(_skipped.section(run_uri, line))


def model_card(config: Config, manifest: Mapping[str, Any], completion: Completion, evaluation: Evaluation) -> str:
    """What a registered model was made of, how good it is and where not, in Markdown. `manifest`: as JSON."""
    return _model_card.render(config, manifest, completion, evaluation)
