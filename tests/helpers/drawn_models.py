"""Models whose initial weights do not come from torch's generator."""

import random

import numpy as np
import torch
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
    """Drawn by a generator of its own that nobody has seeded."""

    def __init__(self, **options):
        super().__init__(**options)
        generator = np.random.default_rng()
        self.bias = nn.Parameter(torch.from_numpy(generator.normal(size=3).astype(np.float32)))
