"""A training that overfits: as many weights as rows, and targets that hardly follow from the rows."""

import numpy as np
import torch
from helpers import holding
from torch import nn

from kftrain.data.schema import Field, SampleSchema
from kftrain.tasks import Task

NUM_FEATURES, NUM_ROWS = 16, 40


def records():
    generator = np.random.default_rng(5)
    slope = 0.3 * generator.normal(size=NUM_FEATURES)
    for number in range(NUM_ROWS):
        x = generator.normal(size=NUM_FEATURES)
        fields = {"x": x.astype(np.float32), "y": np.float32(x @ slope + generator.normal())}
        yield f"row-{number:03d}", fields


class Regression(Task):
    """Squared errors; `gain` is their negative, of which more is better."""

    targets = ("y",)

    def __init__(self):
        super().__init__()
        self._num_losses = 0
        holding.before_export()

    def schema(self):
        return SampleSchema((Field("x", "float32", (NUM_FEATURES,)), Field("y", "float32")))

    def loss(self, output, batch, weight):
        holding.before_loss(self._num_losses)
        self._num_losses += 1
        return ((output.float() - batch["y"]).square() * weight).sum()

    def statistics(self, output, batch):
        errors = (output.float() - batch["y"]).double()
        return {"squares": errors.square(), "count": torch.ones_like(errors)}

    def metrics(self, sums):
        mse = np.asarray(sums["squares"]) / sums["count"]
        return {"mse": mse, "gain": -mse}


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(NUM_FEATURES, 1)
        nn.init.zeros_(self.line.weight)
        nn.init.zeros_(self.line.bias)

    def forward(self, x):
        return self.line(x).squeeze(-1)


class NormedLine(Line):
    """With a batch norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)

    def forward(self, x):
        return super().forward(self.norm(x))


class StillLine(NormedLine):
    """Its batch norm is not trained."""

    def __init__(self):
        super().__init__()
        self.norm.eval().requires_grad_(False)


TEXT = """
run: {name: overfitting, seed: 3}
data: {source: "helpers.models.overfitting:records", shard_size_bytes: 65536, validation_fraction: 0.5}
task: {kind: "helpers.models.overfitting:Regression"}
model: {kind: "helpers.models.overfitting:Line"}
optimizer: {kind: sgd, learning_rate: 0.03, momentum: 0, weight_decay: 0, schedule: constant}
train: {steps: 120, global_batch_size: 20, log_interval_steps: 10, gradient_clip_norm: 0}
checkpoint: {interval_steps: 25, keep_last: 1}
evaluate: {interval_steps: 10, num_bootstrap: 100}
registry: {metric: mse, goal: minimize}
launch: {processes_per_node: 2, timeout_seconds: 300}
"""
"""Twenty rows to train on, all in each step."""
