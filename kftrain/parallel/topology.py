"""Where the processes of a job stand, and the order in which they are numbered for it: pure data.

A mesh numbers its processes so that those which talk most are neighbours (`shape.py`). That helps where neighbours
stand on one node, and neighbouring nodes in one rack; so processes are numbered anew once all know where all stand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kftrain.parallel.shape import Shape
from kftrain.process.machine import NODE_NAME_ENV, RACK_ENV


@dataclass(frozen=True)
class Site:
    """Of one process."""

    node: str
    rack: str = ""
    """Empty where nobody has told."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Site:
        """Of the process that has this environment: torchrun's, and what a launcher adds to it."""
        node = environment.get(NODE_NAME_ENV) or f"node {environment.get('GROUP_RANK', '0')}"
        return cls(node, environment.get(RACK_ENV, ""))


def order_of(places: Sequence[Site]) -> list[int]:
    """The processes by their new numbers: those of a rack are neighbours, and in it those of a node.

    Racks and nodes come in the order of their first processes, and the first process stays the first.
    """
    racks = {place.rack: rank for rank, place in reversed(list(enumerate(places)))}
    nodes = {(place.rack, place.node): rank for rank, place in reversed(list(enumerate(places)))}
    return sorted(
        range(len(places)),
        key=lambda rank: (racks[places[rank].rack], nodes[places[rank].rack, places[rank].node], rank),
    )


def is_apart(shape: Shape, places: Sequence[Site], axes: Collection[str]) -> tuple[int, int]:
    """How many of the groups along these axes have processes on several nodes, and in several racks."""
    groups = shape.groups(axes)
    nodes = [{(places[rank].rack, places[rank].node) for rank in group} for group in groups]
    racks = [{places[rank].rack for rank in group} for group in groups]
    return sum(len(each) > 1 for each in nodes), sum(len(each) > 1 for each in racks)


def contradictions(shape: Shape, places: Sequence[Site], bytes_sent: Mapping[str, float]) -> list[str]:
    """What of a mesh the machines are not made for, and what it costs: a line for each axis that leaves its nodes.

    `tensor` belongs inside a node, and so does `shard` where there are several copies of the state. `bytes_sent`: along
    an axis, by a process in a step; an axis that is not in it has no number.
    """
    inner = [*(["tensor"] if shape.tensor > 1 else []), *(["shard"] if min(shape.shard, shape.replicate) > 1 else [])]
    lines = []
    for axis in inner:
        apart, in_racks = is_apart(shape, places, [axis])
        if apart:
            where = "several racks" if in_racks else "several nodes"
            cost = f"{bytes_sent[axis] / 1e6:,.1f} MB" if bytes_sent.get(axis) else "activations of each block"
            num_groups = len(shape.groups([axis]))
            lines.append(
                f"parallel.{axis} {getattr(shape, axis)}: {apart} of {num_groups} groups stand on {where}, and each of "
                f"their processes sends {cost} a step along it; the processes of a node must be a multiple of it"
            )
    return lines
