"""Means over islands of one long vector, which travels in a configured form.

Islands are joined by links that are slow. So of an island with copies of its parameters (the axis `replicate`) each
copy sends its part of the vector to the same copy of the other islands, and the parts come together within the island.
Between islands a number travels twice, as in a ring: packed to the process that sums it, and the packed sum to all.
Sums are in the order of the islands, and all unpack the same bytes, so that all islands get the same bits.

What a number loses on its way is added to it the next time, both ways: see `compression/sums.py`.
"""

from __future__ import annotations

import torch
from torch import nn

from kftrain.parallel.compression.codecs import BLOCK_SIZE, make_codec
from kftrain.parallel.compression.sums import send_chunks, send_to_all
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.sharded import all_gather

PIECE_NUMBERS = 1 << 22
"""Most numbers that travel at a time, so that an exchange takes little memory."""


class OuterExchange:
    """Exchanges of one vector, `[n]`, of which each process of an island along `shard` has another one."""

    def __init__(self, mesh: Mesh, encoding: str, num_numbers: int, device: torch.device) -> None:
        self._across = mesh.group(["islands"])
        self._num_copies = mesh.shape.replicate
        self._copy = mesh.shape.coordinates(mesh.world.rank)["replicate"]
        self._copies = mesh.group(["replicate"]) if self._num_copies > 1 else None
        self._codec = make_codec(encoding)
        self._num_numbers = num_numbers
        self._unit = BLOCK_SIZE * self._across.size()
        length = num_numbers + -num_numbers % (self._unit * self._num_copies)
        self.has_feedback = encoding != "fp32"
        self._lost = torch.zeros(length // self._num_copies if self.has_feedback else 0, device=device)
        """Rounding errors of this process's part so far, which the next exchange adds."""

    @torch.no_grad()
    def average(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the mean over the islands of a vector, `[n]` fp32. Collective."""
        part = self._cut_part(vector)
        work = part + self._lost if self.has_feedback else part.clone()
        mean = torch.empty_like(work)
        step = max(1, PIECE_NUMBERS // self._unit) * self._unit
        for start in range(0, len(work), step):
            rows, means = (numbers[start : start + step].view(self._across.size(), -1) for numbers in (work, mean))
            self._average_rows(rows, means)
        if self.has_feedback:
            self._lost.copy_(work)
        return self._join(mean)

    def _average_rows(self, rows: torch.Tensor, means: torch.Tensor) -> None:
        """Write to `means` the means over islands of `rows`, and leave in `rows` what they have lost."""
        total = send_chunks(rows, self._codec, self._across)()
        sums = send_to_all(total, self._codec, self._across)()
        rows[self._across.rank()] = total - sums[self._across.rank()]
        torch.div(sums, self._across.size(), out=means)

    def list_lost(self) -> torch.Tensor:
        """Return what this island's vector has lost so far, `[n]`. Collective."""
        return self._join(self._lost)

    @torch.no_grad()
    def set_lost(self, lost: torch.Tensor) -> None:
        """Take over what `list_lost` has returned."""
        self._lost.copy_(self._cut_part(lost))

    def _cut_part(self, vector: torch.Tensor) -> torch.Tensor:
        filled = nn.functional.pad(vector, (0, -len(vector) % (self._unit * self._num_copies)))
        return filled.view(self._num_copies, -1)[self._copy]

    def _join(self, part: torch.Tensor) -> torch.Tensor:
        """Return the vector of which each copy has a part."""
        if self._copies is None:
            return part[: self._num_numbers]
        whole = part.new_empty(self._num_copies * len(part))
        all_gather(whole, part, group=self._copies)
        return whole[: self._num_numbers]
