"""Numbers for the formulas of `wire`, read off a model's plan: what the processes of the axis `tensor` exchange for it.

A module that is given all places gathers them, one that leaves a part of the sum with each process sums them, and
backwards it is the other way round (`tensor_exchange`). Without sequence parallelism the sum of either way goes to all,
which sends as many bytes. Each module counts as called once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from kftrain.parallel.initialize import places_of, stored_parameter
from kftrain.parallel.shape import SEQUENCE_LENGTH
from kftrain.parallel.tensor_exchange import map_rows_to_ranks
from kftrain.parallel.tensor_plan import SIZES, SplitModule, find_split_dim, is_gathered, read_plan

SUMS_OF_A_CROSS_ENTROPY = 3
"""Sums for a token: the largest logit, the sum of the exponentials, the target's logit."""


@dataclass(frozen=True)
class AlongTensor:
    """Counts of what the processes of `tensor` exchange for a model that is split over them."""

    num_features: float
    """Numbers of a place that are exchanged both ways; what is gathered or summed into parts one way only is half."""
    num_sums: int
    """Numbers of a place that are summed, in fp32, so that all have the sum; in one way."""
    num_copied: int
    """Parameters that are trained and that each process has a copy of."""
    num_moved: float = 0.0
    """Numbers of matrices that a process sends for a micro batch."""


@dataclass(frozen=True)
class Traffic:
    """Sizes and exchanges of a model that will be split, and has not been yet."""

    split: AlongTensor
    num_parameters: int
    """Numbers of the parameters that a process has, as parts or copies."""
    num_trained: int
    """Those of them that are trained."""
    num_places: int | None
    """Places of a row; None where the model does not tell."""


def traffic_of(
    model: nn.Module, num_processes: int, sequence_parallel: bool, split_logits: bool, recomputed: Sequence[str] = ()
) -> Traffic:
    """Count what a process has and sends of a model with a plan. `recomputed`: names of blocks. Raises ConfigError."""
    plan = read_plan(model, num_processes, sequence_parallel)
    names = {id(module): name for name, module in model.named_modules()}
    num_parameters = num_trained = num_copied = 0
    for slots in places_of(model).values():
        module, key = slots[0]
        parameter, is_copied = stored_parameter(slots[0]), find_split_dim(plan.get(names[id(module)]), key) is None
        count = parameter.numel() if is_copied else parameter.numel() // num_processes
        num_parameters += count
        num_trained += count if parameter.requires_grad else 0
        num_copied += count if parameter.requires_grad and is_copied else 0
    ways = _Ways(model, plan, split_logits, sequence_parallel)
    features = ways.features(plan) + sum(ways.features_again(block) for block in recomputed)
    sums = SUMS_OF_A_CROSS_ENTROPY if split_logits and ways.gives_logits else 0
    moved = sum((3 if _is_within(name, recomputed) else 2) * ways.moved(name, num_processes) for name in plan)
    return Traffic(AlongTensor(features, sums, num_copied, moved), num_parameters, num_trained, _num_places(model))


@dataclass(frozen=True)
class _Ways:
    """Numbers of a place that enter and leave the modules of a plan."""

    model: nn.Module
    plan: Mapping[str, SplitModule]
    split_logits: bool
    in_parts: bool

    @property
    def gives_logits(self) -> bool:
        return any(part.kind == "logits" for part in self.plan.values()) or self._is_tied

    @property
    def _is_tied(self) -> bool:
        """True where an embedding gives the logits, too: nothing else does."""
        kinds = {part.kind for part in self.plan.values()}
        return "vocabulary" in kinds and not kinds & {"logits", "whole"}

    def features(self, names: Mapping[str, SplitModule]) -> float:
        return sum(self._entering(name) + self._leaving(name) + self._once(name) for name in names)

    def features_again(self, block: str) -> float:
        """Count the forward pass of a block that is computed again, up to the last sum, after which nothing is kept."""
        within = [name for name in self.plan if _is_within(name, [block])]
        leaving = [self._leaving(name) for name in within]
        is_last_kept = any(self.plan[name].kind == "random" for name in within)
        left = sum(leaving) - (0.0 if is_last_kept or not leaving else next(w for w in reversed(leaving) if w))
        return (left + sum(self._entering(name) for name in within)) / 2 if self.in_parts else left

    def moved(self, name: str, num_processes: int) -> float:
        """Numbers of a matrix that a process sends, on average, to have its part of each of those it consists of."""
        part, module = self.plan[name], self._module(name)
        if part.num_matrices == 1:
            return 0.0
        keeper, user = map_rows_to_ranks(module.out_features, part.num_matrices, num_processes)
        rows = int((keeper != user).sum()) / num_processes
        return rows * float(module.in_features + (module.bias is not None))

    def _entering(self, name: str) -> float:
        kind, module = self.plan[name].kind, self._module(name)
        if kind == "vocabulary":
            return self._of_logits(module.embedding_dim, module.num_embeddings) if self._is_tied else 0.0
        if is_gathered(name, self.plan):
            return 0.0
        if kind == "gather":
            within = [other for other in self.plan if _is_within(other, [name]) and self.plan[other].kind == "column"]
            return float(self._module(within[0]).in_features) if within else 0.0
        if kind == "logits":
            return self._of_logits(module.in_features, module.out_features)
        return float(module.in_features) if kind == "column" else 0.0

    def _of_logits(self, width: int, num_classes: int) -> float:
        return width + (0.0 if self.split_logits else num_classes / 2)

    def _leaving(self, name: str) -> float:
        kind, module = self.plan[name].kind, self._module(name)
        if kind == "vocabulary":
            return float(module.embedding_dim)
        return float(module.out_features) if kind == "row" else 0.0

    def _once(self, name: str) -> float:
        """What travels one way only counts half."""
        if not self.in_parts or self.plan[name].kind not in ("split", "whole"):
            return 0.0
        first = next(self._module(name).parameters(), None)
        return 0.0 if first is None else first.shape[-1] / 2

    def _module(self, name: str) -> Any:
        return self.model.get_submodule(name)


def _is_within(name: str, others: Sequence[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in others)


def _num_places(model: nn.Module) -> int | None:
    method: Any = getattr(model, SIZES, None)
    return method().get(SEQUENCE_LENGTH) if callable(method) else None
