"""The axes of the mesh: their sizes, the place of each process on them, and the parts that they cut. Without torch.

A process has one coordinate on each axis. What it is to the others follows from that: those that differ only along
`DATA_AXES` read different samples, those that differ along any other read the same ones and share their work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kftrain.errors import ConfigError

AXES = ("replicate", "shard", "context", "tensor", "pipeline", "expert", "islands")

DATA_AXES = ("islands", "replicate", "shard", "expert")
"""Along these each process has samples of its own; experts exchange rows, so that their processes do, too."""

LOSS_AXES = (*DATA_AXES, "context")
"""Along these each process has loss terms of its own; along the others the same ones."""

SHARD_AXES = ("shard", "expert", "context")
"""Along these a strategy that shards cuts what all processes compute with; they are neighbours in the numbering."""

NORM_AXES = (*SHARD_AXES, "tensor", "pipeline")
"""Along these each process has gradients of its own; along the others the same ones, once they are reduced."""

_OUTERMOST_FIRST = ("islands", "pipeline", "replicate", "shard", "expert", "context", "tensor")
"""Neighbours in the numbering stand on one node: what talks most is innermost."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the axes: numbers of processes."""

    replicate: int = 1
    """Copies of the state, over which gradients are summed."""
    shard: int = 1
    """Processes that share one copy of parameters, gradients and optimizer state."""
    context: int = 1
    """Processes that share one sequence."""
    tensor: int = 1
    """Processes that have a part of each split matrix."""
    pipeline: int = 1
    """Stages of consecutive blocks, one after the other."""
    expert: int = 1
    """Processes that have some of the experts of a layer."""
    islands: int = 1
    """Groups of processes that train alone, and exchange outer gradients every so many steps."""

    @property
    def size(self) -> int:
        """Number of processes in all."""
        return self._size_of(AXES)

    @property
    def island_size(self) -> int:
        """Number of processes of an island; all of them where there are no islands."""
        return self.size // self.islands

    @property
    def num_data_ranks(self) -> int:
        """Number of different batches at a time."""
        return self._size_of(DATA_AXES)

    @property
    def num_shards(self) -> int:
        """Number of processes that share one copy of what no expert and no stage has for itself."""
        return self._size_of(SHARD_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a process on each axis."""
        places = {}
        for axis in reversed(_OUTERMOST_FIRST):  # as digits of a number: the innermost axis counts fastest
            rank, places[axis] = divmod(rank, self._sizes[axis])
        return places

    def data_rank(self, rank: int) -> int:
        """Return a process's place among those that read different samples."""
        # By the data axes alone: those that differ along other axes have the same number, and so the same samples.
        places, data_rank = self.coordinates(rank), 0
        for axis in DATA_AXES:
            data_rank = data_rank * self._sizes[axis] + places[axis]
        return data_rank

    def counts_loss(self, rank: int) -> bool:
        """Tell whether a process's loss terms count: of several that compute the same ones, the first one's do."""
        return not any(place for axis, place in self.coordinates(rank).items() if axis not in LOSS_AXES)

    def counts_buffers(self, rank: int) -> bool:
        """Tell whether a process adds to buffers that are sums: of several with the same stage and places, one does."""
        return not any(place for axis, place in self.coordinates(rank).items() if axis not in (*LOSS_AXES, "pipeline"))

    def counts_rows(self, rank: int) -> bool:
        """Tell whether a process's rows count: of several that read the same ones, the first one's do."""
        return not any(place for axis, place in self.coordinates(rank).items() if axis not in DATA_AXES)

    def groups(self, axes: Collection[str]) -> list[list[int]]:
        """List the groups of processes that differ along these axes only; together they are all processes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            rest = tuple(place for axis, place in self.coordinates(rank).items() if axis not in axes)
            groups.setdefault(rest, []).append(rank)
        return list(groups.values())

    @property
    def _sizes(self) -> dict[str, int]:
        return vars(self)

    def _size_of(self, axes: Collection[str]) -> int:
        return math.prod(self._sizes[axis] for axis in axes)


SEQUENCE_LENGTH = "sequence_length"
"""Name of the size that must divide with sequence parallelism only."""


def require_equal_sizes(sizes: Mapping[str, int], num_processes: int, sequence_parallel: bool) -> None:
    """Raises ConfigError for the first size of a model that does not divide. `sizes`: name of an option -> size."""
    for name, size in sizes.items():
        if name != SEQUENCE_LENGTH:
            require_equal_parts(name, size, num_processes)
        elif sequence_parallel:
            require_equal_parts(name, size, num_processes, " or parallel.sequence_parallel: false")


def require_chunks(length: int, context: int, parts_of_each: int = 1) -> int:
    """Return what must divide the length of a sequence that `context` processes share.

    Raises ConfigError, which names numbers that would do, where it does not.

    `parts_of_each`: number of equal parts that each one's places must have besides.
    """
    multiple = math.lcm(2 * context, context * parts_of_each)  # two chunks for each process
    fitting = -(-length // multiple) * multiple
    if length % multiple:
        raise ConfigError(
            f"cannot be cut for {context} processes, as parallel.context asks for",
            where=f"model {SEQUENCE_LENGTH}",
            value=length,
            fix=f"use a multiple of {multiple} such as {fitting}, or another parallel.context",
        )
    return multiple


def require_parts(name: str, size: int, count: int) -> None:
    """Raises ConfigError where the last of `count` processes, or one before it, would have nothing."""
    # Cut as torch.chunk cuts: all parts but the last are equal, rounded up.
    if -(-size // count) * (count - 1) >= size:
        raise ConfigError(
            f"is too few for {count} processes to have a part each, as parallel.tensor asks for",
            where=f"model {name}",
            value=size,
            fix=f"use a multiple of {count}, or a smaller parallel.tensor",
        )


def require_equal_parts(name: str, size: int, count: int, more: str = "", axis: str = "tensor") -> None:
    """Raises ConfigError, which names numbers that would do, where `count` does not divide `size`."""
    if size % count:
        raise ConfigError(
            f"has no {count} equal parts, as parallel.{axis} asks for",
            where=f"model {name}",
            value=size,
            fix=f"use a multiple of {count} such as {-(-size // count) * count}, or parallel.{axis}: "
            f"{math.gcd(size, count)}{more}",
        )
