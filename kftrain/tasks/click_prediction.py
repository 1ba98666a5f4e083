"""Prediction of clicks: ids of a table's row become the probability of a click; metrics `log_loss` and `auc`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field as Limits

from kftrain.data.schema import Arrays, Block, Field, Record, SampleSchema
from kftrain.tasks.base import Task

if TYPE_CHECKING:
    import torch

    from kftrain.tasks.base import Batch

NUM_BINS, MAX_LOG_ODDS = 128, 8.0
"""Bins of the scores from which the area is computed, of equal width in log-odds. Pairs within a bin count half, so
that the area is exact for scores that are rounded to an eighth."""

BLOCK_ROWS = 1024
"""Training samples of a block: one alone would be mostly the header of its file."""


class ClickPrediction(Task):
    """Predicts whether `label` is 1 from `ids`; the model gives the log-odds `[rows]`.

    Args:
        num_fields: Ids of a sample.
    """

    targets = ("label",)
    loss_unit = "nats per sample"
    loss_metric = "log_loss"
    metric_goals = MappingProxyType({"auc": "maximize", "log_loss": "minimize"})

    def __init__(self, *, num_fields: Annotated[int, Limits(ge=1)]) -> None:
        self.num_fields = num_fields

    def schema(self) -> SampleSchema:
        """Return `ids` and `label`."""
        return SampleSchema((Field("ids", "int64", (self.num_fields,)), Field("label", "uint8")))

    def encode(self, records: Iterable[Record], split: str) -> Iterator[Block]:
        """Yield blocks: of many samples for training, of one for validation, where each is drawn by itself."""
        rows, size = iter(records), 1 if split == "validation" else BLOCK_ROWS
        while several := list(islice(rows, size)):
            fields = self.schema().fields
            arrays = {field.name: np.stack([self.encode_field(one, field) for one in several]) for field in fields}
            yield Block(several[0].key, arrays)

    def model_arguments(self) -> dict[str, Any]:
        """Return the number of ids of a sample as `num_fields`."""
        return {"num_fields": self.num_fields}

    def baselines(self, samples: Iterable[Arrays]) -> dict[str, dict[str, float]]:
        """Score the trivial answer: always the share of clicks."""
        labels = np.concatenate([np.empty(0), *(arrays["label"].astype(np.float64) for arrays in samples)])
        share = np.array([labels.mean(), 1 - labels.mean()]) if len(labels) else np.ones(1)
        entropy = float(-(share[share > 0] * np.log(share[share > 0])).sum())
        return {"log_loss": {"share of clicks": entropy}, "auc": {"any constant": 0.5}} if len(labels) else {}

    def loss(self, output: Any, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """Sum the cross-entropy in nats over rows whose weight is not 0."""
        from torch.nn import functional

        labels = batch["label"].float()
        return (functional.binary_cross_entropy_with_logits(output.float(), labels, reduction="none") * weight).sum()

    def statistics(self, output: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Return per row `count` (1), `log_loss` in nats, and 1 in the bin of its score and label, else 0."""
        import torch
        from torch.nn import functional

        logits, labels = output.double(), batch["label"].double()
        bins = ((logits.nan_to_num() + MAX_LOG_ODDS) * (NUM_BINS / (2 * MAX_LOG_ODDS))).long().clamp(0, NUM_BINS - 1)
        cells = functional.one_hot(bins + NUM_BINS * labels.long(), 2 * NUM_BINS).double()
        loss = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        names = (f"{name}_{number:03d}" for name in ("other", "click") for number in range(NUM_BINS))
        return {"count": torch.ones_like(labels), "log_loss": loss, **dict(zip(names, cells.T, strict=True))}

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute the mean loss, and the area under the curve: the share of pairs that are in order; NaN without."""
        others, clicks = (
            np.stack([np.asarray(sums[f"{name}_{number:03d}"], np.float64) for number in range(NUM_BINS)])
            for name in ("other", "click")
        )
        below = np.cumsum(others, axis=0) - others / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            area = (clicks * below).sum(0) / (clicks.sum(0) * others.sum(0))
            return {"auc": area, "log_loss": np.asarray(sums["log_loss"]) / sums["count"]}

    def answer(self, output: Any) -> dict[str, torch.Tensor]:
        """Return `probability` of a click."""
        return {"probability": output.double().sigmoid()}

    def answer_types(self) -> dict[str, str]:
        """Return `double` for the column of `answer`."""
        return {"probability": "double"}
