"""Signs of momenta, by majority: Signum (Bernstein et al. 2018, arXiv:1810.05165, algorithm 1).

A process sends the signs of its momenta to their owners, which count them, and send out the sign of the sum. A number
that is 0, such as that of a word that did not occur yet, has no vote, and a tie is 0; so a sign takes two bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from kftrain.parallel.compression.momenta import LocalRule, MomentumSums

NO_NUMBER = 3
"""Code of what is not finite; the others are the sign, and 1."""


class Signs:
    """Signs in two bits each."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Codec`; the length of a row is a multiple of four."""
        codes = torch.where(rows.isfinite(), rows.sign() + 1, NO_NUMBER).to(torch.uint8).view(len(rows), -1, 4)
        first, second, third, fourth = codes.unbind(2)
        return first | second << 2 | third << 4 | fourth << 6

    def unpack(self, packed: torch.Tensor, num_numbers: int) -> torch.Tensor:
        """See `Codec`."""
        codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 2).view(len(packed), -1)
        return torch.where(codes == NO_NUMBER, torch.nan, codes.float() - 1)


class Votes(MomentumSums):
    """Sums of signs, which lose nothing on their way to their owners."""

    def __init__(self, group: dist.ProcessGroup, bucket_bytes: int, rule: LocalRule) -> None:
        super().__init__(group, Signs(), False, bucket_bytes, rule)

    def gather(self) -> None:
        """Leave in `work` this process's votes."""
        super().gather()
        momentum = self._next_momentum
        self._work.copy_(torch.where(momentum.isfinite(), momentum.sign(), torch.nan))
