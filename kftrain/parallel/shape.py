"""How many processes lie along each axis of the mesh, and where each of them stands: pure data, without torch.

A process has one coordinate on each axis. What it is to the others follows from that: those that differ only along
`DATA_AXES` read different samples, those that differ along any other read the same ones and share their work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from kftrain.errors import ConfigError

AXES = ("replicate", "shard", "context", "tensor", "pipeline", "expert")

DATA_AXES = ("replicate", "shard", "expert")
"""Along these each process has samples of its own; experts exchange rows, so that their processes do, too."""

LOSS_AXES = (*DATA_AXES, "context")
"""Along these each process has loss terms of its own; along the others the same ones."""

NORM_AXES = ("shard", "tensor", "pipeline", "expert")
"""Along these each process has gradients of its own; along the others the same ones, once they are reduced."""

_OUTERMOST_FIRST = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
"""Neighbours in the numbering stand on one node: what talks most is innermost."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the axes."""

    replicate: int = 1
    """Copies of the state, which the gradients are averaged over."""
    shard: int = 1
    """Processes that share one copy of parameters, gradients and optimizer state."""
    context: int = 1
    """Parts of a sequence."""
    tensor: int = 1
    """Parts of a matrix."""
    pipeline: int = 1
    """Stages of consecutive blocks."""
    expert: int = 1
    """Parts of the experts of a layer."""

    @property
    def size(self) -> int:
        """Processes in all."""
        return self._size_of(AXES)

    @property
    def num_data_ranks(self) -> int:
        """How many different batches there are at a time."""
        return self._size_of(DATA_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a process on each axis."""
        found = {}
        for axis in reversed(_OUTERMOST_FIRST):
            rank, found[axis] = divmod(rank, self._sizes[axis])
        return found

    def data_rank(self, rank: int) -> int:
        """Place among the processes that read different samples."""
        place, found = self.coordinates(rank), 0
        for axis in DATA_AXES:
            found = found * self._sizes[axis] + place[axis]
        return found

    def counts_loss(self, rank: int) -> bool:
        """Whether the process's loss terms are counted: of those that compute the same ones, one is."""
        return not any(place for axis, place in self.coordinates(rank).items() if axis not in LOSS_AXES)

    def groups(self, axes: Collection[str]) -> list[list[int]]:
        """All processes, those together that differ along these axes only."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            rest = tuple(place for axis, place in self.coordinates(rank).items() if axis not in axes)
            found.setdefault(rest, []).append(rank)
        return list(found.values())

    @property
    def _sizes(self) -> dict[str, int]:
        return asdict(self)

    def _size_of(self, axes: Collection[str]) -> int:
        return math.prod(self._sizes[axis] for axis in axes)


SEQUENCE_LENGTH = "sequence_length"
"""The size that is asked for with sequence parallelism only."""


def require_equal_sizes(sizes: Mapping[str, int], num_processes: int, sequence_parallel: bool) -> None:
    """Of a model: name of an option -> size. Raises ConfigError for the first that does not divide."""
    for name, size in sizes.items():
        if name != SEQUENCE_LENGTH:
            require_equal_parts(name, size, num_processes)
        elif sequence_parallel:
            require_equal_parts(name, size, num_processes, " or parallel.sequence_parallel: false")


def require_parts(name: str, size: int, count: int) -> None:
    """Raises ConfigError where the last of so many processes would have nothing, or one before it."""
    if -(-size // count) * (count - 1) >= size:
        raise ConfigError(
            f"is too few for {count} processes to have a part each, as parallel.tensor asks for",
            where=f"model {name}",
            value=size,
            fix=f"use a multiple of {count}, or a smaller parallel.tensor",
        )


def require_equal_parts(name: str, size: int, count: int, more: str = "") -> None:
    """Raises ConfigError with the numbers that would do."""
    if size % count:
        raise ConfigError(
            f"has no {count} equal parts, as parallel.tensor asks for",
            where=f"model {name}",
            value=size,
            fix=f"use a multiple of {count} such as {-(-size // count) * count}, or parallel.tensor: "
            f"{math.gcd(size, count)}{more}",
        )
