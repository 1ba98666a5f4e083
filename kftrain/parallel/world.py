"""Who this process is among all of them, and the process groups that everything else uses.

Data on GPUs travels by NCCL. Decisions (stop now? how many loss terms? is everybody's checkpoint written?) travel by
gloo on the CPU, in groups of their own, so that they neither wait for kernels nor mix with collectives of a background
thread.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kftrain.errors import KftrainError, LaunchError, error_from_dict
from kftrain.parallel.topology import Site, order_of
from kftrain.process import store_socket

SLOW_SECONDS = 7200.0
"""How long one process may read or write files while the others wait. A peer that dies is noticed at once all the same,
because its connections end."""


@dataclass(frozen=True)
class World:
    """This process among `size` processes."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    """Gloo group of the training thread."""
    background: dist.ProcessGroup
    """Gloo group of the checkpoint thread, and before the first step of what reads large files; it is patient."""
    store: Any = None
    """Where the processes have met. Rank 0 answers there as long as this lives: the other nodes wait for its end."""
    timeout: timedelta = timedelta(minutes=10)
    """How long a collective operation may take in further groups of the training."""
    places: tuple[Site, ...] = ()
    """Where each process stands, by rank; empty where all are on one node."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes what is written once."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Elementwise sum over all processes, in float64; every process gets the same result."""
        if self.size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        found: list[float] = tensor.tolist()
        return found

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in order of rank, on every process."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_slowly(self, value: Any) -> list[Any]:
        """`gather` after work that takes one process longer than the others, such as hashing a large file.

        Not while the checkpoint thread is at work: it uses the same group.
        """
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.background)
        return values

    def agree(self, work: Callable[[], object]) -> None:
        """Does work that may take long; the first error of any process is raised on all. As `gather_slowly`."""
        problem = None
        try:
            work()
        except KftrainError as error:
            problem = error.to_dict()
        first = next((each for each in self.gather_slowly(problem) if each), None)
        if first is not None:
            raise error_from_dict(first)

    def gather_on_main(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Tensors of equal shape, on CPUs, of all processes in order of rank: on the first one; None on the others."""
        found = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_main else None
        dist.gather(tensor, found, dst=0, group=self.control)
        return found

    def sum_on_main(self, tensor: torch.Tensor) -> None:
        """Adds the tensors of all processes up, in place, on the first one; those of the others are of no use then."""
        dist.reduce(tensor, dst=0, group=self.control)

    def from_main(self, value: Any) -> Any:
        """The value of rank 0 on every process."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def copy_from_main(self, tensor: torch.Tensor) -> None:
        """Gives `tensor` the numbers that it has on rank 0, bit by bit; it may be of any type, on any device."""
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(content, src=0, group=self.control)
        with torch.no_grad():
            tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))

    def barrier(self) -> None:
        """Returns when all processes have called it."""
        dist.barrier(group=self.control)


@contextlib.contextmanager
def join_world(timeout_seconds: float, gpus_per_node: int = 0) -> Iterator[World]:
    """Joins the process group that the environment describes as torchrun's would, and leaves it again.

    `gpus_per_node`: what this machine was to have; 0: what it has is used. Raises LaunchError where torch sees none.

    Leaving it matters: a process that exits with gloo alive dies of SIGABRT, which would hide its exit code.
    """
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    _require_gpus(gpus_per_node, local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    store = _meet(timeout)
    size = int(os.environ["WORLD_SIZE"])
    rank, places = _placed(store, int(os.environ["RANK"]), size)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        control = dist.new_group(backend="gloo", timeout=timeout)
        background = dist.new_group(backend="gloo", timeout=max(timeout, timedelta(seconds=SLOW_SECONDS)))
        yield World(rank, size, device, control, background, store, timeout, places)
    finally:
        dist.destroy_process_group()


def _meet(timeout: timedelta) -> Any:
    """The store of rank 0, once all processes have come. On a single node that one is given the listening socket."""
    is_main = os.environ["RANK"] == "0"
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=is_main,
        timeout=timeout,
        master_listen_fd=store_socket.take_descriptor(),
    )


def _placed(store: Any, rank: int, size: int) -> tuple[int, tuple[Site, ...]]:
    """The number of this process among neighbours (`topology.order_of`), and where all stand by their numbers."""
    if size == int(os.environ.get("LOCAL_WORLD_SIZE", size)):
        return rank, ()
    store.set(f"place/{rank}", json.dumps(astuple(Site.of(os.environ))))
    places = [Site(*json.loads(each)) for each in store.multi_get([f"place/{other}" for other in range(size)])]
    order = order_of(places)
    return order.index(rank), tuple(places[each] for each in order)


def _require_gpus(gpus_per_node: int, local_rank: int) -> None:
    """A GPU that torch cannot use is paid for, and the CPU would take its place without a word."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus_per_node and not seen:
        raise LaunchError(
            "the pod was to have GPUs, and torch sees none",
            where="launch.kubernetes.gpus_per_node",
            value=gpus_per_node,
            fix="use a trainer image whose torch is built for CUDA and fits the node's driver, or set it to 0",
        )
    if seen and local_rank >= seen:
        raise LaunchError(
            f"process {local_rank} of this machine has no GPU: torch sees {seen}",
            where="launch.processes_per_node",
            fix="start one process for each GPU",
        )
