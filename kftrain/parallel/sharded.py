"""What an optimizer must know of tensors that are spread over processes: local parts, and what needs all of them.

What is computed for each number by itself needs only the local parts, and a sum over a tensor is that of its parts.
What needs a matrix as a whole (`on_whole`) one process computes for each matrix, where matrices are cut by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def index_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Which part of the whole this process has."""
    if not isinstance(tensor, DTensor):
        return (slice(None),) * tensor.dim()
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + length) for first, length in zip(start, shape, strict=True))


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


def on_whole(
    parts: Sequence[torch.Tensor], like: Sequence[torch.Tensor], work: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """This process's parts of what `work` makes of whole matrices, each of the same shape and type as before.

    `like`: tensors that are cut as the matrices are. Matrices that are cut by rows along one axis are computed by one
    of its processes each; of any other cut each process computes all. Collective.
    """
    done: list[torch.Tensor] = list(parts)
    by_rows: dict[tuple[DeviceMesh, int], list[int]] = {}
    for place, tensor in enumerate(like):
        axes = cut_axes(tensor)
        if not isinstance(tensor, DTensor) or not axes:
            done[place] = work(parts[place])
        elif [tensor.placements[axis] for axis in axes] == [Shard(0)]:
            by_rows.setdefault((tensor.device_mesh, axes[0]), []).append(place)
        else:
            done[place] = work(_whole(parts[place], tensor))[index_of(tensor)]
    for (mesh, axis), places in by_rows.items():
        group = mesh.get_group(axis)
        places.sort(key=lambda place: like[place].numel())  # those of one exchange take about equally long
        for start in range(0, len(places), group.size()):
            batch = places[start : start + group.size()]
            results = _in_turn([parts[place] for place in batch], [like[place].shape for place in batch], group, work)
            for place, result in zip(batch, results, strict=True):
                done[place] = result
    return done


def _whole(part: torch.Tensor, like: DTensor) -> torch.Tensor:
    """All parts together, on each process."""
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
