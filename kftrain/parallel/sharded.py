"""Tensors that are spread over processes: their local parts, sums over all parts, and work on whole matrices.

What is computed for each number by itself needs only the local parts, and a sum over a tensor is that of its parts.
What needs a matrix as a whole (`apply_to_whole`) one process computes for each matrix, however it is cut or copied.

Everything collective goes through its tensors in an order that follows from shapes and layout alone. So all processes
meet in the same exchanges; in an order by values they would wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers the parts of all processes in one tensor; torch 2.13 renamed it."""

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""First index of a process's part along each dim of the whole, and the part's shape."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Make `part` this process's part of a tensor that is spread as another one is; leave it plain if that is."""
    if not isinstance(tensor, DTensor):
        return part
    form: Any = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, **form)


def part_of(tensor: torch.Tensor) -> Part:
    """Return where this process's part of the whole begins, and its shape."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(start), tuple(shape)


def index_in(part: Part) -> tuple[slice, ...]:
    """Build the index of a part in the whole."""
    return tuple(slice(start, start + length) for start, length in zip(*part, strict=True))


def index_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Build the index of the part that this process has."""
    return index_in(part_of(tensor))


def find_cut_axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the axes of a tensor's mesh along which processes have different parts of it."""
    if not isinstance(tensor, DTensor):
        return ()
    sizes = enumerate(tensor.device_mesh.shape)
    return tuple(axis for axis, size in sizes if size > 1 and not tensor.placements[axis].is_replicate())


def sum_over_parts(values: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sum each value over the processes that have different parts of the tensor beside it in `like`. Collective.

    All that is summed over the same processes travels at once.
    """
    together: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for place, tensor in enumerate(like):
        if axes := find_cut_axes(tensor):
            assert isinstance(tensor, DTensor)
            together.setdefault((tensor.device_mesh, axes), []).append(place)
    sums = list(values)
    for (mesh, axes), places in together.items():
        flat = torch.cat([values[place].reshape(-1) for place in places])
        for axis in axes:  # sums along one axis after the other are the sum over the whole grid
            dist.all_reduce(flat, group=mesh.get_group(axis))
        for place, part in zip(places, torch.split(flat, [values[place].numel() for place in places]), strict=True):
            sums[place] = part.view_as(values[place])
    return sums


def list_cut_matrices(tensor: torch.Tensor, part: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """List this process's parts of matrices, each with a tensor that is cut as it is: arguments of `apply_to_whole`.

    A matrix is listed in any case, and those of a stack `[n, rows, columns]` where something cuts them; one that is cut
    between its matrices only has none. `part`: of `tensor`, or of another one that is cut as it is.
    """
    if tensor.dim() == 2:
        return [(part, tensor)]
    # Along an axis that cuts between matrices the others have other ones, and no part in these.
    cuts: list[Any] = [(axis, tensor.placements[axis]) for axis in find_cut_axes(tensor)]  # type: ignore[attr-defined]
    inner = {axis: Shard(placement.dim - 1) for axis, placement in cuts if placement.dim}
    if not inner:
        return []
    assert isinstance(tensor, DTensor)
    names = tensor.device_mesh.mesh_dim_names or ()
    mesh = tensor.device_mesh[tuple(names[axis] for axis in inner)]
    form: Any = {"shape": tensor.shape[1:], "stride": (tensor.shape[2], 1)}
    return [(matrix, DTensor.from_local(matrix, mesh, list(inner.values()), **form)) for matrix in part.unbind()]


@dataclass(frozen=True)
class Team:
    """Processes that would compute the same, and share the work: each matrix is done by one of them."""

    groups: tuple[dist.ProcessGroup, ...] = ()
    """This process's groups, one for each axis along which the team stands, outermost first."""

    @property
    def size(self) -> int:
        """Number of processes in the team."""
        return math.prod(group.size() for group in self.groups)

    @property
    def place(self) -> int:
        """Number of this process in the team; the last axis counts fastest."""
        place = 0
        for group in self.groups:
            place = place * group.size() + group.rank()
        return place

    def broadcast_from(self, tensor: torch.Tensor, place: int) -> None:
        """Give the whole team what the process at a place has, in place. `tensor`: contiguous. Collective."""
        starts: list[int] = []
        for group in reversed(self.groups):
            starts.insert(0, place % group.size())
            place //= group.size()
        content = tensor.reshape(-1).view(torch.uint8)  # gloo does not know bf16
        # From the inside out: first along the last axis, by the one group that has the source; then each of its members
        # along the axis before. Whoever stands elsewhere on an outer axis has nothing to give yet, and waits for that.
        for axis in reversed(range(len(starts))):
            if all(group.rank() == start for group, start in zip(self.groups[:axis], starts[:axis], strict=True)):
                dist.broadcast(content, group=self.groups[axis], group_src=starts[axis])


ALONE = Team()


def apply_to_whole(
    parts: Sequence[torch.Tensor],
    like: Sequence[torch.Tensor],
    work: Callable[[torch.Tensor], torch.Tensor],
    replicas: Team = ALONE,
) -> list[torch.Tensor]:
    """Do work on whole matrices, and return this process's parts of the results. Collective.

    Each matrix is done by one process, which gets all parts of it, and gives back those of the result.

    Args:
        parts: This process's part of each matrix.
        like: Tensors that are cut as the matrices are.
        work: Makes of a whole matrix another one of the same shape and type.
        replicas: The processes that have the same of those matrices that are no distributed tensors.
    """
    by_rows: dict[tuple[DeviceMesh, int], list[int]] = {}
    others: dict[Team, list[int]] = {}
    # By size: neighbours in this order are done at the same time, and everybody waits for the longest of them.
    for place in sorted(range(len(like)), key=lambda place: like[place].numel()):
        tensor = like[place]
        axes = find_cut_axes(tensor)
        if isinstance(tensor, DTensor) and [tensor.placements[axis] for axis in axes] == [Shard(0)]:
            by_rows.setdefault((tensor.device_mesh, axes[0]), []).append(place)
        else:
            team = _build_team(tensor.device_mesh) if isinstance(tensor, DTensor) else replicas
            others.setdefault(team, []).append(place)
    done = list(parts)
    for (mesh, axis), places in by_rows.items():
        _work_by_rows(done, like, work, places, mesh.get_group(axis), _build_team(mesh, without=axis))
    for team, places in others.items():
        _work_on_wholes(done, like, work, places, team)
    return done


def _build_team(mesh: DeviceMesh, without: int = -1) -> Team:
    """Make a team of all processes of a mesh, or of those at the same place of one axis."""
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1 and axis != without]
    return Team(tuple(mesh.get_group(axis) for axis in axes))


def _work_by_rows(
    done: list[torch.Tensor],
    like: Sequence[torch.Tensor],
    work: Callable[[torch.Tensor], torch.Tensor],
    places: list[int],
    group: dist.ProcessGroup,
    team: Team,
) -> None:
    """Do the matrices that are cut by rows over `group`: as many at a time as it has processes, one by each.

    `team`: the processes with the same rows in other groups. Each group does another batch of a turn, and then hands
    its results to the others.
    """
    batches = [places[start : start + group.size()] for start in range(0, len(places), group.size())]
    for start in range(0, len(batches), team.size):
        turn = list(enumerate(batches[start : start + team.size]))
        for number, batch in turn:
            if number == team.place:
                shapes = [like[place].shape for place in batch]
                results = _work_on_batch([done[place] for place in batch], shapes, group, work)
                for place, result in zip(batch, results, strict=True):
                    done[place] = result
            else:
                for place in batch:
                    done[place] = torch.empty_like(done[place], memory_format=torch.contiguous_format)
        for number, batch in turn:  # after all work of the turn: handing round makes the groups wait for each other
            for place in batch:
                team.broadcast_from(done[place], number)


def _work_on_wholes(
    done: list[torch.Tensor],
    like: Sequence[torch.Tensor],
    work: Callable[[torch.Tensor], torch.Tensor],
    places: list[int],
    team: Team,
) -> None:
    """Do the matrices of any other cut, or of none; a process has at most two wholes at a time."""
    for start in range(0, len(places), team.size):
        batch = list(enumerate(places[start : start + team.size]))
        own = None
        for number, place in batch:
            whole = gather_whole(done[place], like[place])  # all gather it, and only one keeps it
            if number == team.place:
                own = whole
        del whole
        made = None if own is None else work(own).contiguous()
        for number, place in batch:
            result = done[place].new_empty(like[place].shape) if made is None or number != team.place else made
            team.broadcast_from(result, number)
            part = result[index_of(like[place])]
            done[place] = part if part.shape == result.shape else part.clone()  # a view would keep the whole alive


def gather_whole(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gather all parts of a tensor that is cut as `like` is, on each process. Collective where it is cut."""
    if not isinstance(like, DTensor) or not find_cut_axes(like):
        return part
    shape, stride = like.shape, like.stride()
    # In fp32 on the way, because gloo does not know bf16; what was bf16 comes back unchanged.
    distributed = DTensor.from_local(part.float(), like.device_mesh, like.placements, shape=shape, stride=stride)
    return distributed.full_tensor().to(part.dtype)


def _work_on_batch(
    parts: list[torch.Tensor],
    shapes: list[torch.Size],
    group: dist.ProcessGroup,
    work: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Do at most as many matrices as processes: rank r gets matrix r whole, and gives back the rows of the result."""
    # One exchange for the batch: what a process sends to rank r is its part of matrix r. Rows lie one after the other
    # and arrive in the order of the ranks, so what is received already is the whole matrix. The way back is the same
    # exchange with the counts swapped. A rank without a matrix sends its parts and gets nothing.
    size, own = group.size(), group.rank()
    sent = [part.numel() for part in parts] + [0] * (size - len(parts))
    kept = [rows * shapes[own][1] for rows in _count_rows(shapes[own][0], size)] if own < len(parts) else [0] * size
    whole = _exchange_flat(torch.cat([part.reshape(-1) for part in parts]), sent, kept, group)
    if own < len(parts):
        whole = work(whole.view(shapes[own])).reshape(-1)
    back = torch.split(_exchange_flat(whole, kept, sent, group), sent)
    return [flat.view(part.shape) for flat, part in zip(back, parts, strict=False)]


def _count_rows(length: int, size: int) -> list[int]:
    """Count the rows of each process, as `torch.chunk` cuts them."""
    height = -(-length // size)
    return [max(0, min(length - height * rank, height)) for rank in range(size)]


def _exchange_flat(flat: torch.Tensor, sent: list[int], kept: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send each process its numbers, all to all; as bytes, because gloo does not know bf16."""
    width, received = flat.element_size(), flat.new_empty(sum(kept))
    out, into = ([width * count for count in counts] for counts in (sent, kept))
    dist.all_to_all_single(received.view(torch.uint8), flat.view(torch.uint8), into, out, group=group)
    return received
