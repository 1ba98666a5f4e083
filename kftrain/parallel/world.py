"""The place of this process among all of them, and the process groups that everything else uses.

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

from kftrain.errors import KftrainError, LaunchError, RetryableError, error_from_dict
from kftrain.parallel.topology import Site, order_by_site
from kftrain.process import store_socket

SLOW_SECONDS = 7200.0
"""Longest time for which one process may read or write files while the others wait. A peer that dies is noticed at once
all the same, because its connections end."""


@dataclass(frozen=True)
class World:
    """This process among `size` processes, and the groups in which it talks to the others."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    """Gloo group of the training thread."""
    background: dist.ProcessGroup
    """Gloo group of the checkpoint thread, and before the first step of what reads large files; it is patient."""
    store: Any = None
    """Store where the processes have met. Rank 0 answers there while this lives: the other nodes wait for its end."""
    timeout: timedelta = timedelta(minutes=10)
    """Longest time of a collective operation in further groups of the training."""
    places: tuple[Site, ...] = ()
    """Site of each process, by rank; empty where all are on one node."""

    @property
    def is_main(self) -> bool:
        """True on rank 0, the one process that writes what is written once."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sum values elementwise over all processes, in float64; every process gets the same result. Collective."""
        if self.size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64)  # counts stay exact, which fp32 loses beyond 2**24
        dist.all_reduce(tensor, group=self.control)
        sums: list[float] = tensor.tolist()
        return sums

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order of rank, on every process. Collective."""
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

    def agree(self, work: Callable[[], object], while_saving: bool = False) -> None:
        """Do work that may take long, and raise the first error of any process on all. As `gather_slowly`.

        `while_saving`: the checkpoint thread may be at work; then the work must not take longer than a collective may.
        """
        # Errors of the user's and of storage only: a bug ends its process at once, and the others see its end.
        problem = None
        try:
            work()
        except KftrainError as error:
            problem = error.to_dict()
        gather = self.gather if while_saving else self.gather_slowly
        first = next((other for other in gather(problem) if other), None)
        if first is not None:
            raise error_from_dict(first)

    def gather_on_main(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the CPU tensors, of equal shape, of all processes by rank on the first one; None on the others."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_main else None
        dist.gather(tensor, tensors, dst=0, group=self.control)
        return tensors

    def sum_on_main(self, tensor: torch.Tensor) -> None:
        """Add the tensors of all processes up, in place, on the first one; those of the others are of no use then."""
        dist.reduce(tensor, dst=0, group=self.control)

    def from_main(self, value: Any) -> Any:
        """Return the value of rank 0 on every process. Collective."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def copy_from_main(self, tensor: torch.Tensor) -> None:
        """Give `tensor` the numbers that it has on rank 0, bit by bit; it may be of any type, on any device."""
        # As bytes, because gloo does not know all types.
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(content, src=0, group=self.control)
        with torch.no_grad():
            tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))

    def barrier(self) -> None:
        """Wait until all processes have called it."""
        dist.barrier(group=self.control)


@contextlib.contextmanager
def join_world(timeout_seconds: float, gpus_per_node: int = 0) -> Iterator[World]:
    """Join the process group that the environment describes as torchrun's would, and leave it after the block.

    `gpus_per_node`: GPUs required here; 0 uses whatever is present. Raises LaunchError where torch sees too few.

    Leaving it matters: a process that exits with gloo alive dies of SIGABRT, which would hide its exit code.
    """
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    _require_gpus(gpus_per_node, local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    # Ranks are dealt out anew by node before torch's groups are made, which keep them for good.
    store = _meet_others(timeout)
    size = int(os.environ["WORLD_SIZE"])
    rank, places = _find_place(store, int(os.environ["RANK"]), size)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        # A group for each thread: in one group the collectives of two would meet in another order on each process.
        control = dist.new_group(backend="gloo", timeout=timeout)
        background = dist.new_group(backend="gloo", timeout=max(timeout, timedelta(seconds=SLOW_SECONDS)))
        yield World(rank, size, device, control, background, store, timeout, places)
    finally:
        dist.destroy_process_group()


def _meet_others(timeout: timedelta) -> Any:
    """Open the store of rank 0. On a single node it is given the listening socket.

    Raises RetryableError where another job has the port: of two that train the same model, processes that met there
    would train on together, each for the other's run.
    """
    is_main, job = os.environ["RANK"] == "0", os.environ.get(store_socket.JOB_ENV, "")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        # Nobody is waited for here: a stranger would be counted.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=is_main,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=store_socket.take_descriptor(),
        )
    except dist.DistNetworkError as error:
        if not is_main:
            raise
        raise RetryableError(f"processes cannot meet: {str(error).splitlines()[0]}", where=f"port {port}") from error
    if is_main:
        store.set("job", job)
    elif store.get("job") != job.encode():
        what = "another job answers where the processes of this one meet"
        fix = "give jobs of one machine ports of their own"
        raise RetryableError(what, where=f"{address}:{port}", fix=fix)
    return store


def _find_place(store: Any, rank: int, size: int) -> tuple[int, tuple[Site, ...]]:
    """Return this process's number among neighbours (`order_by_site`), and the sites of all by their numbers."""
    if size == int(os.environ.get("LOCAL_WORLD_SIZE", size)):  # one node: torchrun's order is right already
        return rank, ()
    store.set(f"place/{rank}", json.dumps(astuple(Site.of(os.environ))))
    # multi_get waits until all have set theirs. All read the same, so all come to the same order.
    places = [Site(*json.loads(text)) for text in store.multi_get([f"place/{other}" for other in range(size)])]
    order = order_by_site(places)
    return order.index(rank), tuple(places[old] for old in order)


def _require_gpus(gpus_per_node: int, local_rank: int) -> None:
    """Raises LaunchError for a GPU that torch cannot use: it is paid for, and the CPU would silently take its place."""
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
