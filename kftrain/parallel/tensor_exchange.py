"""What the processes of the axis `tensor` exchange of their activations, and what that is backwards.

Between the blocks a model computes on each place of a sequence alone: with sequence parallelism (Korthikanti et al.
2022, arXiv:2205.05198) each process has its part of the places there, dim 1 of `[rows, places, ...]`. Where matrices
are split (Shoeybi et al. 2019, arXiv:1909.08053) it has all places, and its part of what the matrices make of them.

    into the matrices     `enter`    the parts are gathered       backwards the gradients are summed, each gets its part
    out of them           `leave`    summed, each gets its part   backwards the parts are gathered
    what all have         `split`    each takes its part          backwards the parts are gathered
    what all compute      `join`     the parts are gathered       backwards each takes its part

Without sequence parallelism all have all places: `enter` sums gradients backwards, `leave` sums what it is given, the
others do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kftrain.errors import ConfigError

PLACES = 1
"""The dim of a sequence's places."""

Operation = Callable[[torch.Tensor], torch.Tensor]

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Their names from torch 2.13 on, and before."""


@dataclass(frozen=True)
class Peers:
    """The processes of one axis, as one of them sees them."""

    group: dist.ProcessGroup
    size: int
    rank: int
    """Of this process among them."""

    def total(self, tensor: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """The sum over all of them, or what else `operation` says. Collective."""
        found = tensor.contiguous().clone()
        dist.all_reduce(found, operation, group=self.group)
        return found

    def stacked(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all, `[size, ...]`. Collective."""
        found = part.new_empty((self.size, *part.shape))
        _all_gather(found.view(-1), part.reshape(-1), group=self.group)
        return found

    def gathered(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The parts of all, one after the other along a dim. Collective."""
        dim %= part.dim()
        return self.stacked(part).movedim(0, dim).flatten(dim, dim + 1)

    def own_part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This process's part along a dim. Raises ConfigError where it has no equal parts."""
        return self._parts(whole, dim)[self.rank].contiguous()

    def part_of_total(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This process's part of the sum over all. Collective. Gloo would send all to all: there each sums its part."""
        parts = self._parts(tensor, dim).contiguous()
        if parts.device.type != "cpu":
            found = parts.new_empty(parts.shape[1:])
            _reduce_scatter(found.view(-1), parts.view(-1), group=self.group)
            return found
        received = torch.empty_like(parts)
        dist.all_to_all_single(received.view(-1), parts.view(-1), group=self.group)
        return received.sum(0)

    def _parts(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        dim %= whole.dim()
        if whole.shape[dim] % self.size:
            raise ConfigError(
                f"a sequence of {whole.shape[dim]} places has no {self.size} equal parts",
                where="parallel.tensor",
                value=self.size,
                fix="use another sequence length, or set parallel.sequence_parallel to false",
            )
        shape = (*whole.shape[:dim], self.size, -1, *whole.shape[dim + 1 :])
        return whole.reshape(shape).movedim(dim, 0)


class _Exchange(torch.autograd.Function):
    """One operation on the way, another one back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Operation, back: Operation) -> torch.Tensor:  # type: ignore[override]
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.back(gradient), None, None


def exchange(tensor: torch.Tensor, there: Operation, back: Operation) -> torch.Tensor:
    """`there(tensor)`, whose gradient is `back` of the gradient."""
    found: torch.Tensor = _Exchange.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return found


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


@dataclass(frozen=True)
class Stream:
    """The activations between the blocks of a model that is split over `peers`."""

    peers: Peers
    in_parts: bool
    """Whether each process has its part of the places there (sequence parallelism)."""

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """All places, for matrices of which each process has a part."""
        if self.in_parts:
            return exchange(hidden, self._gather, self._sum_to_part)
        return exchange(hidden, _as_it_is, self.peers.total)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of what the processes' matrices have made."""
        if self.in_parts:
            return exchange(partial, self._sum_to_part, self._gather)
        return exchange(partial, self.peers.total, _as_it_is)

    def split(self, whole: torch.Tensor) -> torch.Tensor:
        """From what all processes have computed alike."""
        return exchange(whole, self._part, self._gather) if self.in_parts else whole

    def join(self, hidden: torch.Tensor) -> torch.Tensor:
        """For what all processes compute alike."""
        return exchange(hidden, self._gather, self._part) if self.in_parts else hidden

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        return self.peers.gathered(part, PLACES)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return self.peers.own_part(whole, PLACES)

    def _sum_to_part(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.peers.part_of_total(tensor, PLACES)


@dataclass(frozen=True)
class Regrouped:
    """A matrix of several ones that stand one below the other, each of which is to be split: the rows of a process.

    It is kept in equal parts, as any matrix is, and each process is sent the rows that it computes with.
    """

    peers: Peers
    num_rows: int
    num_matrices: int

    def rows(self, part: torch.Tensor) -> torch.Tensor:
        """From the rows that this process keeps to its part of each of the matrices. Collective."""
        return exchange(part, self._there, self._back)

    def _there(self, part: torch.Tensor) -> torch.Tensor:
        order, sent, received = self._routes(part.device)
        return self._send(part[order], sent, received)

    def _back(self, gradient: torch.Tensor) -> torch.Tensor:
        order, sent, received = self._routes(gradient.device)
        returned = self._send(gradient.contiguous(), received, sent)
        found = torch.empty_like(returned)
        found[order] = returned
        return found

    def _send(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=self.peers.group)
        return found

    def _routes(self, device: torch.device) -> Routes:
        return _routes(self.num_rows, self.num_matrices, self.peers.size, self.peers.rank, device)


Routes = tuple[torch.Tensor, list[int], list[int]]
"""A process's rows in order of whom they go to, on its device; how many go to each process, and come from each."""


@functools.cache
def _routes(num_rows: int, num_matrices: int, size: int, rank: int, device: torch.device) -> Routes:
    """Found out once: an index that comes from the host, and numbers that it reads, wait for the device."""
    keeper, user = keepers_and_users(num_rows, num_matrices, size)
    order = user[keeper == rank].sort(stable=True).indices
    sent = user[keeper == rank].bincount(minlength=size)
    received = keeper[user == rank].bincount(minlength=size)
    return order.to(device), sent.tolist(), received.tolist()


def keepers_and_users(num_rows: int, num_matrices: int, num_processes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of several matrices in one: which process keeps it, and which one computes with it."""
    rows, height = torch.arange(num_rows), num_rows // num_matrices
    return rows // (num_rows // num_processes), rows % height // (height // num_processes)
