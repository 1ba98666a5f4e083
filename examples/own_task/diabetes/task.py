"""The task: regression of one number. Torch is imported inside methods, so that sharding runs where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.data.schema import Arrays, Block, Field, Record, SampleSchema
from kftrain.errors import DataError

if TYPE_CHECKING:
    import pandas
    import torch


class Regression:
    """Predicts a number from measurements; metrics `rmse` (in the target's unit) and `r2`."""

    loss_unit = "squared standard deviations of the target"
    loss_metric = "rmse"

    def __init__(self, *, num_features: int, target_mean: float = 0.0, target_std: float = 1.0) -> None:
        self.num_features, self.target_mean, self.target_std = num_features, target_mean, target_std

    # What sharding needs.

    def schema(self) -> SampleSchema:
        return SampleSchema((Field("features", "float32", (self.num_features,)), Field("target", "float32")))

    def settings(self) -> dict[str, Any]:
        return {"task": "diabetes", "num_features": self.num_features}

    def encode(self, records: Iterable[Record], split: str) -> Iterator[Block]:
        for record in records:
            features = np.asarray(record.fields["features"], dtype=np.float32)
            if features.shape != (self.num_features,) or not np.isfinite(features).all():
                raise DataError(f"needs {self.num_features} finite features", where=record.key, value=features)
            target = np.float32(record.fields["target"])
            yield Block(record.key, {"features": features[np.newaxis], "target": np.array([target])})

    def baselines(self, records: Iterable[Record]) -> dict[str, dict[str, float]]:
        targets = np.array([record.fields["target"] for record in records])
        return {"rmse": {"mean of the targets": float(targets.std())}}

    # What training needs.

    def model_arguments(self) -> dict[str, Any]:
        return {"num_features": self.num_features}

    def count_terms(self, arrays: Arrays) -> np.ndarray:
        return np.ones(len(arrays["target"]), dtype=np.int64)

    def batch(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        import torch

        return {name: torch.from_numpy(np.array(arrays[name])) for name in ("features", "target")}

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        normalised = (batch["target"] - self.target_mean) / self.target_std
        return ((model(batch["features"]).float() - normalised).square() * weight).sum()

    # What evaluation needs: sums over samples, and metrics that are functions of such sums.

    def statistics(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        target = batch["target"].double()
        error = self._predict(model, batch["features"]) - target
        return {
            "count": error.new_ones(len(error)),
            "squared_error": error.square(),
            "target": target,
            "squared_target": target.square(),
        }

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        variation = sums["squared_target"] - np.square(sums["target"]) / sums["count"]
        with np.errstate(divide="ignore", invalid="ignore"):
            return {
                "rmse": np.sqrt(sums["squared_error"] / sums["count"]),
                "r2": 1 - sums["squared_error"] / variation,
            }

    def slice_names(self, keys: list[str], statistics: Mapping[str, np.ndarray]) -> list[str]:
        return ["mild" if target < self.target_mean else "severe" for target in statistics["target"]]

    def confusion(self, statistics: Mapping[str, np.ndarray]) -> None:
        return None

    def examples(
        self, model: torch.nn.Module, arrays: Arrays, batch: dict[str, torch.Tensor]
    ) -> list[Mapping[str, Any]]:
        predictions = self._predict(model, batch["features"]).tolist()
        return [{"target": float(t), "prediction": p} for t, p in zip(arrays["target"], predictions, strict=True)]

    def predict(self, model: torch.nn.Module, inputs: pandas.DataFrame) -> pandas.DataFrame:
        import pandas
        import torch

        if inputs.shape[1] != self.num_features:
            raise DataError(f"needs {self.num_features} columns", where="predict", value=list(inputs.columns))
        features = torch.from_numpy(np.array(inputs, dtype=np.float32)).to(next(model.parameters()).device)
        with torch.inference_mode():
            prediction = self._predict(model.eval(), features)
        return pandas.DataFrame({"prediction": prediction.cpu().numpy()}, index=inputs.index)

    def _predict(self, model: torch.nn.Module, features: torch.Tensor) -> torch.Tensor:
        return model(features).double() * self.target_std + self.target_mean
