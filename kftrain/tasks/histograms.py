"""Histograms of what a classifier answers: whole numbers, so that any number of processes adds up to the same ones.

From them follow calibration and the curves of `evaluate.curves`. A curve is exact for scores that are rounded to 1/32
in log-odds: bins of equal width there tell 0.999 from 0.9999, which bins of equal probability would not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NUM_CONFIDENCE_BINS = 15
"""Number of bins of equal width in 0 to 1, as is usual (Guo et al., "On calibration of modern neural networks",
2017)."""

CONFIDENCE_UNIT = 2**32
"""Confidences are added up as whole numbers of 1 / CONFIDENCE_UNIT: the same sum in any order, off by 1e-10 at most."""

NUM_SCORE_BINS, MAX_LOG_ODDS = 1024, 16.0
"""Bins of a class's scores, of equal width in log-odds; what lies beyond is in the outermost ones."""

MAX_CLASSES = 100
"""Largest number of classes for which curves are made."""


def reliability(log_probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Count samples, right ones, and the sum of confidences by confidence of the prediction, `[3, bins]` int64.

    Args:
        log_probabilities: `[rows, classes]`.
        labels: `[rows]` int64.
    """
    import torch

    highest, predictions = log_probabilities.double().max(dim=1)
    confidences = highest.exp().nan_to_num().clamp(0.0, 1.0)
    bins = (confidences * NUM_CONFIDENCE_BINS).long().clamp(max=NUM_CONFIDENCE_BINS - 1)
    amounts = (confidences * CONFIDENCE_UNIT).round().long()
    table = torch.zeros(3, NUM_CONFIDENCE_BINS, dtype=torch.int64, device=bins.device)
    for row, values in enumerate((torch.ones_like(bins), (predictions == labels).long(), amounts)):
        table[row].scatter_add_(0, bins, values)
    return table


def scores(log_probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Make two histograms of each class's scores, of other samples' and its own, `[classes, 2, bins]` int64."""
    import torch

    wide = log_probabilities.double()
    num_rows, num_classes = wide.shape
    log_odds = (wide - torch.log1p(-wide.exp().clamp(max=1.0))).nan_to_num(nan=0.0)
    bins = ((log_odds + MAX_LOG_ODDS) / (2 * MAX_LOG_ODDS) * NUM_SCORE_BINS).clamp(0, NUM_SCORE_BINS - 1).long()
    classes = torch.arange(num_classes, device=bins.device).expand(num_rows, -1)
    cells = (classes * 2 + (labels.unsqueeze(1) == classes)) * NUM_SCORE_BINS + bins
    size = num_classes * 2 * NUM_SCORE_BINS
    table = torch.zeros(size, dtype=torch.int64, device=bins.device)
    table.scatter_add_(0, cells.flatten(), torch.ones_like(cells).flatten())
    return table.view(num_classes, 2, NUM_SCORE_BINS)
