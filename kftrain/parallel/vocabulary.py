"""A vocabulary of which each process has a part: looked up, and computed with as logits that are never whole.

The cross-entropy of logits that are split over the vocabulary needs three numbers a token of the other processes
instead of their logits (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the largest logit, the sum of the
exponentials, and the target's logit. It is not reduced, so that a task weights its terms as it likes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses

from kftrain.parallel.tensor_exchange import Peers, exchange


class SplitLogits(NamedTuple):
    """Logits `[..., vocabulary]` of which this process has a part. All that is asked of them is collective.

    A tuple, so that whatever looks for tensors in an output finds the part.
    """

    part: torch.Tensor
    """`[..., vocabulary / processes]`: the classes of this process."""
    peers: Peers

    def cross_entropy(self, targets: torch.Tensor) -> torch.Tensor:
        """In nats, fp32, of each of `targets` `[...]`; nothing is left out or summed up."""
        found: torch.Tensor = _CrossEntropy.apply(self.part.float(), targets, self.peers)  # type: ignore[no-untyped-call]
        return found

    def argmax(self) -> torch.Tensor:
        """The class of the largest logit, `[...]` int64; of equal ones the first."""
        largest, index = self.part.detach().float().max(dim=-1)
        everyones = self.peers.stacked(largest)
        indices = self.peers.stacked(index + self.peers.rank * self.part.shape[-1])
        return indices.gather(0, everyones.argmax(dim=0, keepdim=True)).squeeze(0)

    def whole(self) -> torch.Tensor:
        """All of them, for what each process computes alike."""
        peers = self.peers
        return exchange(self.part, lambda part: peers.gathered(part, -1), lambda whole: peers.own_part(whole, -1))


def look_up(tokens: torch.Tensor, weight: torch.Tensor, peers: Peers, padding: int | None = None) -> torch.Tensor:
    """Rows of `weight`, this process's part of a matrix, for its own among `tokens`; zeros for the others.

    The sum over the processes is what they are looked up for. `padding`: the token whose row has no gradient.
    """
    first = peers.rank * len(weight)
    local = tokens - first
    is_own = (local >= 0) & (local < len(weight))
    own_padding = padding - first if padding is not None and first <= padding < first + len(weight) else None
    found = F.embedding(local.where(is_own, 0), weight, padding_idx=own_padding)
    return found.masked_fill(~is_own.unsqueeze(-1), 0.0)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the probabilities of this process's classes, in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, peers: Peers) -> torch.Tensor:  # type: ignore[override]
        largest = peers.total(logits.max(dim=-1).values, dist.ReduceOp.MAX)
        shifted = logits - largest.unsqueeze(-1)
        local = targets - peers.rank * logits.shape[-1]
        is_own = (local >= 0) & (local < logits.shape[-1])
        local = local.where(is_own, 0).unsqueeze(-1)
        own_target = shifted.gather(-1, local).squeeze(-1).masked_fill(~is_own, 0.0)
        exponentials = shifted.exp_()
        total, target = peers.total(torch.stack((exponentials.sum(dim=-1), own_target))).unbind()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, is_own)
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        probabilities, local, is_own = ctx.saved_tensors
        found = probabilities * gradient.unsqueeze(-1)
        return found.scatter_add_(-1, local, -(gradient * is_own).unsqueeze(-1)), None, None
