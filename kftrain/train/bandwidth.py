"""Measures how fast the processes of a job exchange: the function of the ranks of `kftrain bandwidth`.

Bus bandwidth is that of nccl-tests (its doc/PERFORMANCE.md): bytes over seconds, times the share of the bytes that must
pass a process's link in any algorithm, so that it compares with the rate of the link whatever the number of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kftrain.config import Config
from kftrain.core import storage
from kftrain.parallel.compression.codecs import all_gather
from kftrain.parallel.fully_shard import ExchangedSums
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.shape import Shape
from kftrain.parallel.world import join_world
from kftrain.run.paths import RunPaths

SIZES_BYTES = (2**20, 2**23, 2**26)
NUM_WARM, NUM_TIMED = 2, 5
AXES = {"within nodes": ("shard",), "between nodes": ("replicate",), "all": ("replicate", "shard")}
"""Name of an axis -> axes of the mesh of nodes (`replicate`) and their processes (`shard`)."""

Exchange = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]


def measure(paths: RunPaths, config: Config) -> None:
    """Measure along all axes and publish the rows. Collective."""
    with join_world(config.launch.timeout_seconds, config.launch.gpus_per_node) as world:
        shape = Shape(replicate=config.launch.nodes, shard=world.size // config.launch.nodes)
        rows = measure_axes(Mesh(shape, world), SIZES_BYTES)
        if world.is_main:
            storage.publish_json(paths.bandwidth, rows)


def measure_axes(mesh: Mesh, sizes_bytes: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each axis, collective and size; all groups of an axis exchange at the same time. Collective."""
    rows = []
    for name, axes in AXES.items():
        if min(getattr(mesh.shape, axis) for axis in axes) == 1:
            continue
        group = mesh.group(axes)
        for collective, (exchange, num_passes) in _EXCHANGES.items():
            for size_bytes in sizes_bytes:
                seconds = max(mesh.world.gather(_time_exchange(mesh, group, exchange, size_bytes)))
                bus = num_passes * (group.size() - 1) / group.size() * size_bytes / seconds
                row = {"axis": name, "collective": collective, "processes": group.size(), "bytes": size_bytes}
                rows.append({**row, "seconds": seconds, "bus_bytes_per_second": bus})
    return rows


def _time_exchange(mesh: Mesh, group: dist.ProcessGroup, exchange: Exchange, size_bytes: int) -> float:
    """Return the seconds of one exchange of a buffer of this size, in fp32, on this process. Collective."""
    device, count = mesh.world.device, -(-size_bytes // 4 // group.size()) * group.size()
    whole, part = torch.ones(count, device=device), torch.ones(count // group.size(), device=device)
    start = 0.0
    for number in range(NUM_WARM + NUM_TIMED):
        if number == NUM_WARM:
            _wait_for_device(device)
            mesh.world.barrier()
            start = time.perf_counter()
        exchange(whole, part, group)
    _wait_for_device(device)
    return (time.perf_counter() - start) / NUM_TIMED


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reduce_scatter(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    if whole.is_cuda:
        dist.reduce_scatter_tensor(part, whole, group=group)
        return
    ExchangedSums()(part, whole, group, dist.ReduceOp.SUM)  # gloo has none: as in training


_EXCHANGES: dict[str, tuple[Exchange, int]] = {
    "all-reduce": (lambda whole, _, group: dist.all_reduce(whole, group=group), 2),
    "all-gather": (lambda whole, part, group: all_gather(whole, part, group=group), 1),
    "reduce-scatter": (_reduce_scatter, 1),
    "all-to-all": (lambda whole, _, group: dist.all_to_all_single(torch.empty_like(whole), whole, group=group), 1),
}
"""Collective -> the call, and how often the bytes of the whole pass a link."""
