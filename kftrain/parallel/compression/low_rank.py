"""Sums of gradients of low rank: of a matrix two narrow factors travel, and are summed.

PowerSGD (Vogels et al. 2019, arXiv:1905.13727), as torch's hook has it: of a matrix M, with what was lost before, and
the factor Q of the step before, P = M Q is summed over processes and made orthonormal. Then Q = M^T P is summed, and
P Q^T is applied; a process keeps what its own M differs from its share of that. Sums of factors are factors of the sum,
so a ring adds them up. What is no matrix, or a smaller one than its factors, is summed in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kftrain.parallel.compression.codecs import Rounded
from kftrain.parallel.compression.sums import CompressedSums
from kftrain.parallel.settings import ParallelConfig

SEED = 0
"""Seed of the first factors, which all processes draw alike."""


class LowRankSums(CompressedSums):
    """Sums by factors of matrices; a tensor of more dims is a matrix of its first one."""

    def __init__(self, group: dist.ProcessGroup, parallel: ParallelConfig) -> None:
        compression = parallel.compression
        super().__init__(group, Rounded(torch.float32), compression.feedback, parallel.bucket_bytes)
        self._rank = compression.rank

    def lay_out(self, length: int, device: torch.device) -> None:
        """See `CompressedSums`."""
        super().lay_out(length, device)
        generator = torch.Generator().manual_seed(SEED)
        self._factors: dict[str, torch.Tensor] = {}
        """Name of a matrix -> its Q, `[columns, rank]`."""
        for name, parameter in self._parameters.items():
            rows, columns = (parameter.shape[0], parameter[0].numel()) if parameter.dim() > 1 else (0, 0)
            if self._rank * (rows + columns) < rows * columns:
                drawn = torch.linalg.qr(torch.randn(columns, self._rank, generator=generator)).Q
                self._factors[name] = drawn.to(device)
        self._next_factors = self._factors

    @torch.no_grad()
    def exchange(self) -> None:
        """See `CompressedSums`."""
        self.take_gradients()
        size = self._group.size()
        if size == 1:  # nothing travels, and nothing is lost
            self._sums.copy_(self._work)
            self._work.zero_()
            return
        matrices = {name: self._view(self._work, name).flatten(1) for name in self._factors}
        others = [self._view(self._work, name) for name in self._parameters if name not in self._factors]
        lefts = self._sum_all([matrix @ self._factors[name] for name, matrix in matrices.items()] + others)
        lefts, dense = lefts[: len(matrices)], iter(lefts[len(matrices) :])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = self._sum_all([matrix.T @ left for matrix, left in zip(matrices.values(), lefts, strict=True)])
        self._next_factors = dict(zip(matrices, rights, strict=True))
        products = {name: left @ right.T for name, left, right in zip(matrices, lefts, rights, strict=True)}
        for name in self._parameters:
            is_dense, sums, work = name not in products, self._view(self._sums, name), self._view(self._work, name)
            sums.copy_(next(dense) if is_dense else products[name].view_as(sums))
            work.zero_() if is_dense else work.sub_(sums, alpha=1 / size)

    def _sum_all(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sum tensors over processes, all at once. Collective."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else self._sums.new_zeros(0)
        dist.all_reduce(flat, group=self._group)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def settle(self, found_inf: torch.Tensor) -> None:
        """See `CompressedSums`."""
        super().settle(found_inf)
        pairs = ((name, self._factors[name], self._next_factors[name]) for name in self._factors)
        self._factors = {name: torch.where(found_inf > 0, old, new) for name, old, new in pairs}

    @property
    def has_state(self) -> bool:
        """See `CompressedSums`."""
        return True

    def save(self) -> dict[str, Any]:
        """Return the factors, beside what `CompressedSums` returns. Collective."""
        return {"factors": self._factors, "lost": self.sum_up(self._feedback) if self._has_feedback else {}}

    def load(self, state: dict[str, Any]) -> None:
        """See `CompressedSums`."""
        if self._has_feedback:
            super().load(state)
        self._factors = {name: factor.clone() for name, factor in state["factors"].items()}
