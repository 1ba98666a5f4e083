"""Sums of what processes send of momenta: each has one of its own gradients, in the place of the optimizer's.

`topk` is Deep Gradient Compression (Lin et al. 2018, arXiv:1712.01887). A process adds up its momenta until they are
sent (momentum correction); of what is sent the momentum begins anew (factor masking). Its gradient is clipped before
that, by the limit over the square root of the number of processes (local clipping), so the engine does not clip. The
share that is sent falls to the configured one by powers of a quarter (warm-up).

Two things differ from the paper, and both brought the loss nearer to that of dense SGD. A momentum counts by the
learning rate of its own step, as in SGD, not by that of the step that sends it, which schedules have made smaller. And
while the warm-up sends so much that masking would leave hardly any momentum, nothing is masked.

`sign` is Signum (Bernstein et al. 2018, arXiv:1810.05165, algorithm 1). A process sends the signs of its momenta to
their owners, which count them, and send out the sign of the sum. A number that is 0, such as that of a word that did
not occur yet, has no vote, and a tie is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kftrain.parallel.compression.codecs import Codec, Rounded, Signs
from kftrain.parallel.compression.sums import CompressedSums
from kftrain.parallel.settings import CompressionConfig
from kftrain.parallel.sharded import all_gather

FIRST_DENSITY = 0.25
NUM_WARMUP_STAGES = 4
"""Shares of 1/4, 1/16, 1/64 and 1/256 in equal parts of the warm-up, as in the paper; only the last one masks."""


@dataclass(frozen=True)
class LocalRule:
    """Momentum and limit of each process's own gradient, in the place of the optimizer's and the engine's."""

    momentum: float
    clip_norm: float
    """Limit of the norm of the sum; 0: none."""


class MomentumSums(CompressedSums):
    """Sums of what a kind makes of the momenta of all processes."""

    def __init__(
        self, group: dist.ProcessGroup, codec: Codec, has_feedback: bool, bucket_bytes: int, rule: LocalRule
    ) -> None:
        super().__init__(group, codec, has_feedback, bucket_bytes)
        self._rule = rule

    def lay_out(self, length: int, device: torch.device) -> None:
        """See `CompressedSums`."""
        super().lay_out(length, device)
        self._state["momentum"] = self._momentum = torch.zeros(length, device=device)
        self._next_momentum = torch.zeros(length, device=device)
        self._changes.append((self._momentum, self._next_momentum))

    def gather(self) -> None:
        """Find the momentum after this step; what is to be sent is left to the kind."""
        self._work.zero_()
        self.add_gradients()
        if self._rule.clip_norm:
            limit = self._rule.clip_norm / math.sqrt(self._group.size())
            self._work.mul_(torch.clamp(limit / (torch.linalg.vector_norm(self._work) + 1e-6), max=1.0))
        torch.add(self._work, self._momentum, alpha=self._rule.momentum, out=self._next_momentum)


class SparseSums(MomentumSums):
    """Sums of the largest numbers; the feedback is what was not sent yet, over the learning rate of the last step."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: CompressionConfig,
        bucket_bytes: int,
        rule: LocalRule,
        find_rate: Callable[[], float],
    ) -> None:
        """`find_rate`: returns the learning rate of the step that is computed."""
        super().__init__(group, Rounded(torch.float32), True, bucket_bytes, rule)
        self._config = config
        self._find_rate = find_rate
        self._rate = 0.0
        """Learning rate of the last step; 0 before the first one."""
        self._num_steps = 0
        """Number of steps since the run began, skipped ones with them."""

    def gather(self) -> None:
        """Leave in `work` what this process has to send: momenta of its gradients that were not sent yet."""
        super().gather()
        self._follow_rate()
        torch.add(self._feedback, self._next_momentum, out=self._work)
        self._plan_step()
        self._num_steps += 1

    def _follow_rate(self) -> None:
        """Let what waits count as much as before, although the optimizer will multiply it by another rate."""
        rate = self._find_rate()
        if rate and self._rate not in (0.0, rate):  # also where this step is skipped, as the next one goes on from here
            self._feedback.mul_(self._rate / rate)
        self._rate = rate or self._rate

    def _plan_step(self) -> None:
        warmup, density = self._config.warmup_steps, self._config.density
        stage = NUM_WARMUP_STAGES if self._num_steps >= warmup else self._num_steps * NUM_WARMUP_STAGES // warmup
        self._density = density if stage == NUM_WARMUP_STAGES else max(density, FIRST_DENSITY ** (1 + stage))
        self._is_masking = stage >= NUM_WARMUP_STAGES - 1

    def exchange_bucket(self, start: int, end: int) -> Iterator[None]:
        """Sum the largest numbers of all processes; of each process its own, at places of its own."""
        work, sums, momentum = (vector[start:end] for vector in (self._work, self._sums, self._next_momentum))
        places = work.abs().topk(math.ceil(self._density * (end - start)), sorted=False).indices
        pairs = torch.stack([work[places].view(torch.int32), places.int()]).unsqueeze(0)
        work[places] = 0.0
        if self._is_masking:
            momentum[places] = 0.0
        received = pairs.new_empty(self._group.size(), *pairs.shape[1:])
        flight: Any = all_gather(received, pairs, group=self._group, async_op=True)
        yield
        flight.wait()
        sums.zero_()
        for values, others in received.unbind():  # in the order of the ranks: all come to the same sums
            sums.index_add_(0, others, values.view(torch.float32))

    def save(self) -> dict[str, Any]:
        """Return sums over processes of momenta and of what was not sent; number and rate of steps. Collective."""
        numbers = {"num_steps": torch.tensor(self._num_steps), "rate": torch.tensor(self._rate, dtype=torch.float64)}
        return super().save() | numbers

    def load(self, state: dict[str, Any]) -> None:
        """See `CompressedSums`."""
        super().load(state)
        self._num_steps, self._rate = int(state["num_steps"]), float(state["rate"])


class Votes(MomentumSums):
    """Sums of signs, which lose nothing on their way to their owners."""

    def __init__(self, group: dist.ProcessGroup, bucket_bytes: int, rule: LocalRule) -> None:
        super().__init__(group, Signs(), False, bucket_bytes, rule)

    def gather(self) -> None:
        """Leave in `work` this process's votes."""
        super().gather()
        momentum = self._next_momentum
        self._work.copy_(torch.where(momentum.isfinite(), momentum.sign(), torch.nan))
