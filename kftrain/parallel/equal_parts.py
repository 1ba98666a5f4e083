"""What the processes of the axis `tensor` must divide: without torch, so that it is asked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kftrain.errors import ConfigError

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
