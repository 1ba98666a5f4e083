"""The layout of the processes: which samples this one reads, and with whom it shares what.

Only the mesh answers how many different batches there are; `World` is the operating system's view.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kftrain.parallel.sequences import SequenceCut
from kftrain.parallel.shape import AXES, NORM_AXES, SHARD_AXES, Shape
from kftrain.parallel.world import World


class Mesh:
    """This process's place among all of them."""

    def __init__(self, shape: Shape, world: World) -> None:
        assert shape.size == world.size, (shape, world.size)
        self.shape = shape
        self.world = world
        self.num_data_ranks = shape.num_data_ranks
        """Number of different batches at a time."""
        self.data_rank = shape.data_rank(world.rank)
        """Place among the processes that read different samples."""
        self.counts_loss = shape.counts_loss(world.rank)
        """True where this process's loss terms count; where several compute the same ones, those of one do."""
        self.sequence_cut = SequenceCut(shape.context, shape.coordinates(world.rank)["context"])
        """The places of each sequence that this process computes."""
        self.counts_buffers = shape.counts_buffers(world.rank)
        """True where this process's changes of buffers count; where several make the same ones, those of one do."""
        self.counts_rows = shape.counts_rows(world.rank)
        """True where this process's rows count; where several read the same ones, those of one do."""
        self._groups: dict[frozenset[str], dist.ProcessGroup] = {}
        self._device_meshes: dict[tuple[str, ...], DeviceMesh] = {}

    @classmethod
    def of_copies(cls, world: World) -> Mesh:
        """Build the mesh in which each process has the whole model, and samples of its own."""
        return cls(Shape(replicate=world.size), world)

    def sum_of_losses(self, values: list[float]) -> list[float]:
        """Sum over all processes what belongs to loss terms, each term once. Collective."""
        return self.world.sum(values if self.counts_loss else [0.0] * len(values))

    @property
    def island(self) -> int:
        """Number of this process's island."""
        return self.shape.coordinates(self.world.rank)["islands"]

    def sum_both(self, of_island: list[float], of_all: list[float]) -> tuple[list[float], list[float]]:
        """Sum some values over the processes of this island, and others over all processes. Collective.

        Over this island alone where there are no others.
        """
        if self.shape.islands == 1:  # one exchange for both
            sums = self.world.sum([*of_island, *of_all])
            return sums[: len(of_island)], sums[len(of_island) :]
        own = torch.tensor(of_island, dtype=torch.float64)
        dist.all_reduce(own, group=self.group([axis for axis in AXES if axis != "islands"]))
        return own.tolist(), self.world.sum(of_all) if of_all else []

    def norm_group(self) -> dist.ProcessGroup | None:
        """Return the group of the processes with different parts of the gradients; None where this one has all."""
        return self.group(NORM_AXES) if any(getattr(self.shape, axis) > 1 for axis in NORM_AXES) else None

    def group(self, axes: Collection[str]) -> dist.ProcessGroup:
        """Return the group of the processes that differ from this one along these axes only. Collective at first.

        Groups are made by hand, since those of torch's own meshes forget the timeout.
        """
        # Axes of size 1 are left out of the key, so that equal groups are one: each has connections of its own.
        key = frozenset(axis for axis in axes if getattr(self.shape, axis) > 1)
        if key not in self._groups:
            own = next(ranks for ranks in self.shape.groups(key) if self.world.rank in ranks)
            group: dist.ProcessGroup | None = dist.group.WORLD
            if len(own) < self.world.size:
                # By its members alone: others make groups of their own meanwhile, or none.
                group = dist.new_group(own, timeout=self.world.timeout, use_local_synchronization=True)
            assert group is not None
            self._groups[key] = group
        return self._groups[key]

    def own_group(self, axes: Collection[str]) -> dist.ProcessGroup:
        """Return a new group of the processes that `group` returns, for what others' exchanges must not hold up.

        Collective.
        """
        ranks = dist.get_process_group_ranks(self.group(axes))
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=self.world.timeout, use_local_synchronization=True)
        return group

    def device_mesh(self) -> DeviceMesh:
        """Return the axes `replicate` and `shard`, and `tensor` where there is one, of this process's stage.

        It is torch's own mesh, and one object: what is spread along an axis must know the others. Its `shard` holds all
        of `SHARD_AXES`, with `context` innermost. Collective when first asked.
        """
        # With both data axes, even if they have size 1: FSDP asks for them by name.
        axes: dict[str, Collection[str]] = {"replicate": ["replicate"], "shard": SHARD_AXES}
        return self._fold(axes | ({"tensor": ["tensor"]} if self.shape.tensor > 1 else {}))

    def expert_mesh(self) -> DeviceMesh:
        """Return the axes `replicate`, `shard` and `expert`, as torch's mesh of what the experts of a layer are.

        Its `shard` holds the processes that have the same experts. Collective when first asked.
        """
        return self._fold({"replicate": ["replicate"], "shard": ["shard", "context"], "expert": ["expert"]})

    def _fold(self, axes: dict[str, Collection[str]]) -> DeviceMesh:
        """Return torch's mesh of these axes, each of which holds some of ours; along all others it has this place."""
        key = tuple(axes)
        if key not in self._device_meshes:
            sizes, places = asdict(self.shape), self.shape.coordinates(self.world.rank)
            outermost_first = list(reversed(places))  # as the numbers of the processes count
            ranks = torch.arange(self.shape.size).reshape([sizes[axis] for axis in outermost_first])
            kept = [axis for axis in outermost_first if any(axis in folded for folded in axes.values())]
            ranks = ranks[tuple(slice(None) if axis in kept else places[axis] for axis in outermost_first)]
            order = [kept.index(axis) for folded in axes.values() for axis in kept if axis in folded]
            shape = [math.prod(sizes[axis] for axis in folded) for folded in axes.values()]
            groups = [self.group(folded) for folded in axes.values()]
            device = self.world.device.type
            ranks = ranks.permute(order).reshape(shape)
            self._device_meshes[key] = DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=key)
        return self._device_meshes[key]
