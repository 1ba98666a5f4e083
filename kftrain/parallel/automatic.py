"""A configuration of the layout on the machine that is there: what `auto` comes to, and what cannot be there."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from kftrain.errors import ConfigError
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import ParallelConfig
from kftrain.parallel.strategies import choose_strategy

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""How much memory a container may have, in the second and the first version of control groups."""


def settled(
    parallel: ParallelConfig, model: nn.Module, mesh: Mesh, num_micro_batches: int, half: bool
) -> tuple[ParallelConfig, str]:
    """The configuration with a strategy, and a line that says which one `auto` took and why; '' where it was not asked.

    `model`: as it was built, before it is spread. Collective. Raises ConfigError where nothing can be offloaded.
    """
    shape = mesh.shape
    _require_memory_elsewhere(parallel, mesh)
    if parallel.stage != "auto" or shape.replicate * shape.shard == 1:
        return parallel, ""
    memory_bytes = min(mesh.world.gather(memory_of(mesh.world.device)))
    split = shape.tensor * shape.pipeline
    parameter_bytes = 4 * sum(parameter.numel() for parameter in model.parameters()) // split
    choice = choose_strategy(parameter_bytes, memory_bytes, shape.shard, num_micro_batches > 1, half)
    line = f"parallel.strategy: auto takes {choice.strategy}: {choice.reason}"
    return parallel.model_copy(update={"strategy": choice.strategy}), line


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU's memory; of the host's, or what the container may have of it, this process's share."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        found += [int(text)] if text.isdecimal() else []
    return min(found) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _require_memory_elsewhere(parallel: ParallelConfig, mesh: Mesh) -> None:
    if not parallel.offload:
        return
    if mesh.world.device.type == "cpu":
        raise ConfigError(
            "there is no accelerator whose memory would be relieved",
            where="parallel.offload",
            value=True,
            fix="set it to false, or train on GPUs",
        )
    if mesh.shape.replicate * mesh.shape.shard == 1:
        raise ConfigError(
            "one process alone shards nothing, so nothing of it can be offloaded",
            where="parallel.offload",
            value=True,
            fix="set it to false, or use two processes",
        )
