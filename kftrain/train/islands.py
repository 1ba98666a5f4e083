"""Islands: groups of processes that train alone, and agree on new parameters every so many steps.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105): all islands begin with the same outer parameters. After H steps of its
own an island's outer gradient is what it has moved by, outer - inner. The mean over the islands is the gradient of an
outer optimizer, which moves the outer parameters; from these all go on, each with the inner optimizer that it has.
`average` is a step of 1 without momentum: local SGD (Stich 2018, arXiv:1805.09767).

The exchange is a collective along the axis `islands` (`parallel/outer_exchange.py`), or goes through servers
(`train/served_exchange.py`): each process exchanges its own part of what `fsdp` shards, and keeps the outer parameters
and the outer momentum of that part. It comes after each H-th step, and after the last one of the training. A step that
an island skips (its gradient is not finite) counts. Of several fragments each has its own turn among these H steps
(Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512), so that less travels at a time.

With a quorum islands do not wait for each other (Decoupled DiLoCo, arXiv:2604.21428): an island that comes late takes
the updates that it has missed, and its own gradient is in one of them. All meet in some rounds, `Config.is_meeting`,
and soon after an island has wanted to: between two rounds in which they meet nothing is agreed over all of them.

A checkpoint holds the outer parameters as its `model`. These are what all islands agree on, and what evaluation and
export take; between two exchanges they are those of the last one. Beside them it holds what each island has for itself:
its parameters, its optimizer, what its numbers have lost.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from kftrain.config import Config
from kftrain.parallel.distributed import Part
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.outer_exchange import CollectiveExchange, Round
from kftrain.parallel.sharded import local, spread_like
from kftrain.parallel.world import World
from kftrain.run.commit import CheckpointManifest
from kftrain.run.paths import RunPaths
from kftrain.train.averages import standing_in
from kftrain.train.optimizer import list_parameter_names
from kftrain.train.served_exchange import ServedExchange
from kftrain.train.settings import TrainConfig

PART = "islands"
"""Name of the part of a checkpoint: the outer momentum, and what each island has for itself."""


class Islands:
    """The outer parameters and their optimizer, in fp32, cut over the processes of an island as the parameters are."""

    has_met = True
    """True where all islands have taken the same steps now, and wait for each other."""
    wants_meeting = False
    """True where this island wants all to meet soon; its processes agree on it."""

    def __init__(self, model: nn.Module, config: Config, mesh: Mesh) -> None:
        """Begin with the parameters of now, which are those of all islands."""
        self._names = {weight: names for weight, names in list_parameter_names(model).items() if weight.requires_grad}
        self._island = str(mesh.island)
        self._config = config
        self._most_missed = 0
        self._train = train = config.train
        self._sizes = [weight.numel() for weight in self._weights]
        self._outer = self._flatten(self._weights)
        self._momentum = torch.zeros_like(self._outer)
        sizes = [weight.numel() for weight in self._names]
        self._fragments = cut_fragments(sizes, self._sizes, train.outer.num_fragments)
        self._exchanges = [self._build_exchange(mesh, part.stop - part.start) for part in self._fragments]

    def _build_exchange(self, mesh: Mesh, num_numbers: int) -> CollectiveExchange | ServedExchange:
        if self._config.server.num_servers:
            return ServedExchange(mesh, self._config, num_numbers, self._outer.device)
        return CollectiveExchange(mesh, self._train.outer.encoding, num_numbers, self._outer.device)

    @property
    def _weights(self) -> list[torch.Tensor]:
        """This process's parts of the parameters. FSDP may move them in memory before its first pass."""
        return [local(weight.detach()) for weight in self._names]

    @property
    def _has_feedback(self) -> bool:
        return self._exchanges[0].has_feedback

    def connect(self, paths: RunPaths, world: World, before: CheckpointManifest | None) -> None:
        """Connect to the servers, where islands exchange through them. Collective."""
        for exchange in self._exchanges:
            if isinstance(exchange, ServedExchange):
                exchange.connect(paths, world, before)

    def close(self) -> None:
        """Close the connections to servers."""
        for exchange in self._exchanges:
            if isinstance(exchange, ServedExchange):
                exchange.close()

    def finish_step(self, first_sample: int) -> None:
        """Exchange outer gradients if this is the time. `first_sample`: number of the step's. Collective then."""
        # By the sample, so that nothing counts steps, and an attempt that goes on exchanges after the same ones.
        num_steps = first_sample // self._train.global_batch_size + 1
        self.has_met = not self._train.outer.quorum
        if numbers := list_due_fragments(self._train, num_steps):
            weights = self._flatten(self._weights)
            for number in numbers:
                part = self._fragments[number]
                self._exchange_part(number, self._outer[part] - weights[part], num_steps)
                weights[part] = self._outer[part]
            self._set_weights(weights)

    def _exchange_part(self, fragment: int, moved: torch.Tensor, num_steps: int) -> None:
        is_meeting = self._config.is_meeting(num_steps) or not self._train.outer.quorum
        number = Round(-(-num_steps // self._train.outer.steps), is_meeting, self.wants_meeting)
        means, self.has_met = self._exchanges[fragment].exchange(moved, number)
        num_updates = 0
        for mean, share in means:
            self._move(self._fragments[fragment], mean, share)
            num_updates += 1
        self._most_missed = max(self._most_missed, num_updates - 1)

    def collect_metrics(self) -> dict[str, float]:
        """Return the most updates that were made without this island between two exchanges since the last call."""
        most, self._most_missed = self._most_missed, 0
        return {"missed_updates": float(most)} if self._train.outer.quorum else {}

    @torch.no_grad()
    def _move(self, part: slice, gradient: torch.Tensor, share: float) -> None:
        """Move a part of the outer parameters as `torch.optim.SGD` does with `nesterov`.

        `share`: of the islands that the gradient is the mean of. Of a round of two updates each is a part of the step,
        and the momentum decays once: else the step would be the larger, the more islands come late.
        """
        outer, weights = self._train.outer, self._outer[part]
        if outer.optimizer == "average":
            weights.sub_(gradient, alpha=share)
        else:
            momentum = self._momentum[part].mul_(outer.momentum**share).add_(gradient, alpha=share)
            step = gradient.add(momentum, alpha=outer.momentum)
            weights.sub_(step, alpha=outer.learning_rate * share)

    def in_place(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Give the model the outer parameters within the block, which may compute but not train."""
        return standing_in(model, self._weights, self._split_vector(self._outer))

    def make_parts(self, parts: dict[str, Part]) -> dict[str, Part]:
        """Make the parts of a checkpoint of those of an island: its `model` and its `optimizer`."""
        model, optimizer = parts["model"], parts["optimizer"]

        def save_model() -> dict[str, Any]:
            state, outer = model.save(), self._name(self._outer)
            return {name: outer.get(name, value) for name, value in state.items()}

        def load_model(state: dict[str, Any]) -> None:
            self._outer.copy_(self._collect(state))
            model.load(state)

        def save_island() -> dict[str, Any]:
            kept = {"weights": self._name(self._flatten(self._weights)), "optimizer": optimizer.save()}
            if self._has_feedback:
                kept["lost"] = self._name(torch.cat([exchange.list_lost() for exchange in self._exchanges]))
            return {"momentum": self._name(self._momentum), "of": {self._island: kept}}

        def load_island(state: dict[str, Any]) -> None:  # after the model, which has the outer parameters by then
            kept = state["of"][self._island]
            self._momentum.copy_(self._collect(state["momentum"]))
            self._set_weights(self._collect(kept["weights"]))
            optimizer.load(kept["optimizer"])
            if self._has_feedback:
                lost = self._collect(kept["lost"])
                for exchange, part in zip(self._exchanges, self._fragments, strict=True):
                    exchange.set_lost(lost[part])

        return {"model": Part(1, save_model, load_model), PART: Part(1, save_island, load_island)}

    @torch.no_grad()
    def _set_weights(self, vector: torch.Tensor) -> None:
        for weight, value in zip(self._weights, self._split_vector(vector), strict=True):
            weight.copy_(value)

    def _flatten(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return a copy of all numbers as one vector, each tensor in the order of its indices."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def _split_vector(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' parts of a vector, in the same memory."""
        parts = torch.split(vector, self._sizes)
        return [part.view(weight.shape) for part, weight in zip(parts, self._weights, strict=True)]

    def _name(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what a vector holds of each parameter, spread as that is, by all names."""
        named = zip(self._names.items(), self._split_vector(vector), strict=True)
        return {name: spread_like(weight, part) for (weight, names), part in named for name in names}

    def _collect(self, state: dict[str, Any]) -> torch.Tensor:
        """Return the vector of which a state has the parameters' parts."""
        return self._flatten([local(state[names[0]]) for names in self._names.values()])


def cut_fragments(sizes: Sequence[int], own_sizes: Sequence[int], num_fragments: int) -> list[slice]:
    """Cut a process's vector into fragments of whole parameters, which are about equally large.

    `sizes`: of the parameters, alike in each layout, so that a run goes on in another one with the same fragments.
    `own_sizes`: of this process's parts of them.
    """
    middles = [end - size / 2 for size, end in zip(sizes, accumulate(sizes), strict=True)]
    owners = [int(middle * num_fragments / max(1, sum(sizes))) for middle in middles]
    bounds = [sum(own_sizes[: bisect_left(owners, number)]) for number in range(num_fragments + 1)]
    return [slice(start, end) for start, end in pairwise(bounds)]


def list_due_fragments(train: TrainConfig, num_steps: int) -> list[int]:
    """List the fragments that are exchanged after so many steps: one at a time, and all after the last one."""
    num_fragments = train.outer.num_fragments
    turn = train.outer.steps // num_fragments
    if num_steps == train.steps:
        return list(range(num_fragments))
    return [(num_steps // turn - 1) % num_fragments] if num_steps % turn == 0 else []
