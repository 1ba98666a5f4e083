"""Tensor parallelism: the matrices of a model split over the processes of the axis `tensor`, by a plan of names.

Every parameter becomes torch's `DTensor` on that axis, a part of it or, where the plan does not split it, a copy; so
sharding, checkpoints and initial weights know what is where, and all parameters stand on one mesh. What is computed is
plain tensors: while the forward of a block runs, its parameters are this process's parts, and between the modules that
the plan names stand the exchanges of `tensor_exchange`. (DTensor's own dispatch would cost each operation of a model
some hundred microseconds of the host.)

Gradients of what is copied: where processes have seen parts of a sequence they are summed over the axis, all of them in
one exchange at the end of a step. The others are equal on all processes up to rounding; they are averaged in the same
exchange, so that no kernel that sums in a random order lets the copies drift apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from kftrain.errors import ConfigError
from kftrain.parallel.chunked_logits import ChunkedLogits
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.initialize import Places, parameter_like, places_of, put_all, replace_parameters, stored_parameter
from kftrain.parallel.sharded import find_cut_axes, local
from kftrain.parallel.tensor_exchange import PLACES, Peers, Regrouped, Stream
from kftrain.parallel.tensor_plan import SplitModule, find_split_dim, is_gathered, read_plan
from kftrain.parallel.vocabulary import SplitLogits, find_first_class, look_up

AXIS = "tensor"

Forward = Callable[..., Any]


@dataclass(frozen=True)
class SplitTensors:
    """Matrices split along the axis `tensor`. First in a strategy: the plan knows modules by the model's own names."""

    sequence_parallel: bool
    split_logits: bool
    """True where the model may return `SplitLogits`; else it returns whole logits."""
    chunk_tokens: int = 0
    """Number of tokens whose logits are computed at a time, as `ChunkedLogits`; 0: all."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Make the parameters distributed tensors, and put the plan's exchanges around its modules.

        Raises ConfigError where the model cannot be split.
        """
        model, mesh = distributed.model, distributed.mesh
        group = mesh.group([AXIS])
        peers = Peers(group, mesh.shape.tensor, dist.get_rank(group))
        plan = read_plan(model, peers.size, self.sequence_parallel)
        stream, draws = Stream(peers, self.sequence_parallel), PartDraws(peers.rank, mesh.world.device)
        places = places_of(model)
        names = {id(module): name for name, module in model.named_modules()}
        partial = [name for name, slots in places.items() if _is_partial(names, slots, plan, self.sequence_parallel)]
        _distribute_parameters(places, names, plan, mesh.device_mesh()[AXIS])
        for name, part in plan.items():
            module = model.get_submodule(name)
            module.forward = self._build_forward(module, part, stream, is_gathered(name, plan), draws)
        # Units come second, so that they are outermost: a block that the plan names reads its weight in the forward
        # made above, and must find its local part there. Each unit has only its own parameters, because sharding (which
        # is applied later) makes those of a block whole when the block is called, not when the model is.
        for unit in (*blocks, ""):
            for module in [model.get_submodule(unit)] if unit else distributed.roots:
                module.forward = _use_local_parameters(module.forward, _list_slots(model, unit, blocks), draws)
        distributed.after_backward.append(CopiedParameters(places, partial, peers))

    def _build_forward(
        self, module: Any, part: SplitModule, stream: Stream, gathered: bool, draws: PartDraws
    ) -> Forward:
        """Build the forward of a module that the plan names. `gathered`: a module above has gathered its input."""
        inner: Forward = module.forward
        enter = (lambda hidden: hidden) if gathered else stream.enter
        if part.kind == "column" and part.num_matrices > 1:
            regrouped = Regrouped(stream.peers, module.out_features, part.num_matrices)
            return lambda hidden: draws.begin(_linear(enter(hidden), regrouped.regroup_rows, module))
        if part.kind == "column":
            return lambda hidden: draws.begin(inner(enter(hidden)))
        if part.kind == "row":  # the bias is added to the sum: each process has all of it, and it belongs there once
            return lambda hidden: _add_bias(stream.leave(F.linear(draws.end(hidden), module.weight)), module.bias)
        if part.kind == "logits":
            return lambda hidden: self._make_logits(enter(hidden), module, module.out_features, stream.peers)
        if part.kind == "vocabulary":
            first = find_first_class(module.num_embeddings, stream.peers)
            return lambda values: (
                self._make_logits(enter(values), module, module.num_embeddings, stream.peers)
                if values.is_floating_point()
                else stream.leave(look_up(values, module.weight, first, module.padding_idx))
            )
        if part.kind == "random" and stream.in_parts:
            return lambda hidden: _drop_as_one_process(hidden, module, stream.peers)
        entrance = {"gather": stream.enter, "split": stream.split, "whole": stream.join}.get(part.kind)
        if entrance is None:
            return inner
        return lambda hidden, *others, **keywords: inner(entrance(hidden), *others, **keywords)

    def _make_logits(self, hidden: torch.Tensor, module: Any, num_classes: int, peers: Peers) -> Any:
        bias = getattr(module, "bias", None)
        if self.chunk_tokens:
            return ChunkedLogits(hidden, module.weight, bias, self.chunk_tokens, peers, num_classes)
        logits = SplitLogits(F.linear(hidden, module.weight, bias), peers, num_classes)
        return logits if self.split_logits else logits.whole()


class PartDraws:
    """Random numbers between a column and its row: different on each process there, the same on all after it.

    Between the two each process has features or heads of its own, and the same mask for all of them would tie them
    together. Elsewhere all compute alike and must draw alike.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._generator = torch.cuda.default_generators[device.index or 0] if is_cuda else torch.default_generator
        self._rank = rank
        self._states: tuple[torch.Tensor, torch.Tensor] | None = None
        """Generator's state outside, and as it was seeded for the part; None outside of a part."""

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Seed the generator for this process's part, from the state that all processes share. Returns `hidden`."""
        # Of several columns before one row (gate and up) the first one seeds. Evaluation draws nothing, so it is spared
        # the cost.
        if self._states is None and torch.is_grad_enabled():
            outside = self._generator.get_state()
            digest = hashlib.sha256(outside.numpy().tobytes() + str(self._rank).encode()).digest()
            self._generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self._states = outside, self._generator.get_state()
        return hidden

    def end(self, hidden: torch.Tensor | None = None) -> Any:
        """Go back to the state that all processes share, moved on if the part has drawn. Returns `hidden`."""
        if self._states is not None:
            (outside, begun), self._states = self._states, None
            has_drawn = not torch.equal(self._generator.get_state(), begun)
            self._generator.set_state(outside)
            if has_drawn:  # one number is thrown away: from the same state the next part would draw the same masks
                torch.rand((), generator=self._generator, device=self._generator.device)
        return hidden


class CopiedParameters:
    """The parameters that every process has a copy of, and their gradients at the end of a step."""

    def __init__(self, places: Places, partial: Sequence[str], peers: Peers) -> None:
        """Take the copies among `places`. `partial`: those of which each process has a part of the gradient only."""
        self._places = {name: slots for name, slots in places.items() if not find_cut_axes(stored_parameter(slots[0]))}
        self._partial = frozenset(partial)
        self._peers = peers

    def share_of(self, name: str) -> float | None:
        """Return the factor of each process's gradient in the sum over them; None for a split parameter."""
        return None if name not in self._places else 1.0 if name in self._partial else 1 / self._peers.size

    @torch.no_grad()
    def __call__(self) -> None:
        """Make the gradients those of all processes, in place. Collective."""
        # The processes of the axis see the same samples and call the same modules, so that all have gradients of the
        # same parameters, in the same order: one long vector needs no names.
        parameters = {name: stored_parameter(slots[0]) for name, slots in self._places.items()}
        gradients = {name: local(copy.grad) for name, copy in parameters.items() if copy.grad is not None}
        if not gradients:
            return
        own = [grad if name in self._partial else grad / self._peers.size for name, grad in gradients.items()]
        total = self._peers.sum_over_all(torch.cat([gradient.flatten() for gradient in own]))
        sums = torch.split(total, [gradient.numel() for gradient in own])
        for gradient, summed in zip(gradients.values(), sums, strict=True):
            gradient.copy_(summed.view_as(gradient))


def _distribute_parameters(
    places: Places, names: Mapping[int, str], plan: Mapping[str, SplitModule], mesh: Any
) -> None:
    """Make each parameter a distributed tensor wherever it stands. Raises ConfigError where its places disagree."""
    for name, slots in places.items():
        dims = {find_split_dim(plan.get(names[id(module)]), key) for module, key in slots}
        if len(dims) > 1:
            raise ConfigError(
                "a parameter that several modules share is split in one of them only",
                where=f"model {name}",
                fix="split it in all of them alike (vocabulary and logits), or do not share it",
            )
        (dim,) = dims
        old = stored_parameter(slots[0])
        # src_data_rank None: nothing is sent, each process cuts its own; values come later (initialize.py).
        value = distribute_tensor(old.detach(), mesh, [Replicate() if dim is None else Shard(dim)], src_data_rank=None)
        put_all(slots, parameter_like(old, value))


def _is_partial(names: Mapping[int, str], slots: Any, plan: Mapping[str, SplitModule], in_parts: bool) -> bool:
    """Tell whether a process has a part only of a copied parameter's gradient: it has seen some places only."""
    # A row's bias is such a copy: it is added after the sum, where each process has its places.
    kinds = {plan[name].kind for module, _ in slots if (name := names[id(module)]) in plan}
    return in_parts and bool(kinds & {"sequence", "row"})


def _list_slots(model: nn.Module, unit: str, blocks: Sequence[str]) -> list[tuple[nn.Module, str]]:
    """List where the parameters of a unit stand; the root has those that no block has."""
    if unit:
        modules = list(model.get_submodule(unit).modules())
    else:
        within = {id(module) for name in blocks for module in model.get_submodule(name).modules()}
        modules = [module for module in model.modules() if id(module) not in within]
    return [(module, key) for module in modules for key, value in module._parameters.items() if value is not None]


def _use_local_parameters(forward: Forward, slots: Sequence[tuple[nn.Module, str]], draws: PartDraws) -> Forward:
    """Build the same forward, in which the parameters are this process's parts as plain tensors."""

    def local_forward(*arguments: Any, **keywords: Any) -> Any:
        with replace_parameters(slots, local):
            try:
                return forward(*arguments, **keywords)
            finally:
                # Recomputing stops (torch raises) as soon as it has the last activation that the backward pass needs,
                # which may be between a column and its row: without this the next draws would be of the part.
                draws.end()

    return local_forward


def _linear(hidden: torch.Tensor, rows: Callable[[torch.Tensor], torch.Tensor], module: nn.Linear) -> torch.Tensor:
    return F.linear(hidden, rows(module.weight), None if module.bias is None else rows(module.bias))


def _add_bias(hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return hidden if bias is None else hidden + bias


def _drop_as_one_process(hidden: torch.Tensor, module: nn.Dropout, peers: Peers) -> torch.Tensor:
    """Drop what one process with the whole sequence would drop of these places."""
    # All draw the mask of all places and take their part: so their generators stay equal, too.
    if not module.training:
        return hidden
    shape = list(hidden.shape)
    shape[PLACES] *= peers.size
    return hidden * peers.take_own_part(F.dropout(hidden.new_ones(shape), module.p), PLACES)
