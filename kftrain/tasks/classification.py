"""Base class of tasks that predict one class for each sample: derive from it and say what a sample is.

Labels and predictions are among the per-group statistics, so that slices by class and the confusion table need no
second pass over the data.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field as Limits

from kftrain.data.schema import Arrays, Field, Record
from kftrain.errors import ConfigError, DataError
from kftrain.models.output import output_of
from kftrain.tasks.base import Task

if TYPE_CHECKING:
    import torch

    from kftrain.tasks.base import Batch


class Classification(Task):
    """Predicts the field `label`; metrics `accuracy` and `cross_entropy` (nats per sample), slices by class.

    A class derived from it has a `schema` with a scalar integer `label`; the model gives logits `[rows, num_classes]`.

    Args:
        num_classes: Classes; labels are 0 to `num_classes` - 1.
        labels: Names of the classes; empty: their numbers.
    """

    targets = ("label",)
    loss_unit = "nats per sample"
    loss_metric = "cross_entropy"
    metric_goals = MappingProxyType({"accuracy": "maximize", "cross_entropy": "minimize"})

    def __init__(self, *, num_classes: Annotated[int, Limits(ge=2)], labels: list[str] | None = None) -> None:
        self.num_classes = num_classes
        self._names = list(labels or ())
        if labels and not len(set(labels)) == len(labels) == num_classes:
            raise ConfigError(
                f"needs {num_classes} different names",
                where="task.labels",
                value=labels,
                fix="one for each class",
            )

    @functools.cached_property
    def labels(self) -> list[str]:
        """Names of the classes; made on demand, since a foreign document may claim any number of classes."""
        return self._names or [str(number) for number in range(self.num_classes)]

    def settings(self) -> dict[str, Any]:
        """Return all options but the names of the classes."""
        return {name: value for name, value in self.options.items() if name != "labels"}

    def encode_field(self, record: Record, field: Field) -> np.ndarray:
        """Make one field as any task does. Raises DataError for a label that is none of the classes."""
        if field.name == "label":
            return np.array(self.label_of(record), dtype=field.dtype)
        return super().encode_field(record, field)

    def baselines(self, samples: Iterable[Arrays]) -> dict[str, dict[str, float]]:
        """Score two trivial answers: always the most frequent class, and each class's share as its probability."""
        counts = np.zeros(self.num_classes, np.int64)
        for arrays in samples:
            counts += np.bincount(arrays["label"].astype(np.int64), minlength=self.num_classes)
        if not counts.sum():
            return {}
        share = counts[counts > 0] / counts.sum()
        return {
            "accuracy": {"most frequent class": float(share.max())},
            "cross_entropy": {"class frequencies": float(-(share * np.log(share)).sum())},
        }

    def model_arguments(self) -> dict[str, Any]:
        """Return the number of classes as `num_classes`."""
        return {"num_classes": self.num_classes}

    def loss(self, output: Any, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """Sum the cross-entropy in nats over rows whose weight is not 0."""
        import torch.nn.functional as F  # noqa: N812 - the name that everybody uses

        return (F.cross_entropy(output.float(), batch["label"].long(), reduction="none") * weight).sum()

    def statistics(self, output: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Return per row `correct`, `cross_entropy` in nats, `count` (1), `label` and `prediction`."""
        import torch

        labels = batch["label"].long()
        log_probabilities = torch.log_softmax(output.float(), dim=-1)
        predictions = log_probabilities.argmax(dim=-1)
        return {
            "correct": (predictions == labels).double(),
            "cross_entropy": -log_probabilities.double().gather(1, labels.unsqueeze(1)).squeeze(1),
            "count": torch.ones_like(labels).double(),
            "label": labels.double(),
            "prediction": predictions.double(),
        }

    def tallies(self, output: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Return histograms of confidence and of each class's scores; none if a subclass has its own `statistics`."""
        if type(self).statistics is not Classification.statistics:
            return {}
        from kftrain.tasks import histograms

        labels, log_probabilities = batch["label"].long(), output.double().log_softmax(dim=-1)
        tallies = {"reliability": histograms.reliability(log_probabilities, labels)}
        if self.num_classes <= histograms.MAX_CLASSES:
            tallies["scores"] = histograms.scores(log_probabilities, labels)
        return tallies

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute accuracy and mean cross-entropy; NaN without samples."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "accuracy": np.asarray(sums["correct"]) / sums["count"],
                "cross_entropy": np.asarray(sums["cross_entropy"]) / sums["count"],
            }

    def slice_names(self, keys: list[str], statistics: Mapping[str, np.ndarray]) -> list[str]:
        """Name the class of each sample as its slice."""
        return [self.labels[int(label)] for label in statistics["label"]]

    def confusion(self, statistics: Mapping[str, np.ndarray]) -> tuple[list[str], np.ndarray]:
        """Count true classes (rows) against predicted ones (columns)."""
        matrix = np.zeros((self.num_classes, self.num_classes), dtype=np.int64)
        pairs = (
            np.asarray(statistics["label"], dtype=np.int64),
            np.asarray(statistics["prediction"], dtype=np.int64),
        )
        np.add.at(matrix, pairs, 1)
        return self.labels, matrix

    def examples(self, model: torch.nn.Module, arrays: Arrays, batch: Batch) -> list[Mapping[str, Any]]:
        """Show the class, the predicted one, and the probability that the model gives to each of the two."""
        probabilities = output_of(model, self.inputs(batch)).float().softmax(dim=-1).cpu().numpy()
        return [
            {
                "class": f"{self.labels[label]} (p = {row[label]:.3f})",
                "predicted": f"{self.labels[row.argmax()]} (p = {row.max():.3f})",
            }
            for label, row in zip(arrays["label"].tolist(), probabilities, strict=True)
        ]

    def answer(self, output: Any) -> dict[str, torch.Tensor]:
        """Return the probability of each class, by its name."""
        return dict(zip(self.labels, output.float().softmax(dim=-1).T, strict=True))

    def answer_types(self) -> dict[str, str]:
        """Return `float` for each column of `answer`."""
        return dict.fromkeys(self.labels, "float")

    def label_of(self, record: Record) -> int:
        """Return the label of a record. Raises DataError if it is none of the classes, or the source has others."""
        names, label = record.fields.get("class_names"), record.fields.get("label")
        if names is not None and len(names) != self.num_classes:
            raise DataError(
                f"the source has {len(names)} classes, the task {self.num_classes}",
                where=record.key,
                value=", ".join(names),
                fix=f"task.num_classes={len(names)}",
            )
        if not isinstance(label, int | np.integer) or not 0 <= label < self.num_classes:
            raise DataError(f"the label is not one of 0 to {self.num_classes - 1}", where=record.key, value=label)
        return int(label)
