"""Context parallelism: each process of the axis `context` computes a part of every sequence, by a plan of names.

A model's method `context_plan()` maps patterns of modules' names to what stands around them:

    cut         before it all processes have whole sequences: its first argument is cut along dim 1, and from here on
                each computes its own places. `cut/0` and `cut/-1` name another dim. An embedding that is called with
                activations, as an output layer, is given them as they are.
    attention   a module without parameters, called with query, key and value, `[rows, heads, places, width]`, and what
                belongs to whole sequences: the one module in which a place needs others

Positions and documents are computed from whole sequences, so a token has the same ones on any number of processes.

There are two ways to attend. While the processes divide the key-value heads, they exchange: each is given all places of
some heads, and its module attends as on one process (Jacobs et al. 2023, arXiv:2309.14509). Beyond that each gathers
the keys and values of all places, for its own queries (Llama 3, arXiv:2407.21783, section 3.3.2); that way is for
modules with `attend_chunks`, as `CausalAttention` has it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kftrain.core.plugins import user_code
from kftrain.errors import ConfigError
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.sequences import SequenceCut
from kftrain.parallel.tensor_exchange import Peers, exchange

AXIS = "context"
METHOD = "context_plan"

HEADS, PLACES = 1, 2
"""Dims of queries, keys and values."""

_KIND = re.compile(r"attention|cut(/-?\d+)?")


@dataclass(frozen=True)
class CutSequences:
    """Sequences cut along the axis `context`. It comes after `SplitTensors`, whose exchanges are within a part."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Put cuts and exchanges around the modules of the plan. Raises ConfigError where the model has no plan."""
        model, mesh = distributed.model, distributed.mesh
        group = mesh.group([AXIS])
        shared = SharedSequences(Peers(group, mesh.shape.context, dist.get_rank(group)), mesh.sequence_cut)
        distributed.needs_same_calls = True
        for name, kind in read_context_plan(model, mesh.shape.context).items():
            module: Any = model.get_submodule(name)
            is_attention = kind == "attention"
            module.forward = (
                _build_attention(module, name, shared) if is_attention else _build_cut(module, kind, shared.cut)
            )


def read_context_plan(model: nn.Module, num_processes: int) -> dict[str, str]:
    """Return module -> kind. Raises ConfigError for a model without a plan, and for a plan that does not fit it."""
    method: Any = getattr(model, "context_plan", None)
    if not callable(method):
        raise ConfigError(
            "the model does not say where its attention is",
            where="parallel.context",
            value=num_processes,
            fix=f"give the model a method {METHOD}(), or set it to 1",
        )
    plan: dict[str, str] = {}
    with user_code(f"model.{METHOD}"):
        declared = [(str(pattern), str(kind)) for pattern, kind in method().items()]
    for pattern, kind in declared:
        names = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
        if not names or not _KIND.fullmatch(kind):
            what = "knows no such kind" if names else "names no module of the model"
            fix = "use cut, cut/0, attention"
            raise ConfigError(what, where=f"model.{METHOD}", value=f"{pattern}: {kind}", fix=fix)
        plan |= {name: kind for name in names if name not in plan}
    return plan


@dataclass(frozen=True)
class SharedSequences:
    """The exchanges between the processes that share sequences."""

    peers: Peers
    cut: SequenceCut

    def attend_by_heads(self, attend: Callable[..., Any], query: Any, key: Any, value: Any, others: Any) -> Any:
        """Attend with some of the heads, at all places. Collective, also backward."""
        # One exchange for all three: beside the processes' queries stand the keys and values of the same group.
        groups = [heads.unflatten(HEADS, (self.peers.size, -1)).movedim(HEADS, 0) for heads in (query, key, value)]
        heads: Any = exchange(torch.cat(groups, HEADS + 1), self._send_heads, self._send_places)
        attended = attend(*heads.split([group.shape[HEADS + 1] for group in groups], HEADS), *others)
        return exchange(attended, self._send_places, self._send_heads).movedim(0, HEADS).flatten(HEADS, HEADS + 1)

    def attend_by_places(self, attend: Callable[..., Any], query: Any, key: Any, value: Any, others: Any) -> Any:
        """Attend with this process's queries to the keys of all places. Collective, also backward."""
        # In one exchange. Backward each place gets the sum of what the queries of all processes owe to it.
        whole = exchange(torch.cat([key, value], HEADS), self._gather, self._sum_to_part)
        keys, values = whole.chunk(2, HEADS)
        return attend(query, keys, values, self.cut.list_chunks(whole.shape[PLACES]), *others)

    def _send_heads(self, groups: torch.Tensor) -> torch.Tensor:
        """Exchange the heads of own places, `[size, B, heads, places, E]`, for own heads of all places."""
        return self.cut.join_parts(self.peers.exchange_parts(groups), PLACES)

    def _send_places(self, heads: torch.Tensor) -> torch.Tensor:
        """Exchange own heads of all places for the heads of own places: the inverse."""
        return self.peers.exchange_parts(self.cut.view_parts(heads, PLACES))

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        return self.cut.join_parts(self.peers.stack_parts(part), PLACES)

    def _sum_to_part(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.peers.sum_parts(self.cut.view_parts(gradient, PLACES))


def _build_attention(module: Any, name: str, shared: SharedSequences) -> Callable[..., Any]:
    """Build the forward of an attention, in one of the two ways: here alone is decided in which."""
    inner, size = module.forward, shared.peers.size

    def attend(query: Any, key: Any, value: Any, *others: Any, **keywords: Any) -> Any:
        if key.shape[HEADS] % size == 0:
            return shared.attend_by_heads(functools.partial(inner, **keywords), query, key, value, others)
        if hasattr(module, "attend_chunks"):
            chunked = functools.partial(module.attend_chunks, **keywords)
            return shared.attend_by_places(chunked, query, key, value, others)
        raise ConfigError(
            f"{key.shape[HEADS]} key-value heads have no {size} equal parts",
            where=f"model {name}",
            value=f"parallel.context: {size}",
            fix="use kftrain.models.CausalAttention, or a divisor of the heads",
        )

    return attend


def _build_cut(module: Any, kind: str, cut: SequenceCut) -> Callable[..., Any]:
    """Build the forward of a module that is given this process's places of its first argument."""
    inner, dim = module.forward, int(kind.partition("/")[2] or 1)

    def enter(first: torch.Tensor, *others: Any, **keywords: Any) -> Any:
        is_output_layer = isinstance(module, nn.Embedding) and first.is_floating_point()
        return inner(first if is_output_layer else cut.take_part(first, dim), *others, **keywords)

    return enter
