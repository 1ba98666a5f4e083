"""What waiting for data costs: the numbers of the loaders of all processes, for log and tracker."""

from __future__ import annotations

from dataclasses import replace

from kftrain.data.loader import Counters
from kftrain.parallel.world import World


class DataMetrics:
    """Of one attempt, from one recorded point to the next."""

    def __init__(self, counters: Counters, world: World) -> None:
        """`counters`: of this process's loader, which goes on counting."""
        self._counters = counters
        self._world = world
        self._last = replace(counters)

    def since_last(self) -> dict[str, float]:
        """What was measured since the call before. Collective.

        `data_stall_seconds`: how long a training thread has waited, the mean over the processes.
        `data_decode_seconds`: of reading and decoding, over all workers. `data_bytes`: read, as they are stored.
        `data_queue_depth`: steps that were ready when one was taken, the mean.
        """
        now, before = replace(self._counters), self._last
        self._last = now
        stall, seconds, num_bytes, ready, steps = self._world.sum(
            [
                now.stall_seconds - before.stall_seconds,
                now.decode_seconds - before.decode_seconds,
                now.num_bytes - before.num_bytes,
                now.ready_steps - before.ready_steps,
                now.num_steps - before.num_steps,
            ]
        )
        return {
            "data_stall_seconds": stall / self._world.size,
            "data_decode_seconds": seconds,
            "data_bytes": num_bytes,
            "data_queue_depth": ready / max(steps, 1.0),
        }
