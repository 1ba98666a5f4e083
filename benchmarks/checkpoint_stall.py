"""How long training waits for an asynchronous save: ours against DCP's own and against a plain copy of the bytes.

    python benchmarks/checkpoint_stall.py [--processes 2] [--megabytes 256] [--rounds 7] [--folder /dev/shm]

    ours                    CheckpointWriter.save
    DCP                     async_save(checkpoint_id=…): its default stager
    DCP, FileSystemWriter   async_save(storage_writer=FileSystemWriter(…)), whose stager is the writer itself
    copy                    every local tensor copied into memory that is there already

The state is a model and two moments of Adam, sharded over the processes with FSDP's DTensors, on the CPU. All variants
run in turn in each round, every save is finished before the next variant begins, and the slowest process counts; the
first round is not counted. Medians of the rounds, and their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from kftrain.checkpoint.save import CheckpointWriter, Identity
from kftrain.parallel.world import World
from kftrain.run import attempts
from kftrain.run.paths import RunPaths

NUM_TENSORS = 48
COLUMNS = 512


def state_of(megabytes: int, world_size: int) -> dict[str, Any]:
    """So many megabytes per process, as model and optimizer."""
    mesh = init_device_mesh("cpu", (world_size,))
    rows = megabytes * 1_000_000 // (4 * COLUMNS * NUM_TENSORS * 3)

    def tensors() -> dict[str, DTensor]:
        return {
            f"layers.{i}.weight": DTensor.from_local(torch.rand(rows, COLUMNS), mesh, [Shard(0)])
            for i in range(NUM_TENSORS)
        }

    return {"model": tensors(), "optimizer": {"exp_avg": tensors(), "exp_avg_sq": tensors()}}


def local_tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, DTensor):
        return [state.to_local()]
    return [tensor for value in state.values() for tensor in local_tensors(value)]


def variants(state: dict[str, Any], folder: Path, world: World) -> dict[str, Callable[[int], Callable[[], object]]]:
    """Name -> a function of the round that does what training waits for, and returns what waits for the rest."""
    paths = RunPaths.of(str(folder), "ours")
    if world.is_main:
        attempts.claim_run(paths, 0, world.size)
    world.barrier()
    writer = CheckpointWriter(paths, world, Identity(1, "d", "t", {}), 1, 0)
    originals = local_tensors(state)
    copies = [torch.zeros_like(tensor) for tensor in originals]

    def ours(number: int) -> Callable[[], object]:
        writer.save(state, [], number, number)
        return writer.wait

    def default(number: int) -> Callable[[], object]:
        future: Any = dcp.state_dict_saver.async_save(
            state, checkpoint_id=str(folder / "dcp"), process_group=world.background
        )
        return lambda: future.result()

    def own_writer(number: int) -> Callable[[], object]:
        writer = dcp.filesystem.FileSystemWriter(str(folder / "writer"))
        future: Any = dcp.state_dict_saver.async_save(state, storage_writer=writer, process_group=world.background)
        return lambda: future.result()

    def copy(number: int) -> Callable[[], object]:
        for target, tensor in zip(copies, originals, strict=True):
            target.copy_(tensor)
        return lambda: None

    return {"ours": ours, "DCP": default, "DCP, FileSystemWriter": own_writer, "copy": copy}


def run(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=600)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=arguments.processes, timeout=timeout
    )
    groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
    world = World(rank, arguments.processes, torch.device("cpu"), *groups)
    works = variants(state_of(arguments.megabytes, world.size), Path(folder), world)
    stalls: dict[str, list[float]] = {name: [] for name in works}
    totals: dict[str, list[float]] = {name: [] for name in works}
    for number in range(1, arguments.rounds + 2):
        for name, work in works.items():
            world.barrier()
            start = time.perf_counter()
            finish = work(number)
            stall = time.perf_counter() - start
            finish()
            total = time.perf_counter() - start
            slowest = [max(values) for values in zip(*world.gather((stall, total)), strict=True)]
            if number > 1:
                stalls[name].append(slowest[0])
                totals[name].append(slowest[1])
    if world.is_main:
        report(arguments, stalls, totals)
    dist.destroy_process_group()


def report(arguments: argparse.Namespace, stalls: dict[str, list[float]], totals: dict[str, list[float]]) -> None:
    print(f"{arguments.processes} processes, {arguments.megabytes} MB each, {arguments.rounds} rounds")
    print(f"{'':24}{'stall, ms':>12}{'of DCP':>10}{'of a copy':>12}{'save, ms':>12}")
    medians = {name: statistics.median(values) for name, values in stalls.items()}
    for name, median in medians.items():
        ratios = f"{median / medians['DCP']:10.2f}{median / medians['copy']:12.2f}"
        print(f"{name:24}{median * 1e3:12.1f}{ratios}{statistics.median(totals[name]) * 1e3:12.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=256, help="of state per process")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        mp.spawn(run, (arguments, folder), nprocs=arguments.processes)


if __name__ == "__main__":
    main()
