"""The outcome that a stage returns, and the function by which a component hands it to Kubeflow.

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
    """A `dsl.Metrics`, which takes flat finite numbers."""

    def log_metric(self, metric: str, value: float) -> None:
        """Add a number under a name."""


class ClassificationArtifact(Artifact, Protocol):
    """A `dsl.ClassificationMetrics`. Kubeflow draws the matrix, and shows the file's beginning as its text."""

    def log_confusion_matrix(self, categories: list[str], matrix: list[list[int]]) -> None:
        """Store a confusion matrix: rows are true classes, columns predicted ones."""


@dataclass(frozen=True)
class Outcome:
    """The result of a stage, from which a component's artifacts are written."""

    run_uri: str
    summary: dict[str, Any]
    """Values for JSON; the first keys say in words what happened."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    html: str = ""
    markdown: str = ""
    confusion: Confusion | None = None
    comparison: str = ""
    """HTML page that compares several versions; empty: none."""
    next_step: str = "train"
    """Step that follows the first stage; `finish` if there is nothing to do."""

    def to_json(self) -> str:
        """Return the summary in its own order, so that a person can read a preview of the first lines."""
        return json.dumps(self.summary, indent=1, allow_nan=False) + "\n"


def finite_metrics(metrics: Mapping[str, float | int | None]) -> dict[str, float]:
    """Return the metrics that are finite numbers, as floats: Kubeflow and MLflow take no others."""
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
    """Write an outcome into a component's artifacts and return the run's URI, its output parameter."""
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


def _save_confusion(artifact: ClassificationArtifact, confusion: Confusion | None) -> None:
    """Save the matrix, or a text that there is none: an output that a pipeline declares must exist in every run."""
    if confusion is None:
        _write(artifact.path, NO_CLASSES)
        return
    artifact.log_confusion_matrix(confusion.labels, confusion.matrix)
    _write(artifact.path, f"{len(confusion.labels)} classes: the matrix is shown under Visualization.\n")


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
