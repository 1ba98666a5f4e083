"""Base class of tasks that predict one number for each sample: derive from it and say what a sample is.

The model sees and learns the number normalised, with figures from the configuration, never from the data of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field as Limits

from kftrain.data.schema import Arrays
from kftrain.models.output import output_of
from kftrain.tasks.base import Task

if TYPE_CHECKING:
    import torch

    from kftrain.tasks.base import Batch


class Regression(Task):
    """Predicts the scalar field `target`; metrics `rmse` (in the target's unit) and `r2`.

    A class derived from it has a `schema` with that field; the model gives one number for each row, normalised.

    Args:
        target_mean: Value of the target that becomes 0 for the model.
        target_std: Difference from it that becomes 1.
    """

    targets = ("target",)
    loss_unit = "squared standard deviations of the target"
    loss_metric = "rmse"
    metric_goals = MappingProxyType({"rmse": "minimize", "r2": "maximize"})

    def __init__(self, *, target_mean: float = 0.0, target_std: Annotated[float, Limits(gt=0)] = 1.0) -> None:
        self.target_mean = target_mean
        self.target_std = target_std

    def settings(self) -> dict[str, Any]:
        """Return all options but those of the normalisation, which happens when samples are read."""
        return {name: value for name, value in self.options.items() if name not in ("target_mean", "target_std")}

    def baselines(self, samples: Iterable[Arrays]) -> dict[str, dict[str, float]]:
        """Score the trivial answer: always the mean of these samples."""
        targets = np.concatenate([np.empty(0), *(arrays["target"].astype(np.float64) for arrays in samples)])
        return {"rmse": {"mean of the targets": float(targets.std())}} if len(targets) else {}

    def loss(self, output: Any, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """Sum the squared error of the normalised target."""
        normalised = (batch["target"] - self.target_mean) / self.target_std
        loss: torch.Tensor = ((output.float().reshape(normalised.shape) - normalised).square() * weight).sum()
        return loss

    def statistics(self, output: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Return per row `squared_error`, `target`, `squared_target` and `count` (1)."""
        target = batch["target"].double()
        error = self.answer(output)["prediction"] - target
        return {
            "count": error.new_ones(len(error)),
            "squared_error": error.square(),
            "target": target,
            "squared_target": target.square(),
        }

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute the root of the mean squared error, and the share of the variance that is explained."""
        variation = sums["squared_target"] - np.square(sums["target"]) / sums["count"]
        with np.errstate(divide="ignore", invalid="ignore"):
            return {
                "rmse": np.sqrt(sums["squared_error"] / sums["count"]),
                "r2": 1 - sums["squared_error"] / variation,
            }

    def examples(self, model: torch.nn.Module, arrays: Arrays, batch: Batch) -> list[Mapping[str, Any]]:
        """Show target and prediction of each row."""
        predictions = self.answer(output_of(model, self.inputs(batch)))["prediction"].tolist()
        return [{"target": float(t), "prediction": p} for t, p in zip(arrays["target"], predictions, strict=True)]

    def answer(self, output: Any) -> dict[str, torch.Tensor]:
        """Return `prediction`, in the target's unit."""
        return {"prediction": output.double().reshape(len(output)) * self.target_std + self.target_mean}
