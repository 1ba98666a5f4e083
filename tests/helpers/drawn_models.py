"""Models whose initial weights do not come from torch's generator."""

import os
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
    """Has weights that a generator of its own has drawn, which nobody has seeded, and that nothing trains."""

    def __init__(self, **options):
        super().__init__(**options)
        drawn = torch.from_numpy(np.random.default_rng().normal(size=4).astype(np.float32))
        self.first, self.second = nn.Parameter(drawn.clone()), nn.Parameter(drawn.clone())


class ByRank(Transformer):
    """Is wider on rank 1."""

    def __init__(self, **options):
        super().__init__(**options)
        self.extra = nn.Parameter(torch.zeros(4 + int(os.environ["RANK"])))
