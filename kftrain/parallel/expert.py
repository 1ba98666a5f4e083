"""Expert parallelism: the experts of each layer spread over the processes of the axis `expert`, by a plan of names.

A model says which of its modules hold experts: their parameters have one expert after the other along dim 0, and their
forward takes rows in the order of the experts, and how many rows each has. Here each process keeps an equal share of
the experts, as torch's `DTensor`; a forward sends every row to the process that has its expert, and takes the results
back. So the model knows no processes, and each expert computes the rows of all of them.

The rest of the model is sharded over all of these processes, each of which reads samples of its own. A module of
experts is a unit of its own for that, because only the processes that have the same experts share their parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from kftrain.core.plugins import user_code
from kftrain.errors import ConfigError
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.initialize import Slot, parameter_like, places_of, put_all, replace_parameters, stored_parameter
from kftrain.parallel.shape import require_equal_parts
from kftrain.parallel.sharded import local
from kftrain.parallel.tensor_exchange import Peers, exchange

AXIS = "expert"


class Arrived(NamedTuple):
    """Rows that processes have sent to this one, in the order of its experts."""

    rows: torch.Tensor
    """`[n, ...]`."""
    counts: torch.Tensor
    """`[experts of this process]` int64: rows of each."""
    way_back: Any
    """Arguments of `combine`: where the rows came from."""


class Dispatcher(Protocol):
    """A way of bringing rows to their experts and back. Both methods are collective, also in the backward pass."""

    def dispatch(self, rows: torch.Tensor, counts: torch.Tensor) -> Arrived:
        """Send rows to their experts. `rows` `[n, ...]`: in the order of all experts; `counts`: of each."""
        ...

    def combine(self, results: torch.Tensor, way_back: Any) -> torch.Tensor:
        """Send the results of rows that have arrived to where those came from, in the order of before."""
        ...


class AllToAll:
    """A dispatcher that exchanges rows among all processes at once, and their counts before that."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def dispatch(self, rows: torch.Tensor, counts: torch.Tensor) -> Arrived:
        """See `Dispatcher`."""
        size = self._peers.size
        sent = counts.view(size, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self._peers.group)
        there, back = torch.stack((sent.sum(1), received.sum(1))).tolist()  # the host waits: it asks for the exchange
        # Rows arrive by sender, and within that by expert. Grouped products want them by expert, whoever has sent them.
        expert_of = torch.arange(received.shape[1], device=rows.device).repeat(size)
        order = expert_of.repeat_interleave(received.flatten(), output_size=sum(back)).argsort(stable=True)
        arrived = self._exchange(rows, there, back).index_select(0, order)
        return Arrived(arrived, received.sum(0), (order, there, back))

    def combine(self, results: torch.Tensor, way_back: Any) -> torch.Tensor:
        """See `Dispatcher`."""
        order, there, back = way_back
        # Copied to where it came from: the inverse of `index_select`, whose gradient adds nothing up.
        return self._exchange(torch.empty_like(results).index_copy_(0, order, results), back, there)

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return exchange(
            rows, lambda own: self._send(own, sent, received), lambda gradient: self._send(gradient, received, sent)
        )

    def _send(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        content = rows.contiguous().view(torch.uint8)  # as bytes, because gloo does not know bf16
        dist.all_to_all_single(result.view(torch.uint8), content, received, sent, group=self._peers.group)
        return result


@dataclass(frozen=True)
class SpreadExperts:
    """Experts spread along the axis `expert`. First in a strategy: the plan knows modules by the model's own names."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Make the experts' parameters distributed tensors, and let rows travel to them.

        Raises ConfigError where the model names no experts, or theirs have no equal shares.
        """
        model, mesh = distributed.model, distributed.mesh
        names = _list_expert_modules(model)
        size = mesh.shape.expert
        if not names:
            raise ConfigError(
                f"{type(model).__name__} does not say where its experts are",
                where="parallel.expert",
                value=size,
                fix="give the model a method expert_plan(), use model.kind: mixture_of_experts, or set it to 1",
            )
        group = mesh.own_group([AXIS])
        dispatcher = AllToAll(Peers(group, size, dist.get_rank(group)))
        expert_mesh = mesh.expert_mesh()
        # A process of a pipeline has the parameters of its own stages only.
        here = [name for name in names if next(model.get_submodule(name).parameters(), None) is not None]
        for name in here:
            module = model.get_submodule(name)
            _require_fit(name, module, size)
            for slots in places_of(module).values():
                old = stored_parameter(slots[0])
                # src_data_rank None: nothing is sent, each process cuts its own; values come later (initialize.py).
                value = distribute_tensor(old.detach(), expert_mesh[AXIS], [Shard(0)], src_data_rank=None)
                put_all(slots, parameter_like(old, value))
            slots = [(module, key) for key in module._parameters]
            module.forward = functools.partial(_run_spread, module.forward, slots, dispatcher)
            distributed.units[name] = expert_mesh


def _run_spread(
    forward: Callable[..., torch.Tensor],
    slots: Sequence[Slot],
    dispatcher: Dispatcher,
    rows: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Compute rows by the experts of all processes; `forward` sees this process's experts as plain tensors."""
    arrived = dispatcher.dispatch(rows, counts)
    # Plain ones within: torch has no grouped product of distributed tensors, and no row is another process's here.
    with replace_parameters(slots, local):
        results = forward(arrived.rows, arrived.counts)
    return dispatcher.combine(results, arrived.way_back)


def _list_expert_modules(model: nn.Module) -> list[str]:
    """List the names of the modules that the model's plan names. Raises ConfigError for a pattern that names none."""
    patterns, names = read_expert_plan(model), [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise _error("names no module of the model", pattern, "see model.named_modules()")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def read_expert_plan(model: nn.Module) -> list[str]:
    """Return the patterns of names of the modules of experts; none where the model has no plan.

    Raises ConfigError for what is no plan, UserCodeError where the method raises.
    """
    method: Any = getattr(model, "expert_plan", None)
    with user_code("model.expert_plan"):
        patterns: Any = method() if callable(method) else []
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise _error("is no plan", type(patterns).__name__, "return a list of patterns of modules' names")
    return list(patterns)


def _require_fit(name: str, module: nn.Module, size: int) -> None:
    """Raises ConfigError where the parameters of a module do not hold equally many experts for each process."""
    lengths = {parameter.shape[0] if parameter.dim() else 0 for parameter in module.parameters()}
    if len(lengths) != 1 or any(True for _ in module.children()):
        fix = "stack the experts along dim 0 of its own parameters, which then have equal lengths"
        raise _error("names a module that does not hold one expert after the other", name, fix)
    (length,) = lengths
    require_equal_parts(f"{name} (experts)", length, size, axis=AXIS)


def _error(what: str, value: Any, fix: str) -> ConfigError:
    return ConfigError(what, where="model.expert_plan", value=value, fix=fix)
