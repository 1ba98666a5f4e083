"""A regression of rows that count differently, and a bare loop that trains it without a line of kftrain.

The task writes down which samples each process was given, so that the loop takes the same ones; what stands in them
the loop reads from the shards itself.
"""

import io
import json
import math
import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from kftrain.data.schema import Field, SampleSchema
from kftrain.tasks import Task

SEEN_ENV = "SEEN_FOLDER"
"""Folder of the files in which each process writes the ids of the samples of each loss."""

NUM_FEATURES = 6

BASE = """
data: {source: "helpers.models.regression:records", shard_size_bytes: 65536, validation_fraction: 0.2}
task: {kind: "helpers.models.regression:Regression"}
evaluate: {interval_steps: 0}
registry: {metric: mse, goal: minimize}
"""
"""Sections of a configuration that trains it; the others say how."""

SCHEDULED = """
model: {kind: "helpers.models.regression:Network"}
optimizer: {learning_rate: 0.02, warmup_steps: 5, weight_decay: 0.3, beta1: 0.8, beta2: 0.9, epsilon: 1.0e-2,
  final_learning_rate_fraction: 0.2}
"""
"""Sections with what the bare loop is told below: peak, warm-up and the like."""


def records():
    """Rows whose scale differs, so that some gradients are large and others small."""
    generator = np.random.default_rng(5)
    slope = generator.normal(size=NUM_FEATURES)
    for number in range(90):
        x = generator.normal(size=NUM_FEATURES) * (4.0 if number % 11 == 0 else 1.0)
        fields = {"x": x.astype(np.float32), "y": np.float32(x @ slope + 0.1 * generator.normal()), "id": number}
        yield f"row-{number:03d}", fields


class Regression(Task):
    """Fields `x`, `y`, `terms` (1 to 3: how often a row counts) and `id`."""

    targets = ("y", "terms", "id")

    def __init__(self, *, nan_steps: str = "") -> None:
        self.nan_steps = {int(step) for step in nan_steps.split("+") if step}
        self.num_losses = 0

    def schema(self):
        fields = Field("x", "float32", (NUM_FEATURES,)), Field("y", "float32")
        return SampleSchema((*fields, Field("terms", "int64"), Field("id", "int64")))

    def encode_field(self, record, field):
        if field.name == "terms":
            return np.array(1 + record.fields["id"] % 3, np.int64)
        return super().encode_field(record, field)

    def count_terms(self, arrays):
        return arrays["terms"]

    def loss(self, output, batch, weight):
        self._write_down(batch["id"][weight > 0].tolist())
        squares = (output.float() - batch["y"]).square() * batch["terms"]
        self.num_losses += 1
        return (squares * weight).sum() * (math.nan if self.num_losses in self.nan_steps else 1.0)

    def statistics(self, output, batch):
        errors = (output.float() - batch["y"]).double()
        return {"squares": errors.square(), "count": torch.ones_like(errors)}

    def metrics(self, sums):
        return {"mse": np.asarray(sums["squares"]) / sums["count"]}

    def _write_down(self, ids):
        if SEEN_ENV in os.environ and torch.is_grad_enabled():
            with (Path(os.environ[SEEN_ENV]) / os.environ.get("RANK", "0")).open("a") as file:
                file.write(json.dumps(ids) + "\n")


class Holes(Regression):
    """Numbers of its `x` may be missing."""

    def encode_field(self, record, field):
        return record.fields["x"] if field.name == "x" else super().encode_field(record, field)


class Network(nn.Module):
    """Two residual blocks between two matrices; with biases and norms, which do not decay."""

    def __init__(self, *, dim: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(NUM_FEATURES, dim)
        self.layers = nn.ModuleList(Residual(dim, dropout) for _ in range(2))
        self.leave = nn.Linear(dim, 1)

    def blocks(self):
        return list(self.layers)

    def forward(self, x):
        hidden = self.enter(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.leave(hidden).squeeze(-1)


class Residual(nn.Module):
    def __init__(self, dim, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden):
        return hidden + self.dropout(torch.tanh(self.linear(self.norm(hidden))))


def read_split(manifest_uri, split):
    """Field name -> rows of a split in stored order, by `tarfile` alone."""
    columns = {}
    folder = Path(manifest_uri).parent
    for shard in json.loads(Path(manifest_uri).read_text())["splits"][split]["shards"]:
        path = folder / shard["folder"] / shard["name"]
        with tarfile.open(path) as archive:
            for member in archive:
                field = member.name.split(".")[-2]
                columns.setdefault(field, []).append(np.load(io.BytesIO(archive.extractfile(member).read())))
    return {field: np.concatenate(parts) for field, parts in columns.items()}


def seen_ids(folder, first_loss=0):
    """Each process's samples, loss by loss: `[rank][loss]` is a list of ids."""
    ranks = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
    return [[json.loads(line) for line in path.read_text().splitlines()][first_loss:] for path in ranks]


class BareLoop:
    """What a training of so many steps gives; the settings are those of the tests' configuration."""

    def __init__(self, model, split, *, steps, peak, warmup, floor, clip, betas, epsilon, decay):
        self.model = model
        self.steps = steps
        self.peak = peak
        self.warmup = warmup
        self.floor = floor
        self.clip = clip
        self.row_of = {int(number): row for row, number in enumerate(split["id"])}
        self.split = {name: torch.from_numpy(values) for name, values in split.items()}
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=epsilon, foreach=False)
        self.points = []

    def rate(self, step):
        """Linear up to the peak, which the last step of the warm-up has, then a half cosine to the last step."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        share = (step - self.warmup) / (self.steps - 1 - self.warmup)
        return self.peak * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2)

    def step(self, step, ids, half=False, bad=False):
        """One step over the samples `ids`, as lists of micro batches; `half`: as mixed precision computes it."""
        num_terms = sum(int(self.split["terms"][self.row_of[number]]) for part in ids for number in part)
        total, gradients = 0.0, [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        for part in ids:
            rows = torch.tensor([self.row_of[number] for number in part])
            loss, found = self._gradients(rows, num_terms, half)
            total += float(loss.detach().double())
            gradients = [before + new for before, new in zip(gradients, found, strict=True)]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        rate = self.rate(step)
        if not bad:
            scale = min(1.0, self.clip / (norm + 1e-6))
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient * scale
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.points.append({"step": step + 1, "loss": total, "gradient_norm": norm, "learning_rate": rate})

    def _gradients(self, rows, num_terms, half):
        weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        if half:
            weights = {name: weight.bfloat16() for name, weight in weights.items()}
        for weight in weights.values():
            weight.requires_grad_()
        x, y = self.split["x"][rows], self.split["y"][rows]
        outputs = torch.func.functional_call(self.model, weights, (x.bfloat16() if half else x,)).float()
        loss = ((outputs - y).square() * self.split["terms"][rows]).sum() / num_terms
        found = torch.autograd.grad(loss, list(weights.values()))
        return loss, [gradient.float() for gradient in found]
