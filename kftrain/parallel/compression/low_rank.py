"""Sums of gradients of low rank: of a matrix two narrow factors travel, and are summed.

PowerSGD (Vogels et al. 2019, arXiv:1905.13727): of a matrix M, with what was lost before, and the factor Q of the step
before, P = M Q is summed over processes and made orthonormal. Then Q = M^T P is summed, and P Q^T is applied; a process
keeps what its own M differs from its share of that. Sums of factors are factors of the sum, so a ring adds them up.
What is no matrix, or a smaller one than its factors, is summed in fp32.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
import torch.distributed as dist

from kftrain.parallel.compression.codecs import Rounded
from kftrain.parallel.compression.sums import CompressedSums

SEED = 0
"""Seed of the first factors, which all processes draw alike."""


class LowRankSums(CompressedSums):
    """Sums by factors of matrices; the rows of a tensor of more dims are those of its first one."""

    def __init__(self, group: dist.ProcessGroup, rank: int, bucket_bytes: int) -> None:
        super().__init__(group, Rounded(torch.float32), True, bucket_bytes)
        self._rank = rank
        self._factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Name of a matrix -> its Q, `[columns, rank]`, the same on all processes; and the next, if a step counts."""

    def lay_out(self, length: int, device: torch.device) -> None:
        """See `CompressedSums`."""
        super().lay_out(length, device)
        generator = torch.Generator().manual_seed(SEED)
        for name, parameter in self._parameters.items():
            rows, columns = parameter.flatten(1).shape if parameter.dim() > 1 else (0, 0)
            if self._rank * (rows + columns) < rows * columns:
                drawn = torch.randn(columns, self._rank, generator=generator).to(device)
                self._factors[name] = drawn, drawn.clone()
                self._changes.append(self._factors[name])

    def exchange_bucket(self, start: int, end: int) -> Iterator[None]:
        """See `CompressedSums`."""
        names = [name for name, place in self._starts.items() if start <= place < end]
        works = {name: self._view(self._work, name) for name in names}
        matrices = {name: works[name].flatten(1) for name in names if name in self._factors}
        products = {name: matrix @ self._factors[name][0] for name, matrix in matrices.items()}
        received = yield from self._sum_all(works | products)
        lefts = {name: torch.linalg.qr(received[name]).Q for name in matrices}
        rights = yield from self._sum_all({name: matrix.T @ lefts[name] for name, matrix in matrices.items()})
        for name, right in rights.items():
            self._factors[name][1].copy_(right)
        for name, work in works.items():
            total = received[name] if name not in matrices else (lefts[name] @ rights[name].T).view(work.shape)
            self._view(self._sums, name).copy_(total)
            work.sub_(total, alpha=1 / self._group.size()) if name in matrices else work.zero_()

    def _sum_all(self, tensors: dict[str, torch.Tensor]) -> Generator[None, None, dict[str, torch.Tensor]]:
        """Sum tensors over processes, all at once. Stops while they are on their way."""
        flat = torch.cat([self._sums[:0], *(tensor.reshape(-1) for tensor in tensors.values())])
        flight: Any = dist.all_reduce(flat, group=self._group, async_op=True)
        yield
        flight.wait()
        parts = torch.split(flat, [tensor.numel() for tensor in tensors.values()])
        return {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}

    def save(self) -> dict[str, Any]:
        """Return what is kept, summed over processes, and the factors. Collective."""
        return super().save() | {"factors": {name: factor for name, (factor, _) in self._factors.items()}}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """See `CompressedSums`."""
        super().load(state)
        for name, (factor, _) in self._factors.items():
            factor.copy_(state["factors"][name])
