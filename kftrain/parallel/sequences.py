"""The part of a sequence that a process has, where several share it along the axis `context`.

A sequence is cut into twice as many chunks as there are processes; process r has chunks r and 2c - 1 - r. Under a
causal mask the places at the end attend to more than those at the front, and so all have the same work (Llama 3,
arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SequenceCut:
    """A process's place among those that share sequences."""

    size: int = 1
    place: int = 0

    def list_chunks(self, length: int) -> list[range]:
        """List the places of this process's two chunks in sequences of this length, which `2 * size` divides."""
        width = length // (2 * self.size)
        return [range(first * width, (first + 1) * width) for first in (self.place, 2 * self.size - 1 - self.place)]

    def take_part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's places along a dim; all of them where it shares with nobody."""
        if self.size == 1:
            return whole
        return torch.cat([whole.narrow(dim, at.start, len(at)) for at in self.list_chunks(whole.shape[dim])], dim)

    def cut_batch(self, batch: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return a batch with this process's places of the entries that have a sequence. `dims`: entry -> its dim."""
        if self.size == 1:
            return dict(batch)
        return {name: self.take_part(whole, dims[name]) if name in dims else whole for name, whole in batch.items()}

    def join_parts(self, parts: Any, dim: int) -> torch.Tensor:
        """Join the parts of all processes, `[size, *shape]`, along a dim of the shape, in the order of the sequence."""
        # First chunks come in the order of the processes, second ones in the reverse: see `list_chunks`.
        chunks = parts.movedim(0, dim).unflatten(dim + 1, (2, -1))
        heads, tails = chunks.select(dim + 1, 0), chunks.select(dim + 1, 1)
        joined: torch.Tensor = torch.cat([heads, tails.flip(dim)], dim).flatten(dim, dim + 1)
        return joined

    def view_parts(self, whole: Any, dim: int) -> torch.Tensor:
        """Return the parts of all processes, `[size, *shape]`: the inverse of `join_parts`."""
        heads, tails = whole.unflatten(dim, (2, self.size, -1)).unbind(dim)
        return torch.cat([heads.movedim(dim, 0), tails.flip(dim).movedim(dim, 0)], dim + 1)


WHOLE_SEQUENCES = SequenceCut()
"""The cut of a process that shares sequences with nobody."""
