"""Calibration, curves and figures by class, from the whole numbers that an evaluation has added up. Imports no torch.

What a threshold on a histogram gives is what scikit-learn gives for scores that are the numbers of their bins: samples
of one bin are tied, and a tie counts one half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kftrain.errors import UserCodeError
from kftrain.run.documents import Calibration, CalibrationBin, ClassFigures, Confusion, Curve
from kftrain.tasks.histograms import CONFIDENCE_UNIT

MAX_CURVE_POINTS = 128
MAX_CURVES = 5
"""Number of classes whose curves are drawn; of more, those with the smallest area."""


def require_shape(tallies: Mapping[str, np.ndarray], name: str, *sizes: int) -> np.ndarray | None:
    """Return the task's histograms of this name, `[*sizes, bins]`, if any. Raises UserCodeError for other shapes."""
    table = tallies.get(name)
    if table is not None and (table.ndim != len(sizes) + 1 or table.shape[:-1] != sizes or not table.shape[-1]):
        wanted = f"must be [{', '.join(map(str, sizes))}, bins]"
        raise UserCodeError(wanted, where=f"task.tallies {name}", value=list(table.shape))
    return table


def calibration_of(table: np.ndarray) -> Calibration:
    """Compute the expected calibration error and its bins from `tasks.histograms.reliability`, `[3, bins]`.

    Naeini et al., "Obtaining well calibrated probabilities using Bayesian binning", 2015: the mean distance of accuracy
    and confidence, each bin by its samples.
    """
    num_samples, num_right, amounts = table
    total = int(num_samples.sum())
    filled = num_samples > 0
    counts = np.where(filled, num_samples, 1)
    accuracy, confidence = num_right / counts, amounts / CONFIDENCE_UNIT / counts
    error = float((num_samples * np.abs(accuracy - confidence)).sum() / max(total, 1))
    edges = np.linspace(0.0, 1.0, table.shape[1] + 1)
    bins = [
        CalibrationBin(
            low=float(edges[number]),
            high=float(edges[number + 1]),
            num_samples=int(num_samples[number]),
            confidence=float(confidence[number]),
            accuracy=float(accuracy[number]),
        )
        for number in np.flatnonzero(filled)
    ]
    return Calibration(error=error, bins=bins)


def roc(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Compute false and true positive rates from the highest threshold down, and the area under their curve.

    Returns None unless there are samples of both kinds. `table`: numbers of samples by bin of their score, `[2, bins]`,
    first those of the other classes, then those of the class.
    """
    others, own = (np.concatenate([[0], np.cumsum(row[::-1])]) for row in table)
    if not others[-1] or not own[-1]:
        return None
    # Trapezoids: of samples in one bin, which are tied, half count as ordered right.
    across, up = others / others[-1], own / own[-1]
    return across, up, float((np.diff(across) * (up[1:] + up[:-1]) / 2).sum())


def precision_recall(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Compute recall and precision from the highest threshold down, and their average; None without the class."""
    others, own = (np.cumsum(row[::-1]) for row in table)
    if not own[-1]:
        return None
    given = (others + own) > 0
    recall, precision = own[given] / own[-1], own[given] / (others + own)[given]
    stop = int(np.argmax(recall == 1.0)) + 1  # lower thresholds find nothing more
    recall, precision = recall[:stop], precision[:stop]
    steps = np.diff(np.concatenate([[0.0], recall]))
    return recall, precision, float((steps * precision).sum())


def class_figures(confusion: Confusion, scores: np.ndarray | None) -> list[ClassFigures]:
    """Compute precision, recall, F1 and areas under the curves of each class; None for a figure that does not exist."""
    matrix = np.array(confusion.matrix, np.int64).reshape(len(confusion.labels), -1)
    right, there, given = np.diag(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
    figures = []
    for number, label in enumerate(confusion.labels):
        curve = roc(scores[number]) if scores is not None else None
        average = precision_recall(scores[number]) if scores is not None else None
        figures.append(
            ClassFigures(
                label=label,
                num_samples=int(there[number]),
                precision=_ratio(right[number], given[number]),
                recall=_ratio(right[number], there[number]),
                f1=_ratio(2 * right[number], there[number] + given[number]),
                roc_auc=curve[2] if curve else None,
                average_precision=average[2] if average else None,
            )
        )
    return figures


def curves_of(labels: Sequence[str], scores: np.ndarray) -> list[Curve]:
    """Return the curves to draw: of two classes those of the second, of more those with the smallest areas."""
    classes = [1] if len(labels) == 2 else range(len(labels))
    curves = [
        (kind, labels[number], points)
        for number in classes
        for kind, points in (("roc", roc(scores[number])), ("precision_recall", precision_recall(scores[number])))
        if points is not None
    ]
    chosen = []
    for kind in ("roc", "precision_recall"):
        smallest = sorted((curve for curve in curves if curve[0] == kind), key=lambda curve: curve[2][2])
        chosen += smallest[:MAX_CURVES]
    return [_curve(kind, label, *points) for kind, label, points in chosen]


def whole_figures(classes: Sequence[ClassFigures], calibration: Calibration | None) -> dict[str, float]:
    """Compute the figures of the whole split that have no interval: calibration, and means over classes that have them.

    With two classes the areas are those of the second.
    """
    figures = {} if calibration is None else {"calibration_error": calibration.error}
    scored = classes[1:] if len(classes) == 2 else classes
    values = {
        "balanced_accuracy": [row.recall for row in classes],
        "macro_f1": [row.f1 for row in classes],
        "roc_auc": [row.roc_auc for row in scored],
        "average_precision": [row.average_precision for row in scored],
    }
    for name, of_classes in values.items():
        known = [value for value in of_classes if value is not None]
        if known:
            figures[name] = float(np.mean(known))
    return figures


def _ratio(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None


def _curve(kind: str, label: str, across: np.ndarray, up: np.ndarray, area: float) -> Curve:
    """Build a curve of at most `MAX_CURVE_POINTS` points, leaving out those where the curve does not turn."""
    turns = np.flatnonzero(np.diff(across, prepend=-1.0) + np.abs(np.diff(up, prepend=-1.0)))
    kept = turns[np.unique(np.linspace(0, len(turns) - 1, min(len(turns), MAX_CURVE_POINTS)).round().astype(int))]
    points = [(float(across[at]), float(up[at])) for at in kept]
    return Curve(kind="roc" if kind == "roc" else "precision_recall", label=label, points=points, area=area)
