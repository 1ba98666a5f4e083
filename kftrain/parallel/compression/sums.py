"""Compressed sums of the gradients of replicas: `ddp` whose bytes are a quarter, at any number of processes.

Each bucket of gradients has as many chunks as there are processes. A process packs its chunks and sends each to the
process that owns it; that one adds up what it was sent, and packs the sum for all. So each number travels twice, as in
a ring, and packed both times. Summing codes on the way is not possible; gathering those of all processes everywhere
would be W / 8 of the bytes instead of a quarter.

What a number has lost is added to the gradient of the next step (error feedback: Seide et al. 2014; Karimireddy et al.
2019, arXiv:1901.09847; of both ways: Tang et al. 2021, arXiv:2102.02888). A process keeps one number for each: for
chunks of others what its own share has lost, for its own chunk, of which its share does not travel, what the sum has.
So over all processes the gradients of all steps are what was applied and what is kept.

Buckets follow from sizes alone, and travel after the last backward pass: then a step does not depend on the order in
which gradients come, and one that is not finite can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kftrain.parallel.compression.codecs import BLOCK_SIZE, Codec
from kftrain.parallel.sharded import all_gather

PART = "feedback"
"""Name of the part of a checkpoint: what numbers have lost, summed over processes, by names of parameters."""


def send_chunks(rows: torch.Tensor, codec: Codec, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Send each row, `[W, n]`, to its owner; return what waits for those of others, and sums this process's own, `[n]`.

    That leaves in the rows what they have lost.
    """
    packed = codec.pack(rows)
    received = torch.empty_like(packed)
    flight: Any = dist.all_to_all_single(received, packed, group=group, async_op=True)

    def add_up() -> torch.Tensor:
        flight.wait()
        rank = group.rank()
        total = rows[rank].clone()  # its own share does not travel, and is not rounded
        rows.sub_(codec.unpack(packed, rows.shape[1]))
        rows[rank] = 0.0
        for other, part in enumerate(codec.unpack(received, rows.shape[1]).unbind()):
            if other != rank:
                total.add_(part)
        return total

    return add_up


def send_to_all(row: torch.Tensor, codec: Codec, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Send a row, `[n]`, to all; return what waits for those of all, `[W, n]`, its own as it was sent, too."""
    packed = codec.pack(row.unsqueeze(0))
    gathered = packed.new_empty(group.size(), packed.shape[1])
    flight: Any = all_gather(gathered, packed, group=group, async_op=True)

    def unpack() -> torch.Tensor:
        flight.wait()
        return codec.unpack(gathered, len(row))

    return unpack


class CompressedSums:
    """The gradients of a model as one vector, cut into buckets; all vectors here have its layout, and are fp32."""

    def __init__(self, group: dist.ProcessGroup, codec: Codec, has_feedback: bool, bucket_bytes: int) -> None:
        """`has_feedback`: add what numbers have lost to those of the next step."""
        self._group = group
        self._codec = codec
        self.has_feedback = has_feedback
        self._bucket_bytes = bucket_bytes
        self._parameters: dict[str, nn.Parameter] = {}
        self._starts: dict[str, int] = {}
        """Name of a parameter -> place of its first number in the vector."""
        self._bounds: list[tuple[int, int]] = []
        """First number of each bucket, and of the next one; multiples of so many whole blocks as processes."""

    def begin(self, model: nn.Module, names: Sequence[str]) -> None:
        """Lay out the vector; the parameters have their values. `names`: of those that are trained."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._parameters = dict(zip(names, trained, strict=True))
        unit = BLOCK_SIZE * self._group.size()
        start = end = 0
        for name, parameter in self._parameters.items():
            if 4 * (end - start + parameter.numel()) > self._bucket_bytes and end > start:
                start, end = self._close_bucket(start, end, unit)
            self._starts[name] = end
            end += parameter.numel()
        length, _ = self._close_bucket(start, end, unit)
        self.lay_out(length, trained[0].device)

    def lay_out(self, length: int, device: torch.device) -> None:
        """Make the vectors, of this length."""
        self._sums = torch.zeros(length, device=device)
        self._work = torch.zeros(length, device=device)
        """Gradients and what was kept; after the exchange what is to be kept if the step counts."""
        self._feedback = torch.zeros(length if self.has_feedback else 0, device=device)
        self._state = {"lost": self._feedback} if self.has_feedback else {}
        """Tensors of which a checkpoint holds the sums over all processes, by name."""
        self._changes = [(self._feedback, self._work)] if self.has_feedback else []
        """Pairs of what is kept from step to step, and its value if this step counts."""

    def _close_bucket(self, start: int, end: int, unit: int) -> tuple[int, int]:
        end += -(end - start) % unit
        self._bounds.append((start, end))
        return end, end

    @torch.no_grad()
    def exchange(self) -> None:
        """Give the parameters the sums of their gradients over all processes. Collective.

        A parameter without a gradient brings zeros. What follows is `drop_unused`, and then `settle`.
        """
        self._used = [float(parameter.grad is not None) for parameter in self._parameters.values()]
        self.gather()
        for name, parameter in self._parameters.items():
            parameter.grad = self._view(self._sums, name)
        if self._group.size() == 1:  # nothing travels, and nothing is lost
            self._sums.copy_(self._work)
            self._work.zero_()
            return
        # All buckets are on their way at once, and those of all processes in the same order.
        buckets = [self.exchange_bucket(start, end) for start, end in self._bounds]
        for _ in range(3):
            for bucket in buckets:
                next(bucket, None)

    def gather(self) -> None:
        """Leave in `work` what this process has to send."""
        self._work.copy_(self._feedback) if self.has_feedback else self._work.zero_()
        self.add_gradients()

    def add_gradients(self) -> None:
        """Add the gradients of this process to `work`."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._view(self._work, name).add_(parameter.grad)

    def exchange_bucket(self, start: int, end: int) -> Iterator[None]:
        """Sum a bucket of `work` into `sums`, and leave in `work` what was lost. Stops while it is on its way."""
        rows, sums = (vector[start:end].view(self._group.size(), -1) for vector in (self._work, self._sums))
        add_up = send_chunks(rows, self._codec, self._group)
        yield
        total = add_up()
        unpack = send_to_all(total, self._codec, self._group)
        yield
        sums.copy_(unpack())
        torch.sub(total, sums[self._group.rank()], out=rows[self._group.rank()])

    def take_used(self) -> list[float]:
        """Return 1 for each parameter that had a gradient on this process in this step, 0 for the others."""
        return self._used

    def drop_unused(self, num_users: list[float]) -> None:
        """Remove the gradients of parameters that no process has used, which are what was kept of earlier steps."""
        for users, (name, parameter) in zip(num_users, self._parameters.items(), strict=True):
            if not users:
                parameter.grad = None
                if self._group.rank() == 0:  # one takes back what all would have applied
                    self._view(self._work, name).add_(self._view(self._sums, name))

    def settle(self, found_inf: torch.Tensor) -> None:
        """Keep what this step has changed, unless it is skipped: then `found_inf` is 1."""
        for kept, changed in self._changes:
            torch.where(found_inf > 0, kept, changed, out=kept)

    def save(self) -> dict[str, Any]:
        """Return what is kept, summed over processes, by names of parameters. Collective."""
        totals = {part: vector.clone() for part, vector in self._state.items()}
        for total in totals.values():
            dist.all_reduce(total, group=self._group)
        return {part: {name: self._view(total, name) for name in self._parameters} for part, total in totals.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Keep of the sums of a checkpoint those in this process's chunks, so that each is kept by one process."""
        total = torch.zeros_like(self._work)
        for part, vector in self._state.items():
            vector.zero_()
            for name in self._parameters:
                self._view(total, name).copy_(state[part][name])
            for start, end in self._bounds:
                kept, loaded = (whole[start:end].view(self._group.size(), -1) for whole in (vector, total))
                kept[self._group.rank()] = loaded[self._group.rank()]

    def _view(self, vector: torch.Tensor, name: str) -> torch.Tensor:
        """Return a parameter's part of a vector, in the parameter's order of memory."""
        parameter = self._parameters[name]
        return vector.as_strided(parameter.shape, parameter.stride(), self._starts[name])
