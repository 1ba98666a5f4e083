"""Models that are not a plain stack of blocks, and a task that is small enough for all of them."""

import functools
import random

import numpy as np
import torch
from torch import nn

from kftrain import tasks
from kftrain.data.counters import Counters
from kftrain.data.loader import MicroBatch, StepBatch
from kftrain.data.schema import Field, SampleSchema
from kftrain.models import ModelOutput

DIM, ROWS = 4, 8


class Task(tasks.Task):
    """Squares of what the model answers; `x` holds the rows, whose sign says which expert they want."""

    def schema(self):
        return SampleSchema((Field("x", "float32", (DIM,)),))

    def loss(self, output, batch, weight):
        return ((output.float().sum(-1) - 1).square() * weight).sum()

    def statistics(self, output, batch):
        return {"sum": output.float().sum(-1)}

    def metrics(self, sums):
        raise NotImplementedError


class Loader:
    """Steps of `ROWS` rows, a share for each rank: rows of the first half are positive, of the second negative."""

    def __init__(self, world, num_micro=1):
        self.world = world
        self.num_micro = num_micro
        self.counters = Counters()

    def steps(self, first, count):
        for step in range(first, first + count):
            x = np.abs(np.random.default_rng(step).normal(size=(ROWS, DIM))).astype(np.float32)
            x[ROWS // 2 :] *= -1
            parts = np.split(np.array_split(x, self.world.size)[self.world.rank], self.num_micro)
            micro_batches = [MicroBatch({"x": part}, np.ones(len(part), np.float32)) for part in parts]
            yield StepBatch(step, micro_batches, sum(map(len, parts)))


def linears(count):
    return nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))


class Stack(nn.Module):
    """What the others vary: a list of layers between two matrices."""

    def __init__(self, count=3):
        super().__init__()
        self.enter = nn.Linear(DIM, DIM)
        self.layers = linears(count)
        self.leave = nn.Linear(DIM, DIM)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.leave(x)


class Wide(Stack):
    """A matrix of more numbers than all others."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(DIM, 1024)

    def forward(self, x):
        return super().forward(x) + self.wide(x).mean(-1, keepdim=True)


class Experts(Stack):
    """A plain mixture: an expert for positive rows, one for negative ones, one that nobody wants; a spare matrix."""

    def __init__(self):
        super().__init__()
        self.experts = linears(3)
        self.spare = nn.Linear(DIM, DIM)

    def forward(self, x):
        out = super().forward(x).clone()
        for number, chosen in enumerate((x[:, 0] > 0, x[:, 0] <= 0)):
            if chosen.any():
                out[chosen] = self.experts[number](out[chosen]).to(out.dtype)
        return out


class OnlyExperts(nn.Module):
    """The experts are its only list, and the longest."""

    def __init__(self):
        super().__init__()
        self.experts = linears(2)

    def forward(self, x):
        chosen = zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True)
        return torch.cat([expert(x[mask]) for expert, mask in chosen if mask.any()])


class NamedExperts(OnlyExperts):
    def blocks(self):
        return list(self.experts)


class BlocksAttribute(nn.Module):
    """As timm's vision transformers and DiT: an attribute, not a method."""

    def __init__(self, sequential=False):
        super().__init__()
        layers = linears(3)
        self.blocks = nn.Sequential(*layers) if sequential else layers
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Shared(Stack):
    """One block, called three times."""

    def __init__(self):
        super().__init__(1)

    def blocks(self):
        return [self.layers[0]] * 3

    def forward(self, x):
        for _ in range(3):
            x = x + torch.tanh(self.layers[0](x))
        return self.leave(self.enter(x))


class CallsTwice(Stack):
    """Each block is called twice in a forward pass, one round after the other."""

    def forward(self, x):
        return super().forward(x) * super().forward(-x)


class TiedHead(Stack):
    """The last element of the list has the matrix of the first layer."""

    def __init__(self):
        super().__init__()
        self.layers[2].weight = self.enter.weight


class ByMethod(Stack):
    """Its layers are called by another method than forward."""

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.Linear.forward(layer, x)
        return self.leave(x)

    def encode(self, x):
        return self(x)


class NamedByMethod(ByMethod):
    def blocks(self):
        return list(self.layers)


class Frozen(Stack):
    """Half of each block is frozen, and a batch norm that is kept in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM).eval()
        for layer in self.layers:
            layer.bias.requires_grad_(False)
        self.enter.requires_grad_(False)

    def forward(self, x):
        return self.norm(super().forward(x))


class MixedTypes(Stack):
    """Built in three formats."""

    def __init__(self):
        super().__init__()
        self.layers[1].bfloat16()
        self.layers[2].bias.data = self.layers[2].bias.data.half()


class PositionBuffer(Stack):
    """An fp32 buffer that is added before the blocks, which cast what they are given."""

    def __init__(self, inside=False):
        super().__init__()
        self.inside = inside
        self.register_buffer("position", torch.linspace(0, 1, DIM))

    def forward(self, x):
        x = self.enter(x) + (0 if self.inside else self.position)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x + (self.position if self.inside else 0))


class Codebook(Stack):
    """A moving average of what passes through, as in VQ; and a count of steps, which is the same everywhere."""

    def __init__(self, average=True):
        super().__init__()
        self.average = average
        self.register_buffer("codes", torch.zeros(DIM))
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        out = super().forward(x)
        if self.training:
            self.num_steps += 1
            if self.average:
                self.codes = 0.9 * self.codes + 0.1 * out.detach().float().mean(0)
        return out + self.codes.to(out.dtype)


class Statistics(Stack):
    """Keeps what it has seen, in each way that can be combined, and computes with it."""

    def __init__(self):
        super().__init__()
        self.buffer_reductions = {"seen.me*": "mean", "seen.[ct]o*": "sum", "*.peak": "max", "pick*": "first"}
        self.seen = nn.Module()
        self.seen.register_buffer("mean", torch.zeros(DIM))
        self.seen.register_buffer("count", torch.ones((), dtype=torch.int64))
        self.seen.register_buffer("total", torch.ones(DIM))
        self.seen.register_buffer("peak", torch.full((DIM,), -10.0))
        self.register_buffer("picked", torch.zeros(DIM))

    def forward(self, x):
        out = super().forward(x) + self.seen.mean + self.seen.total / self.seen.count + 0.1 * self.seen.peak.tanh()
        if self.training:
            with torch.no_grad():
                self.seen.mean = 0.9 * self.seen.mean + 0.1 * x.mean(0)
                self.seen.count += len(x)
                self.seen.total += x.sum(0)
                self.seen.peak.copy_(torch.maximum(self.seen.peak, x.amax(0)))
                self.picked.copy_(x[0])
        return out


class Normed(Stack):
    """With a batch norm whose running statistics are plain means."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM, momentum=None)

    def forward(self, x):
        return self.norm(super().forward(x))


class Recurrent(Stack):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(DIM, DIM, batch_first=True)

    def forward(self, x):
        return self.recurrent(super().forward(x).unsqueeze(1))[0].squeeze(1)


class Normalised(Stack):
    """With parametrized weights."""

    def __init__(self):
        super().__init__()
        self.layers[0] = nn.utils.parametrizations.weight_norm(self.layers[0])


class ReadsItsTensors(Stack):
    """Cannot be built without memory."""

    def __init__(self):
        super().__init__()
        self.rates = [each.item() for each in torch.linspace(0, 0.1, 3)]


class Balanced(Stack):
    """With an auxiliary term of each row; after each step its bias follows what all rows together have counted."""

    def __init__(self):
        super().__init__()
        self.buffer_reductions = {"seen": "sum"}
        self.register_buffer("seen", torch.zeros(DIM))
        self.register_buffer("bias", torch.zeros(DIM))

    def forward(self, x):
        if self.training:
            self.seen += (x.detach() > 0).sum(0)
        out = super().forward(x) + self.bias
        return ModelOutput(out, auxiliary=0.3 * out.float().square().mean(-1))

    def after_step(self):
        self.bias += 0.1 * self.seen
        self.seen.zero_()


class NoDescription(Stack):
    def export_config(self):
        return {"rate": torch.zeros(2)}


class DropsLayers(Stack):
    """On each process other ones, from the third step on."""

    unsaved_attributes = ("num_calls",)

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def blocks(self):
        return list(self.layers)

    def forward(self, x):
        self.num_calls += 1
        x = self.enter(x)
        for layer in self.layers[1 if self.num_calls > 3 else 0 :]:
            x = x + torch.tanh(layer(x))
        return self.leave(x)


class Remembers(Stack):
    """Keeps something of each forward pass outside its state dict, in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.last = None
        self.table = None
        self.center = None
        self.num_calls = 0
        self.generator = torch.Generator()
        self.memo = {"mean": torch.zeros(DIM)}
        self.register_buffer("average", torch.zeros(DIM), persistent=False)
        self.register_buffer("made", None)

    def forward(self, x):
        out = super().forward(x)
        if self.how == "shows its last output":
            self.last = out.detach()
        elif self.how == "computes a table once":
            self.table = torch.linspace(0, 1, DIM, dtype=out.dtype) if self.table is None else self.table
            out = self.leave(out + self.table)
        elif self.how == "makes a table a buffer":
            self.register_buffer("places", torch.linspace(0, 1, DIM, dtype=out.dtype), persistent=False)
            out = self.leave(out + self.places)
        elif self.how == "makes a saved buffer":
            self.made = torch.linspace(0, 1, DIM)
            out = out + self.made
        elif self.how == "makes a parameter":
            self.scale = getattr(self, "scale", None) or nn.Parameter(torch.rand(()))
            out = out * self.scale
        elif self.how == "begins with its first rows":
            self.center = out.detach().mean(0) if self.center is None else self.center
            out = out - self.center
        elif self.how == "counts" and self.training:
            self.num_calls += 1
            out = out * min(1.0, self.num_calls / 10)
        elif self.how == "averages in a dict" and self.training:
            self.memo["mean"] = 0.9 * self.memo["mean"] + 0.1 * out.detach().mean(0)
            out = out - self.memo["mean"]
        elif self.how == "averages in a buffer" and self.training:
            self.average += 0.1 * (out.detach().mean(0) - self.average)
            out = out - self.average
        elif self.how == "draws from a generator" and self.training:
            out = out + torch.rand((), generator=self.generator)
        elif self.how == "computes with the rows before" and self.training:
            before, self.last = self.last, x.detach().mean(0)
            out = out if before is None else out + 0.1 * before
        return out


class Anneals(Stack):
    """Computes an attribute of a count of steps that checkpoints hold, and shows its last output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.num_steps += 1
        self.temperature = 1 + 0.1 * float(self.num_steps)
        self.last = super().forward(x) / self.temperature
        return self.last


class RemembersOpenly(Remembers):
    unsaved_attributes = ("*",)


class LateCodebook(Codebook):
    """Keeps an average of its own rows from the third step on."""

    def forward(self, x):
        self.average = bool(self.num_steps >= 3)
        return super().forward(x)


class LayerDrop(Stack):
    """Leaves layers out at random, as the library says whose chance it is."""

    def __init__(self, chance="torch", declared=False):
        super().__init__()
        self.chance = {
            "torch": lambda: torch.rand(()).item(),
            "numpy": np.random.rand,
            "python": functools.partial(random.uniform, 0, 1),
        }[chance]
        if declared:
            self.blocks = lambda: list(self.layers)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            if not self.training or self.chance() > 0.2:
                x = x + torch.tanh(layer(x))
        return self.leave(x)
