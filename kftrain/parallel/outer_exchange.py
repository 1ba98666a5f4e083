"""Means over islands of one long vector, which travels in a configured form.

Islands are joined by links that are slow. So of an island with copies of its parameters (the axis `replicate`) each
copy sends its part of the vector to the same copy of the other islands, and the parts come together within the island.
Between islands a number travels twice, as in a ring: packed to the process that sums it, and the packed sum to all.
Sums are in the order of the islands, and all unpack the same bytes, so that all islands get the same bits.

What a number loses on its way is added to it the next time, both ways: see `compression/sums.py`.

`train/served_exchange.py` does the same through servers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from kftrain.parallel.compression.codecs import BLOCK_SIZE, make_codec
from kftrain.parallel.compression.sums import send_chunks, send_to_all
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.sharded import all_gather

PIECE_NUMBERS = 1 << 22
"""Most numbers that travel at a time, so that an exchange takes little memory."""


Share = tuple[torch.Tensor, float]
"""A mean, `[n]`, and the share of the islands that it is the mean of."""


@dataclass(frozen=True)
class Round:
    """An exchange of all islands, or of those that come in time."""

    number: int
    """Number of the round, from 1; an island leaves none out."""
    is_meeting: bool = True
    """True where all islands meet in it: nobody goes on without the others."""
    wants_meeting: bool = False
    """True where this island wants all to meet soon."""


class Feedback:
    """The part of the vector that each copy of an island's parameters sends, and what its numbers have lost."""

    def __init__(self, mesh: Mesh, encoding: str, num_numbers: int, unit: int, device: torch.device) -> None:
        """Begin with nothing lost. `unit`: the length of each part is a multiple of it."""
        self._num_copies = mesh.shape.replicate
        self._copy = mesh.shape.coordinates(mesh.world.rank)["replicate"]
        self._copies = mesh.group(["replicate"]) if self._num_copies > 1 else None
        self._num_numbers = num_numbers
        self._unit = unit
        length = num_numbers + -num_numbers % (unit * self._num_copies)
        self.has_feedback = encoding != "fp32"
        self._lost = torch.zeros(length // self._num_copies if self.has_feedback else 0, device=device)
        """Rounding errors of this process's part so far, which the next exchange adds."""

    def add_lost(self, vector: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a vector, with what it has lost, in memory of its own."""
        part = self._cut_part(vector)
        return part + self._lost if self.has_feedback else part.clone()

    def keep_lost(self, lost: torch.Tensor) -> None:
        """Keep what the part has lost this time."""
        if self.has_feedback:
            self._lost.copy_(lost)

    def list_lost(self) -> torch.Tensor:
        """Return what this island's vector has lost so far, `[n]`. Collective."""
        return self.join(self._lost)

    @torch.no_grad()
    def set_lost(self, lost: torch.Tensor) -> None:
        """Take over what `list_lost` has returned."""
        self._lost.copy_(self._cut_part(lost))

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Return the vector of which each copy has a part. Collective."""
        if self._copies is None:
            return part[: self._num_numbers]
        whole = part.new_empty(self._num_copies * len(part))
        all_gather(whole, part, group=self._copies)
        return whole[: self._num_numbers]

    def _cut_part(self, vector: torch.Tensor) -> torch.Tensor:
        filled = nn.functional.pad(vector, (0, -len(vector) % (self._unit * self._num_copies)))
        return filled.view(self._num_copies, -1)[self._copy]


class CollectiveExchange(Feedback):
    """An exchange among the processes of all islands, of one vector, `[n]`: another one along `shard`. All meet."""

    def __init__(self, mesh: Mesh, encoding: str, num_numbers: int, device: torch.device) -> None:
        self._across = mesh.group(["islands"])
        self._codec = make_codec(encoding)
        super().__init__(mesh, encoding, num_numbers, BLOCK_SIZE * self._across.size(), device)

    @torch.no_grad()
    def exchange(self, vector: torch.Tensor, number: Round) -> tuple[Iterable[Share], bool]:
        """Return the only mean to move by, that of all islands of a vector, `[n]` fp32, and True. Collective."""
        work = self.add_lost(vector)
        mean = torch.empty_like(work)
        step = max(1, PIECE_NUMBERS // self._unit) * self._unit
        for start in range(0, len(work), step):
            rows, means = (numbers[start : start + step].view(self._across.size(), -1) for numbers in (work, mean))
            self._average_rows(rows, means)
        self.keep_lost(work)
        return [(self.join(mean), 1.0)], True

    def _average_rows(self, rows: torch.Tensor, means: torch.Tensor) -> None:
        """Write to `means` the means over islands of `rows`, and leave in `rows` what they have lost."""
        total = send_chunks(rows, self._codec, self._across)()
        sums = send_to_all(total, self._codec, self._across)()
        rows[self._across.rank()] = total - sums[self._across.rank()]
        torch.div(sums, self._across.size(), out=means)
