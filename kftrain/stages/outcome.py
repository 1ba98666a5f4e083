"""What a stage returns, and how a component hands it to Kubeflow.

`save` knows kfp's artifacts only by what they can do, so that neither this module nor the stages import kfp.
Kubeflow's Metrics take flat finite numbers and nothing else: a dictionary shows as protobuf internals, and a
tracking plugin turns a string into 0.0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kftrain.run.documents import Confusion

NO_COMPARISON = "There is no other version to compare with.\n"
NO_CLASSES = "This task has no classes, so there is no confusion matrix.\n"


class Artifact(Protocol):
    """A `dsl.Artifact`: a local file that Kubeflow uploads."""

    path: str


class MetricsArtifact(Protocol):
    """A `dsl.Metrics`."""

    def log_metric(self, metric: str, value: float) -> None:
        """Adds one number."""


class ClassificationArtifact(Artifact, Protocol):
    """A `dsl.ClassificationMetrics`. Kubeflow draws the matrix, and shows the file's beginning as its text."""

    def log_confusion_matrix(self, categories: list[str], matrix: list[list[int]]) -> None:
        """Rows are true classes, columns predicted ones."""


@dataclass(frozen=True)
class Outcome:
    """The result of a stage."""

    run_uri: str
    summary: dict[str, Any]
    """JSON; the first keys say in words what happened."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    html: str = ""
    markdown: str = ""
    confusion: Confusion | None = None
    comparison: str = ""
    """A page of several versions."""
    next_step: str = "train"
    """Of the first stage: `finish` where there is nothing to do."""

    def to_json(self) -> str:
        """The summary in its own order, so that a preview of the first lines can be read by a person."""
        return json.dumps(self.summary, indent=1, allow_nan=False) + "\n"


def finite_metrics(metrics: Mapping[str, float | int | None]) -> dict[str, float]:
    """The numbers among them that can be drawn and compared."""
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}


def save(
    outcome: Outcome,
    summary: Artifact | None = None,
    metrics: MetricsArtifact | None = None,
    html: Artifact | None = None,
    markdown: Artifact | None = None,
    confusion: ClassificationArtifact | None = None,
    comparison: Artifact | None = None,
    next_step: str = "",
) -> str:
    """Writes an outcome into a component's artifacts. Returns the run's URI, its output parameter."""
    pages = ((html, outcome.html), (markdown, outcome.markdown), (comparison, outcome.comparison or NO_COMPARISON))
    texts = ((summary, outcome.to_json()), *pages)
    for artifact, text in texts:
        if artifact is not None:
            _write(artifact.path, text)
    if metrics is not None:
        for name, value in finite_metrics(outcome.metrics).items():
            metrics.log_metric(name, value)
    if next_step:  # the file that Kubeflow reads it from
        _write(next_step, outcome.next_step)
    if confusion is not None:
        _save_confusion(confusion, outcome.confusion)
    return outcome.run_uri


def _save_confusion(artifact: ClassificationArtifact, found: Confusion | None) -> None:
    """An output that a pipeline declares is there in every run; where there is no matrix, its text says so."""
    if found is None:
        _write(artifact.path, NO_CLASSES)
        return
    artifact.log_confusion_matrix(found.labels, found.matrix)
    _write(artifact.path, f"{len(found.labels)} classes: the matrix is shown under Visualization.\n")


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
