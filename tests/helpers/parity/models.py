"""Networks with what makes strategies stumble, in plain torch: both sides of the table of parity use them."""

import functools
import re

import numpy as np
import torch
from helpers.parity.oracle import BASE, Case
from torch import nn

from kftrain import tasks
from kftrain.data.schema import Field, SampleSchema

FEATURES, DIM = 6, 8


class Squares(tasks.Task):
    """Squares of what the model answers; the rows of `square_rows`."""

    targets = ("y",)

    def schema(self):
        return SampleSchema((Field("x", "float32", (FEATURES,)), Field("y", "float32")))

    def loss(self, output, batch, weight):
        return ((output.float() - batch["y"]).square() * weight).sum()

    def statistics(self, output, batch):
        return {"squares": (output.float() - batch["y"]).square()}

    def metrics(self, sums):
        raise NotImplementedError


@functools.cache
def square_rows():
    generator = np.random.default_rng(11)
    x = generator.normal(size=(29, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1)).astype(np.float32)}


def square_loss(network, rows):
    return (network(torch.from_numpy(rows["x"])) - torch.from_numpy(rows["y"])).square().sum()


def number_of_rows(rows):
    return len(rows["x"])


class Plain(nn.Module):
    """Two residual blocks between two matrices."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, DIM)
        self.layers = nn.ModuleList(self.layer() for _ in range(2))
        self.leave = nn.Linear(DIM, 1)

    def layer(self):
        return nn.Linear(DIM, DIM)

    def blocks(self):
        return list(self.layers)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.leave(x).squeeze(-1)


class Normed(Plain):
    """With batch norms."""

    def layer(self):
        return nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM, momentum=0.2))


class Frozen(Plain):
    """One block does not train at all, of the other half."""

    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[1].bias.requires_grad_(False)
        self.enter.weight.requires_grad_(False)


class Tied(Plain):
    """A matrix stands in two places."""

    def __init__(self):
        super().__init__()
        self.twin = nn.Linear(FEATURES, DIM, bias=False)
        self.twin.weight = self.enter.weight

    def forward(self, x):
        return super().forward(x) + self.twin(x.sin()).sum(-1)


class Choosy(Plain):
    """Each row chooses one of two experts, and all rows of some steps choose the first; a matrix is never used."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, 1) for _ in range(2))
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        out = super().forward(x)
        second = x[:, 0] > 0.9
        for expert, chosen in zip(self.experts, (~second, second), strict=True):
            if chosen.any():
                out = out.index_add(0, chosen.nonzero()[:, 0], expert(x[chosen]).squeeze(-1).to(out.dtype))
        return out


class Averages(Plain):
    """Keeps a mean of what it sees, and computes with that of before."""

    buffer_reductions = {"seen": "mean"}  # noqa: RUF012 - as a user writes it

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(FEATURES))

    def forward(self, x):
        out = super().forward(x) + self.seen.detach().clone().sum()
        if self.training:
            with torch.no_grad():
                self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        return out


class Clamped(Plain):
    """A scale that is kept within limits by giving it other memory, after each step."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.95))

    def limit(self):
        self.scale.data = self.scale.data.clamp(0.93, 0.97)

    def after_step(self):
        self.limit()

    def forward(self, x):
        return super().forward(x) * self.scale.exp().sum()


class ClampedInForward(Clamped):
    def after_step(self):
        pass

    def forward(self, x):
        self.limit()
        return super().forward(x)


class ClampedInPlace(ClampedInForward):
    def limit(self):
        with torch.no_grad():
            self.scale.clamp_(0.93, 0.97)


class TiedBlocks(Plain):
    def __init__(self):
        super().__init__()
        self.layers[1].weight = self.layers[0].weight


class Undeclared(Averages):
    buffer_reductions = {}  # noqa: RUF012 - as a user writes it


class WithoutBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.leave(x).squeeze(-1)


def case_of(network):
    words = re.sub("(?<!^)(?=[A-Z])", " ", network.__name__).lower()
    base = BASE.replace("{kind: language_modeling, sequence_length: 8, tokenizer: bytes}", "{kind: TASK}")
    base = base.replace("{kind: transformer, dim: 16, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_dim: 24}", "{}")
    kinds = (f"model.kind={network.__module__}:{network.__name__}", "task.kind=helpers.parity.models:Squares")
    return Case(words, kinds, network, square_rows, square_loss, number_of_rows, base=base)


NORMED, FROZEN, TIED, CHOOSY, AVERAGES = map(case_of, (Normed, Frozen, Tied, Choosy, Averages))
CLAMPED, CLAMPED_IN_FORWARD, CLAMPED_IN_PLACE = map(case_of, (Clamped, ClampedInForward, ClampedInPlace))
TIED_BLOCKS, UNDECLARED, WITHOUT_BLOCKS = map(case_of, (TiedBlocks, Undeclared, WithoutBlocks))
