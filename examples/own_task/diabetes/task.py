"""The task: regression of one number. It does not import torch, so that sharding runs where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kftrain.data.schema import Field, SampleSchema
from kftrain.tasks import Regression


class Progression(Regression):
    """How far a disease progresses within a year, from measurements; metrics `rmse` and `r2`."""

    def __init__(self, *, num_features: int, target_mean: float = 0.0, target_std: float = 1.0) -> None:
        super().__init__(target_mean=target_mean, target_std=target_std)
        self.num_features = num_features

    def schema(self) -> SampleSchema:
        return SampleSchema((Field("features", "float32", (self.num_features,)), Field("target", "float32")))

    def model_arguments(self) -> dict[str, Any]:
        return {"num_features": self.num_features}

    def slice_names(self, keys: list[str], statistics: Mapping[str, np.ndarray]) -> list[str]:
        return ["mild" if target < self.target_mean else "severe" for target in statistics["target"]]
