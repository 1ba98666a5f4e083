"""The layout of the processes: which samples this one reads, and with whom it shares what.

Only the mesh answers how many different batches there are; `World` is the operating system's view.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kftrain.parallel.shape import AXES, NORM_AXES, Shape
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
        self._groups: dict[frozenset[str], dist.ProcessGroup] = {}
        self._device_mesh: DeviceMesh | None = None

    @classmethod
    def of_copies(cls, world: World) -> Mesh:
        """Build the mesh in which each process has the whole model, and samples of its own."""
        return cls(Shape(replicate=world.size), world)

    def sum_of_losses(self, values: list[float]) -> list[float]:
        """Sum over all processes what belongs to loss terms, each term once. Collective."""
        return self.world.sum(values if self.counts_loss else [0.0] * len(values))

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

    def device_mesh(self) -> DeviceMesh:
        """Return the axes `replicate` and `shard`, and `tensor` where there is one, as torch's own mesh.

        It is one object: what is spread along an axis must know the others. Collective when first asked.
        """
        if self._device_mesh is None:
            # With both data axes, even if they have size 1: FSDP asks for them by name.
            names = ("replicate", "shard", *(["tensor"] if self.shape.tensor > 1 else []))
            rest = [axis for axis in AXES if axis not in names]
            assert all(getattr(self.shape, axis) == 1 for axis in rest), self.shape
            ranks = torch.arange(self.world.size).reshape([getattr(self.shape, axis) for axis in names])
            groups = [self.group([axis]) for axis in names]
            self._device_mesh = DeviceMesh.from_group(groups, self.world.device.type, mesh=ranks, mesh_dim_names=names)
        return self._device_mesh
