"""Replicas: torch's own DistributedDataParallel, whose gradients travel in buckets while the backward pass goes on.

Li et al. 2020, arXiv:2006.15704. FSDP2 with nothing to shard computes the same, but on gloo its backward pass waits for
the exchange of each block.

In bf16 the model computes with casts of its parameters, through which gradients reach the masters as fp32; a micro
batch's own gradients are rounded, as FSDP2 rounds them, and their sum is not.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.futures import Future

from kftrain.parallel.distributed import Distributed
from kftrain.parallel.formats import list_slots
from kftrain.parallel.fully_shard import ExchangedSums
from kftrain.parallel.initialize import replace_parameters
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.sharded import all_gather

warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")


class Replicas:
    """A model whose gradients are summed over a group, from its first computation on."""

    def __init__(
        self,
        distributed: Distributed,
        compute: torch.dtype,
        reduce: torch.dtype,
        bucket_bytes: int | None,
        nodes: HierarchicalSums | None,
    ) -> None:
        """The model may have no memory yet; it keeps the names of its parameters. `bucket_bytes`: None for torch's.

        `nodes`: sums in the place of flat ones.
        """
        self._model, mesh, note = distributed.model, distributed.mesh, distributed.note_part
        replicate(
            self._model,
            process_group=mesh.group(["replicate"]),
            device_id=mesh.world.device,
            broadcast_buffers=False,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_bytes and bucket_bytes / 2**20,
            init_sync=False,
        )
        self._compute = compute
        self._has_begun = False
        # Without a hook they would be averaged. torch refuses annotations that are strings, as those here are.
        cast(Any, self._model).register_comm_hook(
            mesh.group(["replicate"]), lambda group, bucket: _sum_bucket(bucket, group, reduce, note, nodes)
        )

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Give the model its parameters in the format of the computation, within the block."""
        # torch's replicas hang their hooks on the parameters that they find. That must be the masters, with their
        # memory: not earlier, when they have none, and not below, where casts stand in for them.
        if not self._has_begun:
            self._has_begun = True
            cast(Any, replicate).state(self._model).lazy_init()
        if self._compute == torch.float32:
            yield
            return
        # The cast is recorded, so gradients go back through it to the masters and their hooks. One cast serves all
        # micro batches of the block: it keeps no tensors for its gradient, so each backward pass may go through it.
        with replace_parameters(list_slots(self._model), lambda master: master.to(self._compute)):
            yield

    def exchange(self, does: bool) -> None:
        """Say whether the next backward pass exchanges gradients, with those of before that were not exchanged."""
        cast(Any, self._model).set_requires_gradient_sync(does)


def _sum_bucket(
    bucket: Any, group: dist.ProcessGroup, dtype: torch.dtype, note: Any, nodes: HierarchicalSums | None = None
) -> Future[Any]:
    """Sum a bucket of gradients over the group in this format, while the backward pass goes on."""
    buffer: torch.Tensor = bucket.buffer()
    if note is not None:
        note([buffer])
    small = buffer.to(dtype)
    if nodes is None:
        future = cast(dist.Work, dist.all_reduce(small, group=group, async_op=True)).get_future()
    else:
        future = nodes.start(small)
    return future.then(lambda _: small if small is buffer else buffer.copy_(small))


class HierarchicalSums:
    """Sums within each node (axis `shard`), then each process its part across nodes (`replicate`), and back. On CPUs.

    Jia et al. 2018, arXiv:1807.11205. Of N nodes each sends others 2 (N - 1) / N of a vector's bytes, where a ring over
    all W processes sends 2 (W - 1) / W.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._within = mesh.group(["shard"])
        self._across = mesh.group(["replicate"])
        self._sum_parts = ExchangedSums()
        # The exchanges of a bucket wait for one another, so they leave the backward pass alone in a thread; in one, as
        # those of all buckets must meet in the same order on all processes.
        self._thread = ThreadPoolExecutor(1, "sums of gradients")

    def start(self, vector: torch.Tensor) -> Future[Any]:
        """Begin to sum a vector, in place."""
        future: Future[Any] = Future()

        def hand_over(done: Any) -> None:
            problem = done.exception()
            future.set_exception(problem) if problem else future.set_result(vector)

        self._thread.submit(self._sum, vector).add_done_callback(hand_over)
        return future

    @torch.no_grad()
    def _sum(self, vector: torch.Tensor) -> None:
        filled = nn.functional.pad(vector, (0, -len(vector) % self._within.size()))
        part = filled.new_empty(len(filled) // self._within.size())
        self._sum_parts(part, filled, self._within, dist.ReduceOp.SUM)
        dist.all_reduce(part, group=self._across)
        all_gather(filled, part, group=self._within)
        vector.copy_(filled[: len(vector)])
