"""Exchanges of activations between the processes of the axis `tensor`, forward and backward.

Between the blocks a model computes on each place of a sequence alone: with sequence parallelism (Korthikanti et al.
2022, arXiv:2205.05198) each process has its part of the places there, dim 1 of `[rows, places, ...]`. Where matrices
are split (Shoeybi et al. 2019, arXiv:1909.08053) it has all places, and its part of what the matrices make of them.

    into the matrices     `enter`    the parts are gathered       backwards the gradients are summed, each gets its part
    out of them           `leave`    summed, each gets its part   backwards the parts are gathered
    what all have         `split`    each takes its part          backwards the parts are gathered
    what all compute      `join`     the parts are gathered       backwards each takes its part

Without sequence parallelism all have all places: `enter` sums gradients backwards, `leave` sums what it is given, the
others do nothing.

A gradient is summed exactly where the processes have computed different things from one tensor. Where they compute the
same from it, each already has the whole gradient, and a sum would count it once for each process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kftrain.errors import ConfigError
from kftrain.parallel.sharded import all_gather

PLACES = 1
"""Dim of an activation along which the places of a sequence lie."""

Operation = Callable[[torch.Tensor], torch.Tensor]

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The sum of flat tensors, of which each process has a part; torch 2.13 renamed it, too."""


@dataclass(frozen=True)
class Peers:
    """The processes of one axis, as one of them sees them."""

    group: dist.ProcessGroup
    size: int
    rank: int
    """Number of this process in the group."""

    def sum_over_all(self, tensor: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Return the sum over all processes, or the result of another `operation`. Collective."""
        result = tensor.contiguous().clone()  # the exchange works in place, and `tensor` is the caller's
        dist.all_reduce(result, operation, group=self.group)
        return result

    def stack_parts(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts of all processes, `[size, ...]` in the order of their ranks. Collective."""
        parts = part.new_empty((self.size, *part.shape))
        all_gather(parts.view(-1), part.reshape(-1), group=self.group)
        return parts

    def join_parts(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Join the parts of all processes, one after the other along a dim. Collective."""
        dim %= part.dim()
        return self.stack_parts(part).movedim(0, dim).flatten(dim, dim + 1)

    def take_own_part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's part along a dim. Raises ConfigError where `dim` has no equal parts."""
        return self._view_parts(whole, dim)[self.rank].contiguous()

    def sum_to_own_part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's part of the sum over all. Collective. Raises ConfigError as `take_own_part` does."""
        return self.sum_parts(self._view_parts(tensor, dim))

    def exchange_parts(self, parts: torch.Tensor) -> torch.Tensor:
        """Send each process its part of `[size, ...]`; return what all have sent to this one, likewise. Collective."""
        received = parts.new_empty(parts.shape)
        dist.all_to_all_single(received.view(-1), parts.reshape(-1), group=self.group)
        return received

    def sum_parts(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes of their parts for this one. `parts`: `[size, ...]`. Collective."""
        parts = parts.contiguous()
        if parts.device.type != "cpu":
            part = parts.new_empty(parts.shape[1:])
            _reduce_scatter(part.view(-1), parts.view(-1), group=self.group)
            return part
        # Gloo has no reduce-scatter; torch would all-reduce the whole, which sends twice as much. Each process is sent
        # only its own part by every other one, and sums in the order of the ranks.
        return self.exchange_parts(parts).sum(0)

    def _view_parts(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """View the equal parts along a dim as `[size, ...]`. Raises ConfigError where there are none."""
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
    """An operation with another one for its gradient: autograd does not see through collectives of torch."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Operation, back: Operation) -> torch.Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.back(gradient), None, None


def exchange(tensor: torch.Tensor, there: Operation, back: Operation) -> torch.Tensor:
    """Compute `there(tensor)` forward and `back(gradient)` backward.

    Where either is collective, all processes must run the backward passes of their exchanges in the same order.
    """
    result: torch.Tensor = _Exchange.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return result


def _view_all(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


@dataclass(frozen=True)
class Stream:
    """The activations between the blocks of a model that is split over `peers`."""

    peers: Peers
    in_parts: bool
    """True where each process has its part of the places between the blocks (sequence parallelism)."""

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give split matrices all places of their input. Collective forward with sequence parallelism, and backward."""
        # Each process's matrices add another part to the gradient of this input, so it is summed on the way back.
        if self.in_parts:
            return exchange(hidden, self._gather, self._sum_to_part)
        return exchange(hidden, _view_all, self.peers.sum_over_all)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum what the processes' matrices have made. Collective forward; backward with sequence parallelism only."""
        # All processes compute alike with the sum, so the gradient of it is whole on each and is not summed again.
        if self.in_parts:
            return exchange(partial, self._sum_to_part, self._gather)
        return exchange(partial, self.peers.sum_over_all, _view_all)

    def split(self, whole: torch.Tensor) -> torch.Tensor:
        """Take this process's places of what all processes have computed alike."""
        # From here on each process knows the gradient of its own places only: what came before needs that of all.
        return exchange(whole, self._take_part, self._gather) if self.in_parts else whole

    def join(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give all places to what all processes compute alike."""
        # All compute the same gradient of the whole: each takes its part of it, for their sum would be `size` times it.
        return exchange(hidden, self._gather, self._take_part) if self.in_parts else hidden

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        return self.peers.join_parts(part, PLACES)

    def _take_part(self, whole: torch.Tensor) -> torch.Tensor:
        return self.peers.take_own_part(whole, PLACES)

    def _sum_to_part(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.peers.sum_to_own_part(tensor, PLACES)


@dataclass(frozen=True)
class Regrouped:
    """A fused matrix, several ones one below the other, of which each process computes with a part of every one.

    It is stored in equal parts, as any matrix is, so that checkpoints and sharding need not know; for a forward pass
    each process is sent the rows that it computes with.
    """

    peers: Peers
    num_rows: int
    num_matrices: int

    def regroup_rows(self, part: torch.Tensor) -> torch.Tensor:
        """Exchange the rows that this process stores for its part of each of the matrices. Collective, also backward.

        The result has its rows of the first matrix, then those of the second, and so on.
        """
        return exchange(part, self._send_to_users, self._return_to_keepers)

    def _send_to_users(self, part: torch.Tensor) -> torch.Tensor:
        # What comes in needs no sorting: the sender with the lower rank has the upper rows, and each sends its rows in
        # their order, so rows arrive in the order of the fused matrix.
        order, sent, received = self._find_routes(part.device)
        return self._exchange_rows(part[order], sent, received)

    def _return_to_keepers(self, gradient: torch.Tensor) -> torch.Tensor:
        order, sent, received = self._find_routes(gradient.device)
        returned = self._exchange_rows(gradient.contiguous(), received, sent)
        rows = torch.empty_like(returned)
        rows[order] = returned  # they return in the order in which they were sent
        return rows

    def _exchange_rows(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.peers.group)
        return result

    def _find_routes(self, device: torch.device) -> Routes:
        return _compute_routes(self.num_rows, self.num_matrices, self.peers.size, self.peers.rank, device)


Routes = tuple[torch.Tensor, list[int], list[int]]
"""Indices of a process's rows in the order of their users, on its device; rows sent to, and received from, each one."""


@functools.cache
def _compute_routes(num_rows: int, num_matrices: int, size: int, rank: int, device: torch.device) -> Routes:
    """Cached: in each call a copy of the index to the device, and counts read from it, would make the host wait."""
    keeper, user = map_rows_to_ranks(num_rows, num_matrices, size)
    order = user[keeper == rank].sort(stable=True).indices  # stable: rows for one user keep their order
    sent = user[keeper == rank].bincount(minlength=size)
    received = keeper[user == rank].bincount(minlength=size)
    return order.to(device), sent.tolist(), received.tolist()


def map_rows_to_ranks(num_rows: int, num_matrices: int, num_processes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Map each row of a fused matrix to the rank that stores it and the rank that computes with it."""
    rows, height = torch.arange(num_rows), num_rows // num_matrices
    return rows // (num_rows // num_processes), rows % height // (height // num_processes)
