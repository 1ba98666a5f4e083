"""What an optimizer must know of tensors that are spread over processes: local parts, and what needs all of them.

What is computed for each number by itself needs only the local parts, and a sum over a tensor is that of its parts.
What needs a matrix as a whole (`on_whole`) one process computes for each matrix, however matrices are cut or copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a process's part of a tensor begins, and its shape."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: torch.Tensor) -> Part:
    """Which part of the whole this process has."""
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


def cut_axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of its mesh along which processes have different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    sizes = enumerate(tensor.device_mesh.shape)
    return tuple(axis for axis, size in sizes if size > 1 and not tensor.placements[axis].is_replicate())


def sum_over_parts(values: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each value summed over the processes that have different parts of the tensor beside it. Collective.

    All that is summed over the same processes travels at once.
    """
    together: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for place, tensor in enumerate(like):
        if axes := cut_axes(tensor):
            assert isinstance(tensor, DTensor)
            together.setdefault((tensor.device_mesh, axes), []).append(place)
    sums = list(values)
    for (mesh, axes), places in together.items():
        flat = torch.cat([values[place].reshape(-1) for place in places])
        for axis in axes:
            dist.all_reduce(flat, group=mesh.get_group(axis))
        for place, part in zip(places, torch.split(flat, [values[place].numel() for place in places]), strict=True):
            sums[place] = part.view_as(values[place])
    return sums


@dataclass(frozen=True)
class Team:
    """Processes that would compute the same, and share it: each number of a job is done by one of them."""

    groups: tuple[dist.ProcessGroup, ...] = ()
    """Of this process, one for each axis along which they stand."""

    @property
    def size(self) -> int:
        """How many they are."""
        return math.prod(group.size() for group in self.groups)

    @property
    def place(self) -> int:
        """Of this process among them."""
        found = 0
        for group in self.groups:
            found = found * group.size() + group.rank()
        return found

    def hand_round(self, tensor: torch.Tensor, place: int) -> None:
        """Gives all of them what the one at a place has, axis by axis. `tensor`: contiguous. Collective."""
        starts: list[int] = []
        for group in reversed(self.groups):
            starts.insert(0, place % group.size())
            place //= group.size()
        content = tensor.reshape(-1).view(torch.uint8)  # gloo does not know bf16
        for axis in reversed(range(len(starts))):
            if all(group.rank() == start for group, start in zip(self.groups[:axis], starts[:axis], strict=True)):
                dist.broadcast(content, group=self.groups[axis], group_src=starts[axis])


ALONE = Team()


def on_whole(
    parts: Sequence[torch.Tensor],
    like: Sequence[torch.Tensor],
    work: Callable[[torch.Tensor], torch.Tensor],
    replicas: Team = ALONE,
) -> list[torch.Tensor]:
    """This process's parts of what `work` makes of whole matrices, each of the same shape and type as before.

    `like`: tensors that are cut as the matrices are; `replicas`: the processes that have the same ones of those that
    are no distributed tensors. Each matrix is computed by one process, which gets all of its parts, and gives back
    what it made. Collective.
    """
    by_rows: dict[tuple[DeviceMesh, int], list[int]] = {}
    others: dict[Team, list[int]] = {}
    for place in sorted(range(len(like)), key=lambda place: like[place].numel()):  # neighbours take equally long
        tensor = like[place]
        axes = cut_axes(tensor)
        if isinstance(tensor, DTensor) and [tensor.placements[axis] for axis in axes] == [Shard(0)]:
            by_rows.setdefault((tensor.device_mesh, axes[0]), []).append(place)
        else:
            team = _team(tensor.device_mesh) if isinstance(tensor, DTensor) else replicas
            others.setdefault(team, []).append(place)
    done = list(parts)
    for (mesh, axis), places in by_rows.items():
        _row_by_row(done, like, work, places, mesh.get_group(axis), _team(mesh, without=axis))
    for team, places in others.items():
        _whole_by_whole(done, like, work, places, team)
    return done


def _team(mesh: DeviceMesh, without: int = -1) -> Team:
    """All processes of a mesh, or those at the same place of one axis."""
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1 and axis != without]
    return Team(tuple(mesh.get_group(axis) for axis in axes))


def _row_by_row(
    done: list[torch.Tensor],
    like: Sequence[torch.Tensor],
    work: Callable[[torch.Tensor], torch.Tensor],
    places: list[int],
    group: dist.ProcessGroup,
    team: Team,
) -> None:
    """Of matrices that are cut by rows over a group; groups that have the same ones take turns."""
    batches = [places[start : start + group.size()] for start in range(0, len(places), group.size())]
    for start in range(0, len(batches), team.size):
        turn = list(enumerate(batches[start : start + team.size]))
        for number, batch in turn:
            if number == team.place:
                shapes = [like[place].shape for place in batch]
                results = _in_turn([done[place] for place in batch], shapes, group, work)
                for place, result in zip(batch, results, strict=True):
                    done[place] = result
            else:
                for place in batch:
                    done[place] = torch.empty_like(done[place], memory_format=torch.contiguous_format)
        for number, batch in turn:
            for place in batch:
                team.hand_round(done[place], number)


def _whole_by_whole(
    done: list[torch.Tensor],
    like: Sequence[torch.Tensor],
    work: Callable[[torch.Tensor], torch.Tensor],
    places: list[int],
    team: Team,
) -> None:
    """Of matrices of any other cut, or of none: at most two wholes are here at a time."""
    for start in range(0, len(places), team.size):
        batch = list(enumerate(places[start : start + team.size]))
        own = None
        for number, place in batch:
            whole = whole_of(done[place], like[place])
            if number == team.place:
                own = whole
        del whole
        made = None if own is None else work(own).contiguous()
        for number, place in batch:
            result = done[place].new_empty(like[place].shape) if made is None or number != team.place else made
            team.hand_round(result, number)
            part = result[index_of(like[place])]
            done[place] = part if part.shape == result.shape else part.clone()


def whole_of(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """All parts of a tensor that is cut as `like` is, together on each process. Collective."""
    if not isinstance(like, DTensor) or not cut_axes(like):
        return part
    shape, stride = like.shape, like.stride()
    distributed = DTensor.from_local(part.float(), like.device_mesh, like.placements, shape=shape, stride=stride)
    return distributed.full_tensor().to(part.dtype)


def _in_turn(
    parts: list[torch.Tensor],
    shapes: list[torch.Size],
    group: dist.ProcessGroup,
    work: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """At most as many matrices as processes: each process gets the rows of one of them, and gives back what it made."""
    size, own = group.size(), group.rank()
    sent = [part.numel() for part in parts] + [0] * (size - len(parts))
    kept = [rows * shapes[own][1] for rows in _rows(shapes[own][0], size)] if own < len(parts) else [0] * size
    whole = _exchanged(torch.cat([part.reshape(-1) for part in parts]), sent, kept, group)
    if own < len(parts):
        whole = work(whole.view(shapes[own])).reshape(-1)
    back = torch.split(_exchanged(whole, kept, sent, group), sent)
    return [flat.view(part.shape) for flat, part in zip(back, parts, strict=False)]


def _rows(length: int, size: int) -> list[int]:
    """Rows of each process, as `torch.chunk` cuts them."""
    each = -(-length // size)
    return [max(0, min(length - each * rank, each)) for rank in range(size)]


def _exchanged(flat: torch.Tensor, sent: list[int], kept: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """All to all; as bytes, because gloo does not know bf16."""
    width, received = flat.element_size(), flat.new_empty(sum(kept))
    out, into = ([width * count for count in counts] for counts in (sent, kept))
    dist.all_to_all_single(received.view(torch.uint8), flat.view(torch.uint8), into, out, group=group)
    return received
