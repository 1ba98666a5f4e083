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


def first_of_part(num_classes: int, peers: Peers) -> int:
    """Number of the first class of this process: all parts but the last are equal, as `torch.chunk` cuts them."""
    return peers.rank * -(-num_classes // peers.size)


class SplitLogits(NamedTuple):
    """Logits `[..., vocabulary]` of which this process has a part. All that is asked of them is collective.

    A tuple, so that whatever looks for tensors in an output finds the part.
    """

    part: torch.Tensor
    """`[..., vocabulary / processes]`: the classes of this process; the last one may have fewer."""
    peers: Peers
    num_classes: int
    """Of all processes."""

    def cross_entropy(self, targets: torch.Tensor) -> torch.Tensor:
        """In nats, fp32, of each of `targets` `[...]`; nothing is left out or summed up."""
        found: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            self.part.float(), targets, self.peers, first_of_part(self.num_classes, self.peers)
        )
        return found

    def argmax(self) -> torch.Tensor:
        """The class of the largest logit, `[...]` int64; of equal ones the first."""
        largest, index = self.part.detach().float().max(dim=-1)
        everyones = self.peers.stacked(largest)
        indices = self.peers.stacked(index + first_of_part(self.num_classes, self.peers))
        return indices.gather(0, everyones.argmax(dim=0, keepdim=True)).squeeze(0)

    def whole(self) -> torch.Tensor:
        """All of them, for what each process computes alike."""
        peers, num_classes = self.peers, self.num_classes
        first, count, each = first_of_part(num_classes, peers), self.part.shape[-1], -(-num_classes // peers.size)
        return exchange(
            self.part,
            lambda part: peers.gathered(F.pad(part, (0, each - count)), -1)[..., :num_classes].contiguous(),
            lambda whole: whole[..., first : first + count].contiguous(),
        )


def look_up(tokens: torch.Tensor, weight: torch.Tensor, first: int, padding: int | None = None) -> torch.Tensor:
    """Rows of `weight`, a part of a matrix from row `first` on, for its own among `tokens`; zeros for the others.

    The sum over the processes is what they are looked up for. `padding`: the token whose row has no gradient.
    """
    local = tokens - first
    is_own = (local >= 0) & (local < len(weight))
    own_padding = padding - first if padding is not None and first <= padding < first + len(weight) else None
    found = F.embedding(local.where(is_own, 0), weight, padding_idx=own_padding)
    return found.masked_fill(~is_own.unsqueeze(-1), 0.0)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the probabilities of this process's classes, in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, peers: Peers, first: int) -> torch.Tensor:  # type: ignore[override]
        largest = peers.total(logits.max(dim=-1).values, dist.ReduceOp.MAX)
        shifted = logits - largest.unsqueeze(-1)
        local = targets - first
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
        return found.scatter_add_(-1, local, -(gradient * is_own).unsqueeze(-1)), None, None, None
