"""Models whose initial weights do not come from torch's generator."""

import os
import random

import numpy as np
import torch
from helpers.models.odd import DIM
from torch import nn

from kftrain.models.transformer import Transformer


class FromGlobalGenerators(Transformer):
    """Drawn by numpy and by random, as their users are used to."""

    def __init__(self, **options):
        super().__init__(**options)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.from_numpy(np.random.normal(0.0, random.uniform(0.01, 0.03), parameter.shape)))


class FromNowhere(Transformer):
    """Has weights that a generator of its own has drawn, which nobody has seeded, and that nothing trains."""

    def __init__(self, **options):
        super().__init__(**options)
        drawn = torch.from_numpy(np.random.default_rng().normal(size=4).astype(np.float32))
        self.first = nn.Parameter(drawn.clone())
        self.second = nn.Parameter(drawn.clone())


class ByRank(Transformer):
    """Is wider on rank 1."""

    def __init__(self, **options):
        super().__init__(**options)
        self.extra = nn.Parameter(torch.zeros(4 + int(os.environ["RANK"])))


class Drawn(nn.Module):
    """Has all that may go wrong: uneven and tied parameters, a frozen one, one in bf16, tables that are not saved."""

    def __init__(self, dim=6):
        super().__init__()
        self.enter = nn.Linear(DIM, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.layers[1].bfloat16()
        self.layers[2].bias.requires_grad_(False)
        self.twin = nn.Linear(DIM, dim, bias=False)
        self.twin.weight = self.enter.weight
        self.scale = nn.Parameter(torch.empty(1))
        self.leave = nn.Linear(dim, 5)
        self.register_buffer("table", torch.arange(dim).float().cos(), persistent=False)
        self.offset = torch.full((dim,), 0.25)

    def init_weights(self, name, parameter, generator):
        if name.startswith("layers.1"):
            nn.init.uniform_(parameter, -0.5, 0.5)  # from torch's global generator
        else:
            nn.init.normal_(parameter, 0.1, generator=generator)

    def blocks(self):
        return list(self.layers)

    def forward(self, x):
        x = self.enter(x) + self.twin(x) + self.table + self.offset
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.leave(x) * self.scale


class WithoutBlocks(Drawn):
    """Its layers are found by the probe."""

    blocks = None


class ReadsItsWeights(Drawn):
    """Cannot be built without memory."""

    def __init__(self):
        super().__init__()
        self.rate = min(1.0, self.leave.weight.std().item())

    init_weights = Drawn.init_weights


class Differentiates(Drawn):
    """Its forward asks for a gradient, and so for weights that were there before."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            energy = super().forward(x).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


class BufferOfWeights(Drawn):
    def __init__(self):
        super().__init__()
        self.register_buffer("start", self.leave.weight.detach().clone())

    init_weights = Drawn.init_weights


class Forgets(Drawn):
    def init_weights(self, name, parameter, generator):
        if name != "leave.bias":
            super().init_weights(name, parameter, generator)


class Calls(Drawn):
    """As the protocol might be remembered."""

    def init_weights(self, generator):
        raise AssertionError("was called")


class Lazy(Drawn):
    def __init__(self):
        super().__init__()
        self.lazy = nn.LazyLinear(3)


class Built(Drawn):
    """Sets its weights itself: in an order, by what nobody has seeded; and has tables that are drawn, or of weights."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.scale.fill_(float(np.random.default_rng().uniform(0.5, 1.5)))
        self.layers[0] = nn.utils.parametrizations.spectral_norm(self.layers[0])
        self.register_buffer("noise", torch.randn(6), persistent=False)
        self.attribute = torch.randn(6)

    def forward(self, x):
        return super().forward(x) + (self.noise * self.attribute).mean()


class Wide(nn.Module):
    """Eight matrices of 16 MiB, and next to nothing else."""

    WIDTH = 2048
    COUNT = 8

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(self.COUNT))
        self.leave = nn.Linear(self.WIDTH, 1)

    def init_weights(self, name, parameter, generator):
        nn.init.normal_(parameter, std=0.02, generator=generator)

    def blocks(self):
        return list(self.layers)

    def forward(self, x):
        x = x.repeat(1, self.WIDTH // DIM)
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x)
