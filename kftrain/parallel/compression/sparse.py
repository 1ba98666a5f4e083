"""Sparse sums of the gradients of replicas: a process sends the largest thousandth of what it has gathered.

Deep Gradient Compression (Lin et al. 2018, arXiv:1712.01887), for SGD with momentum. Each process has a momentum of its
own gradients, and adds up its momenta until they are sent (momentum correction); of what is sent the momentum begins
anew (factor masking). Its gradient is clipped before that, by the limit over the square root of the number of processes
(local clipping). So the optimizer has no momentum, and the engine does not clip. The share that is sent falls to the
configured one by powers of a quarter (warm-up).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from kftrain.parallel.compression.codecs import Rounded
from kftrain.parallel.compression.momenta import LocalRule, MomentumSums
from kftrain.parallel.settings import CompressionConfig
from kftrain.parallel.sharded import all_gather

FIRST_DENSITY = 0.25
NUM_WARMUP_STAGES = 4
"""Shares of 1/4, 1/16, 1/64 and 1/256 in equal parts of the warm-up, as in the paper."""


class SparseSums(MomentumSums):
    """Sums of the largest numbers; the feedback is what was not sent yet."""

    def __init__(self, group: dist.ProcessGroup, config: CompressionConfig, bucket_bytes: int, rule: LocalRule) -> None:
        super().__init__(group, Rounded(torch.float32), True, bucket_bytes, rule)
        self._config = config
        self._num_steps = 0
        """Number of steps since the run began, skipped ones with them."""

    def gather(self) -> None:
        """Leave in `work` what this process has to send: momenta of its gradients that were not sent yet."""
        super().gather()
        torch.add(self._feedback, self._next_momentum, out=self._work)
        self._density = self._find_density()
        self._num_steps += 1

    def _find_density(self) -> float:
        warmup, density = self._config.warmup_steps, self._config.density
        if self._num_steps >= warmup:
            return density
        return max(density, FIRST_DENSITY ** (1 + self._num_steps * NUM_WARMUP_STAGES // warmup))

    def exchange_bucket(self, start: int, end: int) -> Iterator[None]:
        """Sum the largest numbers of all processes; of each process its own, at places of its own."""
        work, sums, momentum = (vector[start:end] for vector in (self._work, self._sums, self._next_momentum))
        places = work.abs().topk(math.ceil(self._density * (end - start)), sorted=False).indices
        pairs = torch.stack([work[places].view(torch.int32), places.int()]).unsqueeze(0)
        work[places] = 0.0
        momentum[places] = 0.0
        received = pairs.new_empty(self._group.size(), *pairs.shape[1:])
        flight: Any = all_gather(received, pairs, group=self._group, async_op=True)
        yield
        flight.wait()
        sums.zero_()
        for values, others in received.unbind():  # in the order of the ranks: all come to the same sums
            sums.index_add_(0, others, values.view(torch.float32))

    def save(self) -> dict[str, Any]:
        """Return what was not sent and the momenta, summed over processes, and the number of steps. Collective."""
        return super().save() | {"num_steps": torch.tensor(self._num_steps)}

    def load(self, state: dict[str, Any]) -> None:
        """See `CompressedSums`."""
        super().load(state)
        self._num_steps = int(state["num_steps"])
