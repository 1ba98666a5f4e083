"""Numbers the processes of a job by the nodes and racks on which they stand: pure data.

A mesh numbers its processes so that those which talk most are neighbours (`shape.py`). That helps where neighbours
stand on one node, and neighbouring nodes in one rack; so processes are numbered anew once all know where all stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kftrain.parallel.shape import Shape
from kftrain.process.machine import NODE_NAME_ENV, RACK_ENV


@dataclass(frozen=True)
class Site:
    """The node and the rack that one process runs in."""

    node: str
    rack: str = ""
    """Empty where the launcher does not know it."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Site:
        """Read the site from a process's environment: torchrun's variables, and those that a launcher adds."""
        node = environment.get(NODE_NAME_ENV) or f"node {environment.get('GROUP_RANK', '0')}"
        return cls(node, environment.get(RACK_ENV, ""))


def order_by_site(places: Sequence[Site]) -> list[int]:
    """List the processes by their new numbers: those of a rack are neighbours, and in it those of a node.

    Racks and nodes come in the order of their first processes, and the first process stays the first.
    """
    racks = {place.rack: rank for rank, place in reversed(list(enumerate(places)))}
    nodes = {(place.rack, place.node): rank for rank, place in reversed(list(enumerate(places)))}
    return sorted(
        range(len(places)),
        key=lambda rank: (racks[places[rank].rack], nodes[places[rank].rack, places[rank].node], rank),
    )


def count_equal_nodes(places: Sequence[Site]) -> int:
    """Count the nodes if there are several, with several processes each and equally many; else return 1."""
    sizes = Counter(places)
    return len(sizes) if len(set(sizes.values())) == 1 and 1 < len(sizes) < len(places) else 1


def describe_axes_across_nodes(shape: Shape, places: Sequence[Site]) -> list[str]:
    """Return a line for each axis that belongs inside a node and leaves it. `places`: empty for a single node.

    `context` and `tensor` belong inside a node, and so does `shard` where there are several copies of the state.
    """
    talkative = [axis for axis in ("context", "tensor") if getattr(shape, axis) > 1]
    inner = [*talkative, *(["shard"] if min(shape.shard, shape.replicate) > 1 else [])]
    lines = []
    for axis in inner if places else []:
        groups = [{places[rank] for rank in ranks} for ranks in shape.groups([axis])]
        apart = [group for group in groups if len(group) > 1]
        if apart:
            is_in_racks = any(len({site.rack for site in group}) > 1 for group in apart)
            where = "several racks" if is_in_racks else "several nodes"
            lines.append(
                f"parallel.{axis} {getattr(shape, axis)}: {len(apart)} of {len(groups)} groups stand on {where}; "
                "the processes of a node must be a multiple of it"
            )
    return lines
