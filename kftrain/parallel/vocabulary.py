"""A vocabulary of which each process has a part: looked up, and computed with as logits that are never whole.

The cross-entropy of logits that are split over the vocabulary needs three numbers a token of the other processes
instead of their logits (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the largest logit, the sum of the
exponentials, and the target's logit. It is not reduced over tokens, so that a task weights its terms as it likes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses

from kftrain.parallel.tensor_exchange import Peers, exchange


def find_first_class(num_classes: int, peers: Peers) -> int:
    """Return the number of this process's first class: all parts but the last are equal, as `torch.chunk` cuts them."""
    return peers.rank * -(-num_classes // peers.size)


class SplitLogits(NamedTuple):
    """Logits `[..., vocabulary]` of which this process has a part. All that is asked of them is collective.

    A tuple, so that whatever looks for tensors in an output finds the part.
    """

    part: torch.Tensor
    """`[..., vocabulary / processes]`: the classes of this process; the last one may have fewer."""
    peers: Peers
    num_classes: int
    """Number of classes of the whole vocabulary."""

    def cross_entropy(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each of `targets` `[...]`, in nats and fp32; nothing is left out or summed up."""
        losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            self.part.float(), targets, self.peers, find_first_class(self.num_classes, self.peers)
        )
        return losses

    def sum_cross_entropy(self, targets: torch.Tensor, ignored: int) -> torch.Tensor:
        """Return the sum of the losses of those `targets` `[...]` that are not `ignored`."""
        # The terms of the others are computed, too, and left out of the sum.
        return self.cross_entropy(targets).masked_fill(targets == ignored, 0.0).sum()

    def score(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each of `targets` `[...]`, and the class of the largest logit."""
        return self.cross_entropy(targets), self.argmax()

    def argmax(self) -> torch.Tensor:
        """Return the class of the largest logit, `[...]` int64; of equal ones the first."""
        largest, index = self.part.detach().float().max(dim=-1)
        everyones = self.peers.stack_parts(largest)
        indices = self.peers.stack_parts(index + find_first_class(self.num_classes, self.peers))
        # Of equal logits argmax takes the lowest rank, which has the lower classes: as on one process.
        return indices.gather(0, everyones.argmax(dim=0, keepdim=True)).squeeze(0)

    def whole(self) -> torch.Tensor:
        """Gather all logits, `[..., vocabulary]`, for what each process computes alike."""
        peers, num_classes = self.peers, self.num_classes
        first, count, width = find_first_class(num_classes, peers), self.part.shape[-1], -(-num_classes // peers.size)
        return exchange(
            self.part,
            # Only equal parts can be gathered: the last is padded, and the padding, which comes last, is cut off.
            lambda part: peers.join_parts(F.pad(part, (0, width - count)), -1)[..., :num_classes].contiguous(),
            # All have the same gradient of the whole, so each takes its own part of it; a sum would count it often.
            lambda whole: whole[..., first : first + count].contiguous(),
        )


def look_up(tokens: torch.Tensor, weight: torch.Tensor, first: int, padding: int | None = None) -> torch.Tensor:
    """Look up the tokens whose rows this process has; the others become zeros, so that the sum over all is the lookup.

    Args:
        tokens: `[...]`, numbers in the whole vocabulary.
        weight: This process's part of the matrix, from row `first` on.
        first: Number of its first row.
        padding: The token whose row gets no gradient, if any.
    """
    local = tokens - first
    is_own = (local >= 0) & (local < len(weight))
    own_padding = padding - first if padding is not None and first <= padding < first + len(weight) else None
    # Tokens of others look up row 0, since an index must be in range; the mask takes the value and the gradient of it.
    rows = F.embedding(local.where(is_own, 0), weight, padding_idx=own_padding)
    return rows.masked_fill(~is_own.unsqueeze(-1), 0.0)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy over split classes: keeps the probabilities of this process's classes, in fp32, for the gradient.

    A function of its own, because autograd does not see through the exchanges, and would keep several tensors as large
    as the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, peers: Peers, first: int) -> torch.Tensor:
        # The largest logit of all processes, so that all exponentials are shifted alike and none overflows.
        largest = peers.sum_over_all(logits.max(dim=-1).values, dist.ReduceOp.MAX)
        shifted = logits - largest.unsqueeze(-1)
        local = targets - first
        is_own = (local >= 0) & (local < logits.shape[-1])
        local = local.where(is_own, 0).unsqueeze(-1)
        own_target = shifted.gather(-1, local).squeeze(-1).masked_fill(~is_own, 0.0)
        exponentials = shifted.exp_()  # in place: the target's logit is read before; one process has it, the others 0
        total, target = peers.sum_over_all(torch.stack((exponentials.sum(dim=-1), own_target))).unbind()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, is_own)
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # Probabilities less one at the target. A target of another process stands for class 0 here and subtracts 0.
        # Nothing is exchanged: a process's logits need no others' gradients, and all have the same `gradient`.
        probabilities, local, is_own = ctx.saved_tensors
        result = probabilities * gradient.unsqueeze(-1)
        return result.scatter_add_(-1, local, -(gradient * is_own).unsqueeze(-1)), None, None, None
